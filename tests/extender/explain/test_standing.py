"""What explain says of a job that is there: how it stands, where it is, and what was measured of it."""

from datetime import timedelta

import msgspec
import pytest
from asking_world import CLOCK, OPTIONS, RULES, explain_job, job_of, predicted, what_if
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.errors import NotFound
from carpool_core.resources.node import Tenant
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, SharingMode
from carpool_extender.cache.usage import SETTLED_S
from carpool_extender.explain.explain import NoSuchJobError, Options
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import T4, device, gpu_node, prediction, seed_job, seed_node, tenant
from carpool_extender.workloads import JobOptions


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        (
            [
                ("Predicted", "True", "Estimated", ""),
                ("Placed", "False", "Unschedulable", "0/2 nodes: 2 Insufficient cpu"),
            ],
            ["Queued: Placed is False (Unschedulable) 0/2 nodes: 2 Insufficient cpu"],
        ),
        (
            [("Placed", "False", "SchedulerError", "Post: connection refused")],
            ["Queued: Placed is False (SchedulerError) Post: connection refused", "kube-scheduler got no answer"],
        ),
        (
            [("Placed", "False", "PodForbidden", "no PriorityClass with name nope was found")],
            [
                "Queued: Placed is False (PodForbidden) no PriorityClass with name nope was found",
                "not all of its pods can be created; the rest of this answer assumes that they can",
            ],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Running", "False", "Starting", "the image is pulled")],
            ["Queued: Running is False (Starting) the image is pulled"],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Failed", "True", "BackoffLimit", "4 failures")],
            ["Queued: Failed is True (BackoffLimit) 4 failures"],
        ),
    ],
    ids=["unschedulable", "no answer", "no pods", "starting", "failed"],
)
async def test_explain_says_first_how_the_job_stands(conditions, told):
    kube = FakeKube()
    seed_job(kube, "x")
    listed = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) for one in conditions]
    await kube.patch(
        GPU_TRAINING_JOBS, "x", {"status": {"state": "Queued", "conditions": listed}}, namespace="default",
        subresource="status",
    )  # fmt: skip
    found = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert all(line.startswith(start) for line, start in zip(found, told, strict=False))
    has_ended = conditions[-1][0] == "Failed"
    assert found[len(told)] == ("default/x had no place when it ended" if has_ended else "default/x has no place yet")


async def test_a_gpunode_that_makes_no_sense_is_left_out_and_told():
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1))
    odd = msgspec.to_builtins(gpu_node("b", 1))
    odd["status"]["devices"][0]["memoryMib"] = "much"
    kube.seed(GPU_NODES, odd)
    found = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert any("GPU 0 of a" in line for line in found)
    assert [line for line in found if "GpuNode b" in line] == [
        "left out: GpuNode b is invalid: Expected `int`, got `str` - at `$.status.devices[0].memoryMib`"
    ]


