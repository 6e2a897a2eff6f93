"""`carpool explain`: the state of a job, its places, and the decision for those of its workers that have none."""

from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import GATE_ADMISSION
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import Forbidden, NotFound
from carpool_core.resources.node import Tenant
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid, SharingMode
from carpool_extender.explain.explain import NoSuchJobError
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.filters import AdmissionLimits
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import (
    A100,
    T4,
    device,
    gpu_node,
    node_of,
    pod_of,
    prediction,
    seed_job,
    seed_node,
    tenant,
)
from carpool_extender.workloads import JobOptions
from explain_world import CLOCK, explain_job

ALONE = {"sharing": {"mode": "Exclusive"}}
STAYS = "it keeps its place; decided now with policy {} it would".format
STEP = "(a step takes about 100 ms there)"
WAITS = "would have to wait now: "


def config(policy="least-slowdown", **limits):
    return SchedulerConfig(find_policy(policy), 8, AdmissionLimits(**limits))


async def explained(kube, policy="least-slowdown", options=None, **limits):
    return (await explain_job(kube, "x", "default", config(policy, **limits), options or Options(CLOCK))).lines


async def set_status(kube, **status):
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": status}, namespace="default", subresource="status")


def held(number, *gpus, mode=SharingMode.EXCLUSIVE, **changes):
    """The reservation of a worker of job x."""
    fields = {name: changes.pop(name) for name in ("reason", "reserved_at", "expected_slowdown") if name in changes}
    one = tenant("x", gpus, mode, **changes)
    return msgspec.structs.replace(one, pod_uid=PodUid(f"pod-{number}"), pod_name=f"x-worker-{number}-1", **fields)


GATED = {"schedulingGates": [{"name": GATE_ADMISSION}]}


def a_job(workers=1, gpus=1, *reservations, phases=(), spec=ALONE, **predicts):
    """Job x, the pods of its workers, and a node of some GPUs with these reservations."""
    kube = FakeKube()
    seed_job(kube, "x", spec={"workers": workers, **spec}, **predicts)
    seed_node(kube, gpu_node("a", gpus, reservations))
    seed_workers(kube, *phases)
    return kube


def seed_workers(kube, *phases, job="x", attempt=1):
    for number, phase in enumerate(phases):
        uid = f"pod-{number}" if (job, attempt) == ("x", 1) else f"{job}-{attempt}-{number}"
        pod = pod_of(job, uid=uid, **(GATED if phase == "Pending" else {"nodeName": "a"} if phase == "Running" else {}))
        pod["metadata"]["name"] = f"{job}-worker-{number}-{attempt}"
        kube.seed(PODS, pod | {"status": {"phase": phase}})
    record(kube, job, attempt)


def record(kube, job="x", attempt=1):
    """Record the UIDs of the pods in the status of their job, as the operator does."""
    pods = [pod["metadata"] for pod in kube.dump_all(PODS)]
    uids = [meta["uid"] for meta in pods if meta["name"].startswith(f"{job}-") and meta["name"].endswith(f"-{attempt}")]
    for body in (body for body in kube.dump_all(GPU_TRAINING_JOBS) if body["metadata"]["name"] == job):
        attempts = [{"number": attempt, "podUids": uids}]
        kube.seed(GPU_TRAINING_JOBS, body | {"status": body["status"] | {"attempts": attempts}})


class TestState:
    """The first lines are the state of the job."""

    ASSUMED = "not all of its pods can be created; the rest of this answer assumes that they can"

    @pytest.mark.parametrize(
        ("reason", "message", "advice"),
        [
            pytest.param("Unschedulable", "0/2 nodes: 2 Insufficient cpu", [], id="unschedulable"),
            pytest.param("SchedulerError", "connection refused", ["kube-scheduler got no answer"], id="no answer"),
            pytest.param("PodForbidden", "no PriorityClass with name nope was found", [ASSUMED], id="no pods"),
        ],
    )
    async def test_condition_that_explains_the_state_comes_first(self, reason, message, advice):
        kube = a_job()
        placed = {"type": "Placed", "status": "False", "reason": reason, "message": message}
        await set_status(kube, state="Queued", conditions=[placed])
        lines, expected = await explained(kube), [f"Queued: Placed is False ({reason}) {message}", *advice]
        assert all(line.startswith(start) for line, start in zip(lines, expected, strict=False))
        assert lines[len(expected)] == "default/x has no place yet"

    @pytest.mark.parametrize(
        ("kind", "placed", "expected"),
        [
            pytest.param("Complete", True, "x-worker-0-1 ran on a: least-slowdown: MPS on GPU 0 of a alone", id="done"),
            pytest.param("Failed", False, "default/x had no place when it ended", id="failed"),
        ],
    )
    async def test_ended_job_has_its_last_places_and_no_decision(self, kind, placed, expected):
        kube = a_job()
        place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "a", "gpuUuids": ["GPU-a-0"], "product": T4}
        ran = place | {"mode": "MPS", "reason": "least-slowdown: MPS on GPU 0 of a alone"}
        condition = {"type": kind, "status": "True", "reason": "Because", "message": "1 of 1 workers"}
        await set_status(kube, state=kind, conditions=[condition], placement=[ran] * placed)
        ended = "it has ended, so no decision is made for it"
        assert await explained(kube) == [f"{kind}: {kind} is True (Because) 1 of 1 workers", expected, ended]

    async def test_missing_job_differs_from_a_missing_resource_type(self):
        kube = FakeKube()
        with pytest.raises(NoSuchJobError, match=r"^no GpuTrainingJob x in namespace default$"):
            await explained(kube)
        kube.fail_next("get", GPU_TRAINING_JOBS, NotFound("404 page not found", status=404))
        with pytest.raises(NotFound, match="404 page not found"):
            await explained(kube)

    async def test_missing_prediction_is_named(self):
        kube, line = a_job(), "its status has no prediction yet: the answer is that for a job of which nothing is known"
        assert line not in await explained(kube)
        kube.seed(GPU_TRAINING_JOBS, {**kube.dump(GPU_TRAINING_JOBS, "x", "default"), "status": {}})
        assert (await explained(kube))[0] == line


class TestMemoryWarning:
    """A job that may not fit a GPU although it is tried there: the first line says so."""

    START = f"may not fit {A100} (median 30,000, at most 175,000 of 40,960 MiB): it gets such a GPU alone"

    def a_large_job(self, *reservations, **memory):
        kube = a_job(1, 1, *reservations, spec={})
        body = kube.dump(GPU_TRAINING_JOBS, "x", "default")
        products = body["status"]["prediction"]["products"]
        for one in products:
            one["memory"] |= {"medianMib": 30_000, "upperMib": 175_000, "trusted": False} | memory
        kube.seed(GPU_TRAINING_JOBS, body)
        return kube

    @pytest.mark.parametrize("is_placed", [False, True])
    async def test_it_is_the_first_line(self, is_placed):
        lines = await explained(self.a_large_job(*[held(0, "GPU-a-0")] * is_placed))
        assert lines[0].startswith(self.START)
        assert lines[0].endswith("and is refused that product once it ran out of memory there")

    @pytest.mark.parametrize(
        "memory", [{"upperMib": 30_000}, {"trusted": True}, {"learnedRuns": 1}], ids=["fits", "refused", "ran"]
    )
    async def test_other_jobs_have_none(self, memory):
        assert not any("may not fit" in line for line in await explained(self.a_large_job(**memory)))

    async def test_a_job_whose_peak_was_measured_has_none(self):
        one = held(0, "GPU-a-0")
        profile = msgspec.structs.replace(one.tenant, provisional=True, measured_mib=20_000)
        of = self.a_large_job(msgspec.structs.replace(one, tenant=profile))
        assert not any("may not fit" in line for line in await explained(of))