async def test_of_a_job_that_has_ended_it_is_told_where_it_ran_and_nothing_is_rehearsed():
    """Regression: it had "no place yet", and every GPU of the cluster was gone through."""
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 2))
    place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "a", "gpuUuids": ["GPU-a-0"], "product": T4}
    ran = place | {"mode": "MPS", "reason": "least-slowdown: MPS on GPU 0 of a alone"}
    done = {"type": "Complete", "status": "True", "reason": "Complete", "message": "1 of 1 workers succeeded"}
    status = {"state": "Complete", "conditions": [done], "placement": [ran]}
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": status}, namespace="default", subresource="status")
    assert (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines == [
        "Complete: Complete is True (Complete) 1 of 1 workers succeeded",
        "x-worker-0-1 ran on a: least-slowdown: MPS on GPU 0 of a alone",
        "it has ended, so no decision is made for it",
    ]


async def test_a_job_that_is_not_there_is_called_so_and_a_kind_that_is_not_there_is_not():
    kube = FakeKube()
    with pytest.raises(NoSuchJobError, match=r"^no GpuTrainingJob nosuch in namespace team-a$"):
        await explain_job(kube, "nosuch", "team-a", RULES, OPTIONS)
    kube.fail_next("get", GPU_TRAINING_JOBS, NotFound("404 page not found", status=404))
    with pytest.raises(NotFound, match="404 page not found"):
        await explain_job(kube, "nosuch", "team-a", RULES, OPTIONS)


async def test_a_running_job_is_no_stranger_on_its_own_gpu():
    """Regression: what it uses counted as used without a reservation, on the very GPU that it has."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    node = gpu_node("a", 1, [mine])
    used = Tenant(pod_uid=mine.pod_uid, gpu_uuid=mine.gpu_uuids[0], memory_mib=3900)
    seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=[used])))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert not any("without a reservation" in line for line in told)
    assert "it is here" in told[-1]
    assert "fits by MPS" in told[-1]


async def test_what_was_measured_is_named_where_it_counts_in_place_of_what_was_predicted():
    """Regression: a decision changed after 90 s, and nobody said by what."""
    kube = FakeKube()
    busy = tenant("y", ["GPU-a-0"], prediction=prediction(util=90, sm=0.76))
    seen = Tenant(pod_uid=busy.pod_uid, gpu_uuid="GPU-a-0", memory_mib=100, gpu_util_percent=90.0, sm_active_ratio=0.68)
    for after_s, told in ((SETTLED_S - 1, False), (SETTLED_S + 1, True)):
        reserved_at = rfc3339(CLOCK.now() - timedelta(seconds=after_s))
        node = gpu_node("a", 2, [msgspec.structs.replace(busy, reserved_at=reserved_at)])
        status = msgspec.structs.replace(node.status, tenants=[seen], heartbeat_time=rfc3339(CLOCK.now()))
        seed_node(kube, msgspec.structs.replace(node, status=status))
        lines = (await what_if(kube, job_of(), RULES, predicted, OPTIONS)).lines
        first = next(line for line in lines if line.startswith("  GPU 0 of a"))
        assert first.endswith("; counts as measured: default/y (measured SM 68%, predicted 76%)") is told
        assert sum("measured" in line for line in lines if line.startswith("  ")) == told
        wrong = (await what_if(kube, job_of({"gpu": {"product": "T4"}}), RULES, predicted, OPTIONS)).lines
        assert not any("measured" in line for line in wrong[1:])


async def test_of_a_job_whose_status_tells_no_prediction_yet_it_is_said_so():
    kube = FakeKube()
    seed_job(kube, "x")
    kube.seed(GPU_TRAINING_JOBS, {**kube.dump(GPU_TRAINING_JOBS, "x", "default"), "status": {}})
    seed_node(kube, gpu_node("a", 1))
    found = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert found[0] == "its status has no prediction yet: the answer is that for a job of which nothing is known"
    seed_job(kube, "y")
    assert not any("prediction yet" in line for line in (await explain_job(kube, "y", "default", RULES, OPTIONS)).lines)


def place_workers(kube, reason="least-slowdown: MPS on GPU 0 of a alone", **node):
    """A job with its place on one of two GPUs, of which the other is fuller."""
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason=reason, policy="least-slowdown")
    seed_node(kube, gpu_node("a", 2, [mine, tenant("y", ["GPU-a-1"], memory_limit_mib=20000)], **node))


STAYS = "it keeps its place; decided now with policy"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        pytest.param("worst-fit", f"{STAYS} worst-fit it would go there again", id="there again"),
        pytest.param(
            "best-fit",
            f"{STAYS} best-fit it would go to a (a step takes about 100 ms there): best-fit: MPS on GPU 1 of a beside",
            id="elsewhere",
        ),
    ],
)
async def test_of_a_placed_job_it_is_told_where_another_policy_would_put_it_now(policy, said):
    """Regression: with another policy explain still told the place as it was written down, and nothing else."""
    kube = FakeKube()
    place_workers(kube)
    told = (await explain_job(kube, "x", "default", SchedulerConfig(find_policy(policy), 8), OPTIONS)).lines
    assert told[0] == "x has a place on a (a step takes about 100 ms there): least-slowdown: MPS on GPU 0 of a alone"
    assert told[1].startswith(said)
    assert told[2].startswith(f"places by {policy} (")


async def test_of_a_placed_job_that_would_find_no_place_any_more_it_is_told_that():
    kube = FakeKube()
    place_workers(kube)
    rules = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(min_free_mib=10**6))
    told = (await explain_job(kube, "x", "default", rules, OPTIONS)).lines
    why = "2 GPUs: at best free memory 40,960 MiB, the site's limit is 1,000,000 MiB"
    assert told[1] == f"{STAYS} least-slowdown it would have to wait: {why}"
    assert told[2].endswith("the site's limit is 1,000,000 MiB")


@pytest.mark.parametrize(
    ("full", "said"),
    [
        pytest.param(False, "it would go there again", id="room for all"),
        pytest.param(True, "it would have to wait: NoGpuFits: job default/x needs places for 2 workers", id="for one"),
    ],
)
async def test_all_workers_of_a_placed_job_are_decided_anew(full, said):
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x", spec={"workers": 2, "sharing": {"mode": "Exclusive"}}))
    mine = [
        msgspec.structs.replace(tenant(f"x-{i}", [f"GPU-a-{i}"], SharingMode.EXCLUSIVE), job_uid=uid) for i in range(2)
    ]
    sick = {"health": "Unhealthy"} if full else {}
    seed_node(kube, gpu_node("a", [device(0), device(1, **sick)], mine))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[2].startswith(f"{STAYS} least-slowdown {said}")


async def test_of_several_workers_it_is_told_where_each_would_go():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x", spec={"workers": 2, "sharing": {"mode": "Exclusive"}}))
    mine = [
        msgspec.structs.replace(tenant(f"x-{i}", [f"GPU-a-{i}"], SharingMode.EXCLUSIVE), job_uid=uid) for i in range(2)
    ]
    seed_node(kube, gpu_node("a", 3, mine))
    told = (await explain_job(kube, "x", "default", SchedulerConfig(find_policy("round-robin"), 8), OPTIONS)).lines
    assert told[2] == f"{STAYS} round-robin it would go there again"
    mine[1] = msgspec.structs.replace(mine[1], gpu_uuids=["GPU-a-2"])
    seed_node(kube, gpu_node("a", 3, mine))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[2] == f"{STAYS} least-slowdown it would go elsewhere: all 2 workers would get places now"
    assert told[3].startswith("  workers 0 to 1 would go to a (")
    assert "Exclusive on GPU 0 and 1 of a alone" in told[3]
    assert told[4].startswith("places by least-slowdown")


async def test_a_policy_that_the_job_chose_itself_counts_and_it_is_said():
    kube = FakeKube()
    place_workers(kube)
    body = kube.dump(GPU_TRAINING_JOBS, "x", "default")
    body["metadata"]["annotations"] = {"carpool.dev/policy": "best-fit"}
    kube.seed(GPU_TRAINING_JOBS, body)
    allowed = Options(CLOCK, JobOptions(policies=True))
    told = (await explain_job(kube, "x", "default", SchedulerConfig(find_policy("worst-fit"), 8), allowed)).lines
    assert told[1].startswith(f"{STAYS} best-fit it would go to a ")
    assert "its annotation carpool.dev/policy selects policy best-fit instead of worst-fit" in told
    refused = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert refused[0].startswith("x has a place on a")
    assert refused[1].startswith("PolicyNotAllowed: ")
    assert len(refused) == 2


@pytest.mark.parametrize(
    ("later", "said"),
    [
        pytest.param(0, "least-slowdown: MPS on GPU 0 of a alone", id="nobody"),
        pytest.param(2, "alone; joined since by default/l0, default/l1, not counted here", id="two"),
        pytest.param(
            7,
            "alone; joined since by default/l0, default/l1, default/l2, default/l3, default/l4, 2 more, "
            "not counted here",
            id="more than are named",
        ),
    ],
)
async def test_who_joined_a_place_since_is_named_beside_the_reason_from_before(later, said):
    """Regression: explain said `alone` of a job beside which others had come."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(
        tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: MPS on GPU 0 of a alone"
    )
    times = [rfc3339(CLOCK.now() + timedelta(seconds=number)) for number in range(later + 1)]
    others = [tenant(f"l{number}", ["GPU-a-0"], memory_limit_mib=1000) for number in range(later)]
    held = [msgspec.structs.replace(one, reserved_at=at) for one, at in zip([mine, *others], times, strict=True)]
    seed_node(kube, gpu_node("a", 1, held))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[0].endswith(said)


async def test_a_waiting_job_for_which_there_is_room_is_told_the_ranking():
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[:3] == [
        "default/x has no place yet",
        "places by least-slowdown (least progress lost by all tenants together; within 0.02 is a tie):",
        "  1. GPU 0 of a: 0.00 of slowdown added",
    ]