class TestTemplate:
    """The pod template of a job decides which nodes it accepts."""

    async def explained(self, **template):
        kube = a_job(spec={**ALONE, "template": {"spec": template}})
        kube.seed(NODES, node_of("a"))
        return await explained(kube)

    async def test_nulls_and_fractions_of_cpus_are_as_for_kubernetes(self):
        """Regression: with them, the node selector was ignored as well."""
        container = {"name": "train", "env": None, "resources": {"limits": {"cpu": 0.5}}}
        lines = await self.explained(nodeSelector={"zone": "b"}, affinity=None, containers=[container])
        assert f"{WAITS}1 node: its node lacks the label zone=b of the job's nodeSelector" in lines

    async def test_an_invalid_template_is_named_instead_of_a_decision(self):
        assert await self.explained(nodeSelector={"zone": 3}) == [
            "InvalidTemplate: no decision, because spec.template.spec is invalid: "
            "Expected `str`, got `int` - at `$.nodeSelector[...]`"
        ]


class TestWaitingJob:
    """A job without a place gets the reason, the change that would help, and a line for each GPU."""

    async def test_reason_and_advice(self):
        lines = await explained(a_job(1, 1, tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE)))
        assert lines == [
            "default/x has no place yet",
            f"{WAITS}1 GPU: used exclusively by default/y",
            "it would have a place once GPU 0 of a is free (default/y is there)",
            "  GPU 0 of a (NVIDIA A100-SXM4-40GB): used exclusively by default/y",
        ]

    async def test_place_and_ranking_if_there_is_room(self):
        lines = await explained(a_job())
        assert lines[0] == "default/x has no place yet"
        assert lines[1].startswith(f"would go to a {STEP}: least-slowdown: Exclusive on GPU 0 of a alone")
        assert lines[2].startswith("places by least-slowdown (")

    async def test_no_gpu_is_reported(self):
        kube = FakeKube()
        seed_job(kube, "x")
        assert (await explained(kube))[-1] == "  no node reports GPUs; is the node agent running?"

    async def test_user_of_the_template_counts(self):
        template = {"spec": {"containers": [{"name": "train", "securityContext": {"runAsUser": 2000}}]}}
        kube = a_job(1, 1, tenant("y", ["GPU-a-0"], user=1000), spec={"template": template})
        assert (await explained(kube))[-1].endswith("serves user 1000, and the job runs as user 2000")


class TestPlacedJob:
    """A place is listed with its reason, and compared with a decision made now."""

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            pytest.param("worst-fit", f"{STAYS('worst-fit')} go there again", id="same"),
            pytest.param(
                "best-fit", f"{STAYS('best-fit')} go to a {STEP}: best-fit: MPS on GPU 1 of a beside", id="elsewhere"
            ),
        ],
    )
    async def test_place_its_reason_and_the_decision_now(self, policy, expected):
        reason = "least-slowdown: MPS on GPU 0 of a alone"
        mine = held(0, "GPU-a-0", mode=SharingMode.MPS, reason=reason)
        kube = a_job(1, 2, mine, tenant("y", ["GPU-a-1"], memory_limit_mib=20000), spec={})
        lines = await explained(kube, policy)
        assert lines[0] == f"x-worker-0-1 has a place on a {STEP}: {reason}"
        assert lines[1].startswith(expected)
        assert lines[2].startswith(f"places by {policy} (")
        gpus = [line for line in lines if line.startswith("  GPU")]
        assert "it is here; without it: fits by MPS, leaves 36,960 MiB" in gpus[0]
        assert "fits by MPS, leaves 16,960 MiB" in gpus[1]

    async def test_step_time_is_that_of_the_reservation(self):
        mine = held(0, "GPU-a-0", expected_slowdown=1.5, reason="beside y")
        lines = await explained(a_job(1, 1, mine, spec={"training": {"steps": 3600}}))
        place = "x-worker-0-1 has a place on a (a step takes about 150 ms there, 3,600 steps 9 min)"
        assert lines[0] == f"{place}: beside y"

    async def test_place_that_it_would_not_get_now(self):
        lines = await explained(a_job(1, 1, held(0, "GPU-a-0")), min_free_mib=10**6)
        why = "1 node: free memory 40,960 MiB, the site's limit is 1,000,000 MiB"
        assert lines[1] == f"{STAYS('least-slowdown')} have to wait: {why}"

    async def test_own_usage_is_not_that_of_a_stranger(self):
        """Regression: its own use counted as used without a reservation, on the very GPU that it has."""
        mine = held(0, "GPU-a-0")
        node = gpu_node("a", 1, [mine])
        used = Tenant(pod_uid=mine.pod_uid, gpu_uuid=mine.gpu_uuids[0], memory_mib=3900)
        kube = a_job()
        seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=[used])))
        assert "it is here; without it: fits by Exclusive" in (await explained(kube))[-1]

    async def test_later_co_tenants_are_named(self):
        """Regression: explain called a place alone although other tenants had joined."""
        times = [rfc3339(CLOCK.now() + timedelta(seconds=number)) for number in range(2)]
        mine = held(0, "GPU-a-0", mode=SharingMode.MPS, reason="alone", reserved_at=times[0])
        other = msgspec.structs.replace(tenant("y", ["GPU-a-0"], memory_limit_mib=1000), reserved_at=times[1])
        lines = await explained(a_job(1, 1, mine, other, spec={}))
        assert lines[0].endswith("alone; joined since by default/y, not counted here")

    @pytest.mark.parametrize("own", [["GPU-a-7"], ["GPU-a-0", "GPU-a-7"], ["GPU-a-0"]])
    async def test_gpu_that_its_node_no_longer_reports_is_named(self, own):
        lines = await explained(a_job(1, 3, held(0, *own, reason="alone")))
        assert lines[0].partition("alone")[2] == ("; a does not report GPU-a-7 now" if "GPU-a-7" in own else "")

    async def test_policy_of_the_job_counts_if_the_site_allows_it(self):
        kube = a_job(1, 2, held(0, "GPU-a-0", mode=SharingMode.MPS), tenant("y", ["GPU-a-1"]), spec={})
        body = kube.dump(GPU_TRAINING_JOBS, "x", "default")
        body["metadata"]["annotations"] = {"carpool.dev/policy": "best-fit"}
        kube.seed(GPU_TRAINING_JOBS, body)
        lines = await explained(kube, "worst-fit", Options(CLOCK, JobOptions(policies=True)))
        assert lines[1].startswith(f"{STAYS('best-fit')} go to a ")
        assert "its annotation carpool.dev/policy selects policy best-fit instead of worst-fit" in lines
        place, refusal = await explained(kube)
        assert place.startswith("x-worker-0-1 has a place on a")
        assert refusal.startswith("PolicyNotAllowed: ")

    async def test_measurement_that_counts_is_named(self):
        """Regression: a decision changed after 90 s without a visible cause."""
        kube = a_job(spec={})
        busy = tenant("y", ["GPU-a-0"], prediction=prediction(util=90, sm=0.76))
        usage = {"memory_mib": 100, "gpu_util_percent": 90.0, "sm_active_ratio": 0.68}
        for counts in (False, True):
            seen = Tenant(pod_uid=busy.pod_uid, gpu_uuid="GPU-a-0", settled=counts, **usage)
            node = gpu_node("a", 2, [busy])
            status = msgspec.structs.replace(node.status, tenants=[seen])
            seed_node(kube, msgspec.structs.replace(node, status=status))
            lines = [line for line in await explained(kube) if line.startswith("  GPU")]
            assert lines[0].endswith("; counts as measured: default/y (measured SM 68%, predicted 76%)") is counts
            assert sum("measured" in line for line in lines) == counts
        seed_job(kube, "x", spec={"gpu": {"product": "T4"}})
        assert not any("counts as measured" in line for line in await explained(kube)), "it decides nothing there"


class TestGang:
    """Each worker has a place, waits, or is done; only those without a place are decided."""

    @pytest.mark.parametrize(
        ("gpus", "mode", "policy", "expected"),
        [
            pytest.param([0, 1, 2], "MPS", "best-fit", "go there again", id="same"),
            pytest.param([2, 0, 1], "MPS", "best-fit", "go there again", id="same for other workers"),
            pytest.param([0, 0, 1], "MPS", "best-fit", "go elsewhere: all 3 workers", id="on GPUs of their own"),
            pytest.param([0, 1, 2], "Exclusive", "round-robin", "go there again", id="exclusive"),
        ],
    )
    async def test_all_places_are_compared_with_a_decision_now(self, gpus, mode, policy, expected):
        takes = {"memory_mib": 15000, "util": 5, "sm": 0.05, "dram": 0.05}
        places = [
            held(n, f"GPU-a-{g}", mode=SharingMode(mode), prediction=prediction(**takes)) for n, g in enumerate(gpus)
        ]
        spec = {} if mode == "MPS" else ALONE
        lines = await explained(a_job(3, 3, *places, phases=3 * ("Running",), spec=spec, **takes), policy)
        assert lines[3].startswith(f"{STAYS(policy)} {expected}")

    async def test_workers_of_equal_places_share_a_line(self):
        lines = await explained(a_job(2, 3, held(0, "GPU-a-0"), held(1, "GPU-a-2")))
        assert lines[2] == f"{STAYS('least-slowdown')} go elsewhere: all 2 workers would get places now"
        assert lines[3].startswith("  2 workers would go to a (")
        assert "Exclusive on GPU 0 and 1 of a alone" in lines[3]

    async def test_placed_gang_without_room_for_all_would_have_to_wait(self):
        kube = a_job(2, 2, held(0, "GPU-a-0"), held(1, "GPU-a-1"))
        sick = [device(0), device(1, health="Unhealthy")]
        seed_node(kube, gpu_node("a", sick, [held(0, "GPU-a-0"), held(1, "GPU-a-1")]))
        waits = "have to wait: job default/x needs places for 2 workers"
        assert (await explained(kube))[2].startswith(f"{STAYS('least-slowdown')} {waits}")

    @pytest.mark.parametrize(
        ("phases", "expected"),
        [
            pytest.param(("Running", "Pending"), "2 of 3 workers have no place: {}: x-worker-1-1", id="one pod"),
            pytest.param(("Running",), "2 of 3 workers have no place: {}", id="no pod"),
            pytest.param(("Running", "Pending", "Succeeded"), "1 of 3 workers has no place: {1} waits", id="done"),
            pytest.param(("Pending", "Succeeded", "Pending"), "1 of 3 workers has no place: {2} waits", id="starting"),
            pytest.param(
                ("Running", "Failed", "Pending"), "2 of 3 workers have no place: {}: x-worker-2-1", id="failed"
            ),
            pytest.param(("Running", *2 * ("Pending",)), "2 of 3 workers have no place: {1} and {2} wait", id="both"),
        ],
    )
    async def test_workers_without_a_place_are_named_by_their_pods(self, phases, expected):
        kube = a_job(3, 3, held(0, "GPU-a-0"), phases=phases)
        seed_workers(kube, "Succeeded", "Pending", job="y")
        leaving = pod_of("x", uid="pod-leaving")
        leaving["metadata"] |= {"name": "x-worker-1-0", "deletionTimestamp": "2026-01-01T00:00:00Z"}
        kube.seed(PODS, leaving)
        missing = "not all of their pods exist yet"
        named = expected.replace("{}", missing).replace("{1}", "x-worker-1-1").replace("{2}", "x-worker-2-1")
        assert (await explained(kube))[1] == named

    @pytest.mark.parametrize(
        ("gpus", "expected"),
        [
            pytest.param(2, "would go to a (", id="room"),
            pytest.param(1, f"{WAITS}1 GPU: used exclusively by default/x", id="no room"),
        ],
    )
    async def test_worker_without_a_place_is_decided_beside_the_others(self, gpus, expected):
        """Regression: the whole job would go elsewhere, or the worker with the only GPU waited."""
        lines = await explained(a_job(2, gpus, held(0, "GPU-a-0"), phases=("Running", "Pending")))
        decision = next(line for line in lines[2:] if "in the queue" not in line)
        assert decision.startswith(expected)
        assert not any("it is here" in line for line in lines)

    async def test_rest_of_a_gang_waits_as_a_whole(self):
        lines = await explained(a_job(4, 3, held(0, "GPU-a-0"), phases=("Running", *3 * ("Pending",))))
        assert any(line.startswith(f"{WAITS}job default/x needs places for 3 workers of 1 GPU") for line in lines)

    @pytest.mark.parametrize(
        ("workers", "reservations", "phases", "expected"),
        [
            pytest.param(3, (), ("Succeeded", "Succeeded", "Pending"), "would go to a (", id="one left"),
            pytest.param(3, (), ("Succeeded", "Pending", "Pending"), "needs places for 2 workers", id="two left"),
            pytest.param(2, (), ("Succeeded", "Succeeded"), "all of its 2 workers have succeeded", id="none left"),
            pytest.param(3, (0, 1), ("Running", "Running", "Succeeded"), "go there again", id="the others are placed"),
            pytest.param(2, (0, 1), ("Succeeded", "Running"), "go there again", id="its reservation is there yet"),
            pytest.param(2, (0, 1, 2), ("Running", "Running", "Failed"), "it has 3 places for 2 workers until an ended "
                         "worker's reservation is released; not compared", id="more places than workers"),
        ],
    )  # fmt: skip
    async def test_workers_that_have_succeeded_need_no_place(self, workers, reservations, phases, expected):
        mine = [held(number, f"GPU-a-{number}") for number in reservations]
        lines = await explained(a_job(workers, max(1, len(mine)), *mine, phases=phases))
        assert any(expected in line for line in lines)

    async def test_pods_of_earlier_attempts_do_not_count(self):
        """Regression: a worker that had succeeded in the attempt before needed no place."""
        kube = a_job(3, 3, phases=("Succeeded", "Failed", "Failed"))
        seed_node(kube, gpu_node("a", 3, [tenant("y", ["GPU-a-0"])]))
        seed_workers(kube, *3 * ("Pending",), attempt=2)
        assert any(f"{WAITS}job default/x needs places for 3 workers" in line for line in await explained(kube))

    @pytest.mark.parametrize(
        ("workers", "expected"),
        [
            pytest.param(2, "1 of 2 workers has no place: it waits, or has succeeded", id="one"),
            pytest.param(3, "2 of 3 workers have no place: they wait, or have succeeded", id="two"),
        ],
    )
    async def test_unread_pods_leave_it_open(self, workers, expected):
        unread = "(you may not list pods in namespace default)"
        kube = a_job(workers, 2, held(0, "GPU-a-0"), phases=("Running", "Succeeded"))
        kube.fail_next("list", PODS, Forbidden("no", status=403))
        assert (await explained(kube))[1] == f"{expected} {unread}"
        kube = a_job(workers, 1, phases=("Succeeded", "Pending"))
        kube.fail_next("list", PODS, Forbidden("no", status=403))
        assert (await explained(kube))[1] == f"some workers may have succeeded already {unread}"

    async def test_pods_are_read_only_if_the_answer_depends_on_them(self):
        kube = a_job(2, 2, held(0, "GPU-a-0"), held(1, "GPU-a-1"))
        await explained(kube)
        assert [call for call in kube.calls if call.verb == "list" and call.plural == PODS.plural] == []


class TestUnreported:
    """Workers on nodes that report no GPUs, and nodes that should report some."""

    @staticmethod
    async def running(pod="Running", workers=1, *, is_placed=True):
        """Job x runs on node b by its status, and there is no GpuNode b."""
        kube = a_job(workers, 1, spec={"memory": {"limit": "200Gi"}})
        if pod:
            kube.seed(PODS, pod_of("x", uid="u", nodeName="b") | {"status": {"phase": pod}})
            record(kube)
        place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "b", "gpuUuids": ["GPU-b-0"], "product": T4}
        place |= {"mode": "MPS", "reason": "alone"}
        await set_status(kube, state="Running", placement=[place] * is_placed)
        return kube

    @pytest.mark.parametrize("may_list", [True, False])
    async def test_running_worker_has_its_place_and_no_decision(self, may_list):
        """Regression: it ran, had no place yet, and would have had one with less memory."""
        kube = await self.running()
        if not may_list:
            kube.fail_next("list", PODS, Forbidden("no", status=403))
        place, gpu = await explained(kube)
        assert place == "x-worker-0-1 has a place on b: alone; no GPUs of b are reported now"
        assert gpu.startswith("  GPU 0 of a ")

    async def test_running_pod_counts_before_the_status_has_its_place(self):
        lines = await explained(await self.running(workers=2, is_placed=False))
        assert lines[0] == "x-worker-0-1 runs on b; no GPUs of b are reported now"
        assert lines[1] == "1 of 2 workers has no place: not all of their pods exist yet"

    async def test_reservation_on_a_dead_node_is_of_an_earlier_attempt(self):
        kube = a_job(1, 2, held(0, "GPU-a-0"), phases=("Running",))
        lost = kube.dump(PODS, "x-worker-0-1", "default")
        kube.seed(PODS, lost | {"metadata": lost["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        seed_workers(kube, "Pending", attempt=2)
        seed_job(kube, "y", spec=ALONE)
        seed_workers(kube, "Pending", job="y")
        await set_status(kube, attempts=[{"number": 2, "outcome": "Creating", "podUids": ["x-2-0"]}])
        found = await explained(kube)
        lost = "x-worker-0-1 of an earlier attempt still holds GPUs of a: its container may run there"
        assert found[:2] == [lost, "default/x has no place yet"]
        assert "place in the queue: 1st of 2 pending jobs" in found[2]
        assert "it can start now" in found[2]
        assert not any("would have to wait" in line for line in found)

    async def test_missing_reservation_is_named(self):
        kube = await self.running()
        seed_node(kube, gpu_node("b", 1))
        assert (await explained(kube))[0].endswith("alone; its reservation is missing in the GpuNode")

    @pytest.mark.parametrize("pod", ["Failed", "Succeeded", None])
    async def test_place_of_an_ended_worker_is_none(self, pod):
        lines = await explained(await self.running(pod=pod))
        if pod == "Succeeded":
            assert lines[:2] == ["default/x has no place yet", "its worker has succeeded"]
        else:
            assert lines[0].startswith("could never run here: no node has GPUs that would do")

    @pytest.mark.parametrize(
        ("labels", "is_named"),
        [
            pytest.param({"carpool.dev/node": "managed"}, True, id="labelled for Carpool"),
            pytest.param({"pool": "training"}, False, id="another node"),
        ],
    )
    async def test_labelled_node_without_gpus_is_named(self, labels, is_named):
        kube = a_job()
        kube.seed(NODES, {"metadata": {"name": "b", "labels": labels}})
        question = "is the node agent running there?"
        assert ((await explained(kube))[-1] == f"  b reports no GPUs: {question}") is is_named
        for number in range(4):
            kube.seed(NODES, {"metadata": {"name": f"c{number}", "labels": labels}})
        many = f"  5 nodes report no GPUs (b, c0, c1 and 2 more): {question}"
        assert ((await explained(kube))[-1] == many) is is_named
        each = await explained(kube, options=Options(CLOCK, each_gpu=True))
        assert (each[-1] == f"  c3 reports no GPUs: {question}") is is_named

    async def test_gpu_nodes_without_devices_are_named_without_rights_on_nodes(self):
        kube = a_job()
        seed_node(kube, gpu_node("b", 0))
        kube.fail_next("list", NODES, Forbidden("no", status=403))
        *_, without_gpus, unread = await explained(kube)
        assert without_gpus.startswith("  b reports no GPUs")
        assert unread.startswith("you may not list Nodes: ")

    async def test_invalid_gpu_node_is_left_out_and_named(self):
        kube = a_job()
        odd = msgspec.to_builtins(gpu_node("b", 1))
        odd["status"]["devices"][0]["memoryMib"] = "much"
        kube.seed(GPU_NODES, odd)
        lines = await explained(kube)
        why = "Expected `int`, got `str` - at `$.status.devices[0].memoryMib`"
        assert lines[-1] == f"left out: GpuNode b is invalid: {why}"
        assert lines[-2].startswith("  GPU 0 of a")
