"""The place of a job in the queue and its expected start: `SchedulingQueue` on a copy of the cluster."""

import json
from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import CONDITION_ADMITTED, GATE_ADMISSION
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden, Invalid
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, PodUid
from carpool_extender.explain import commands, queue_forecast
from carpool_extender.explain.commands import queue
from carpool_extender.explain.queue_forecast import ADMITTED, Options
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import device, gpu_node, pod_of, seed_job, seed_node, seed_pod, tenant
from carpool_extender.workloads import ANNOTATION_POLICY
from click.testing import CliRunner
from explain_world import CLOCK, RULES, explain_job, job_of, predicted, served, what_if

ARRIVAL = QueueOrder.ARRIVAL
EXCLUSIVE = {"sharing": {"mode": "Exclusive"}}
UNKNOWN, KUEUE = "place in the queue unknown: ", "kueue.x-k8s.io/admission"


def a_queue(**lengths):
    """A GPU that job `first` has for 6,000 steps of 0.1 s, and pending jobs: minute of arrival and steps by name."""
    kube = FakeKube()
    taken = msgspec.structs.replace(tenant("first", ["GPU-a-0"]), job_uid=JobUid("job-first"))
    seed_node(kube, gpu_node("a", 1, [msgspec.structs.replace(taken, reserved_at=rfc3339(CLOCK.now()))]))
    seed_job(kube, "first", spec={"training": {"steps": 6000}})
    for name, (minute, steps) in lengths.items():
        add(kube, name, minute, steps)
    return kube


GATED = {"schedulingGates": [{"name": GATE_ADMISSION}]}


def add(kube, name, minute=0, steps=None, *, spec=EXCLUSIVE, workers=1, **pod):
    """A job whose gated pods were created in a minute."""
    seed_job(kube, name, spec={"training": {"steps": steps}, "workers": workers, **spec})
    for worker in range(workers):
        body = pod_of(name, worker=worker, gpus=spec.get("gpusPerWorker", 1), **(GATED | pod))
        body["metadata"]["creationTimestamp"] = f"2026-01-01T00:{minute:02}:00Z"
        kube.seed(PODS, body)


async def place(kube, job, order=ARRIVAL):
    lines = (await explain_job(kube, job, "default", RULES, Options(CLOCK, order=order))).lines
    return [line for line in lines if "in the queue" in line]


async def place_of_new(kube, order=ARRIVAL, **spec):
    lines = (await what_if(kube, job_of(EXCLUSIVE | spec), RULES, predicted, Options(CLOCK, order=order))).lines
    return [line for line in lines if "in the queue" in line]


FIVE = {"a": (0, 600), "b": (1, 10**9), "c": (2, 10**6), "d": (3, None), "e": (30, 10**9)}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param(ARRIVAL, "abcde", id="arrival"),
        pytest.param(QueueOrder.LONGEST_FIRST, "becda", id="longest first"),
        pytest.param(QueueOrder.ALTERNATE, "bacde", id="alternate"),
    ],
)
async def test_place_follows_the_order_of_the_site(order, expected):
    kube = a_queue(**FIVE)
    for number, name in enumerate(expected):
        (line,) = await place(kube, name, order)
        place_now = f"{number + 1}{['st', 'nd', 'rd', 'th', 'th'][number]}"
        assert line.startswith(f"place in the queue: {place_now} of 5 pending jobs by the order {order}")
        assert (", behind default/" in line) == (number > 0)


async def test_expected_start_adds_the_predicted_ends_of_running_jobs_and_of_jobs_ahead():
    kube = a_queue(a=(0, 600), b=(1, 1200), c=(2, 600))
    head = "place in the queue: {} of 3 pending jobs by the order Arrival"
    assert await place(kube, "a") == [f"{head.format('1st')}; expected start in about 10 min"]
    assert await place(kube, "b") == [f"{head.format('2nd')}, behind default/a; expected start in about 11 min"]
    assert await place(kube, "c") == [
        f"{head.format('3rd')}, behind default/a, default/b; expected start in about 13 min"
    ]


async def test_expected_start_follows_the_measured_end_of_a_running_job():
    kube = a_queue(a=(0, 600))
    observed = {"status": {"observed": {"expectedEnd": rfc3339(CLOCK.now() + timedelta(minutes=25))}}}
    await kube.patch(GPU_TRAINING_JOBS, "first", observed, namespace="default", subresource="status")
    (line,) = await place(kube, "a")
    assert line.endswith("expected start in about 25 min")


@pytest.mark.parametrize(
    ("steps", "prediction", "expected"),
    [
        pytest.param(600, True, "it counts as 60 s long", id="predicted"),
        pytest.param(None, True, "it counts as 60 min long, because it has no spec.training.steps", id="no steps"),
        pytest.param(
            600, False, "it counts as 60 min long, because its step time is not predicted", id="no prediction"
        ),
    ],
)
async def test_length_by_which_a_job_is_sorted_is_named(steps, prediction, expected):
    kube = a_queue(a=(0, steps))
    if not prediction:
        status = {"status": {"prediction": None}}
        await kube.patch(GPU_TRAINING_JOBS, "a", status, namespace="default", subresource="status")
    (line,) = await place(kube, "a", QueueOrder.ALTERNATE)
    assert f"by the order Alternate ({expected});" in line


async def test_reason_is_the_one_that_the_queue_writes():
    """GPU b is reserved in time for `large`: `long` would delay it, `short` ends before."""
    kube = a_queue()
    seed_node(kube, gpu_node("b", 1))
    add(kube, "large", workers=2)
    add(kube, "long", 1, 60_000)
    add(kube, "short", 2, 600)

    async def explained(name):
        return (await explain_job(kube, name, "default", RULES, Options(CLOCK, order=ARRIVAL))).lines

    room = "needs places for 2 workers of 1 GPU at once, there is room for 1; none starts before all can"
    assert (await explained("large"))[2] == f"would have to wait now: job default/large {room}"
    free = "free GPUs are reserved for job default/large, which comes first and would start later"
    long = await explained("long")
    assert long[1].endswith(
        "2nd of 3 pending jobs by the order Arrival, behind default/large; its start is unknown because of 1 job of "
        "unknown length; the queue assumes about 70 min"
    )
    assert long[2] == f"would have to wait now: {free}"
    short = await explained("short")
    assert short[1].endswith("behind default/large, default/long; it can start now")
    assert short[2].startswith("would go to b ")


async def test_job_that_fits_at_no_predicted_end_has_no_expected_start():
    kube = a_queue()
    seed_node(kube, gpu_node("b", [device(0, health="Unhealthy")]))
    add(kube, "wide", workers=2)
    (line,) = await place(kube, "wide")
    assert line.endswith("; it would not fit even after all running jobs have ended")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param(6000, "expected start in about 10 min", id="known"),
        pytest.param(
            None,
            "its start is unknown because of 1 job of unknown length; the queue assumes about 60 min",
            id="unknown",
        ),
    ],
)
async def test_memory_that_running_jobs_use_is_free_after_their_end(steps, expected):
    """Regression: it counted as that of processes without a reservation, beside which no job that is alone fits."""
    kube = a_queue(a=(0, 600))
    seed_job(kube, "first", spec={"training": {"steps": steps}})
    node = kube.dump(GPU_NODES, "a")
    node["status"]["tenants"] = [{"podUid": "pod-first", "gpuUuid": "GPU-a-0", "memoryMib": 5000}]
    kube.seed(GPU_NODES, node)
    (line,) = await place(kube, "a")
    assert line.endswith(f"; {expected}")


async def test_start_far_behind_is_not_forecast(monkeypatch):
    monkeypatch.setattr(queue_forecast, "MAX_FORECAST", 5)
    kube = a_queue(**{f"j{number}": (0, 600 + number) for number in range(6)})
    (line,) = await place(kube, "j4")
    assert ", behind default/j0, default/j1, default/j2, 1 more; expected start in about " in line
    (line,) = await place(kube, "j5")
    assert line.endswith("; its start is not forecast, because 5 jobs or more are ahead")


async def test_higher_priority_comes_first_by_the_highest_of_its_pods():
    kube = a_queue(a=(0, 10))
    add(kube, "urgent", 59, spec=EXCLUSIVE, workers=2)
    kube.seed(PODS, pod_of("urgent", worker=1, priority=10, **GATED))
    seed_node(kube, gpu_node("b", 1, [tenant("stranger", ["GPU-b-0"])]))
    assert "2nd of 2 pending jobs" in (await place(kube, "a"))[0]
    assert "1st of 2 pending jobs" in (await place(kube, "urgent"))[0]


async def test_new_job_comes_after_the_pending_ones():
    kube = a_queue(**FIVE)
    assert "6th of 6 pending jobs" in (await place_of_new(kube))[0]


@pytest.mark.parametrize(
    ("template", "others"),
    [
        pytest.param({"spec": {"priorityClassName": "high", "containers": []}}, 0, id="its template has a class"),
        pytest.param({}, 10, id="others have a priority, which may be the default"),
    ],
)
async def test_priority_of_a_new_job_is_unknown_where_there_are_classes(template, others):
    kube = a_queue()
    add(kube, "a", priority=others)
    assert await place_of_new(kube, template=template) == [f"{UNKNOWN}its priority is known once its pods exist"]


async def test_rest_of_a_gang_comes_first():
    """Regression: it was left out, and a younger job was the first."""
    kube = a_queue(b=(0, 10))
    add(kube, "gang", 30, workers=2)
    kube.seed(PODS, pod_of("gang"))
    first = msgspec.structs.replace(tenant("gang", ["GPU-b-0"]), job_uid=JobUid("job-gang"), pod_uid=PodUid("pod-gang"))
    seed_node(kube, gpu_node("b", 1, [first]))
    assert "2nd of 2 pending jobs by the order Arrival, behind default/gang" in (await place(kube, "b"))[0]


async def test_job_that_was_admitted_a_moment_ago_has_its_gpu():
    kube = a_queue(a=(0, 10))
    seed_node(kube, gpu_node("b", 1))
    add(kube, "admitted", 30, steps=1200, schedulingGates=[])
    (line,) = await place(kube, "a")
    assert line.endswith("1st of 1 pending job by the order Arrival; expected start in about 2 min")
    lines = (await explain_job(kube, "admitted", "default", RULES, Options(CLOCK, order=ARRIVAL))).lines
    assert lines[:2] == ["default/admitted has no place yet", ADMITTED]
    assert lines[2].startswith("by the GPUs alone: would go to b ")


@pytest.mark.parametrize(
    ("workers", "gates", "expected"),
    [
        pytest.param(2, [GATE_ADMISSION], " yet: 1 of its 2 workers exist", id="worker missing"),
        pytest.param(1, [GATE_ADMISSION, KUEUE], f": its pods have the scheduling gate {KUEUE}", id="other gate"),
    ],
)
async def test_job_outside_the_queue_has_the_reason(workers, gates, expected):
    kube = a_queue()
    seed_job(kube, "x", spec={"workers": workers, **EXCLUSIVE})
    seed_node(kube, gpu_node("b", 1))
    kube.seed(PODS, pod_of("x", schedulingGates=[{"name": gate} for gate in gates]))
    assert await place(kube, "x") == [f"it is not in the queue{expected}"]


async def test_backoff_is_the_reason_and_delays_the_expected_start():
    kube = a_queue(a=(0, 10))
    seed_node(kube, gpu_node("b", 1))
    retry_at = rfc3339(CLOCK.now() + timedelta(seconds=60))
    message = f"0/2 nodes are available: 2 Insufficient cpu; admitted again after {retry_at}"
    pod = kube.dump(PODS, "a-worker-0-1", "default")
    pod["status"]["conditions"] = [{"type": CONDITION_ADMITTED, "status": "False", "message": message}]
    kube.seed(PODS, pod)
    lines = (await explain_job(kube, "a", "default", RULES, Options(CLOCK, order=ARRIVAL))).lines
    assert lines[1].endswith("expected start in about 60 s")
    assert lines[2] == f"would have to wait now: {message}"


def test_queue_says_what_each_job_waits_for(monkeypatch):
    """Regression: an admitted job had `-` as its reason, and kube-scheduler's text was printed as it was."""
    kube = a_queue(free=(0, 10))
    seed_node(kube, gpu_node("b", 3))
    add(kube, "just-admitted", schedulingGates=[])
    add(kube, "unbound", schedulingGates=[])
    pod, refusal = kube.dump(PODS, "unbound-worker-0-1", "default"), "0/2 nodes are available: 2 Insufficient cpu."
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": f"{refusal} preemption: 0/2 nodes are available.",
    }
    kube.seed(PODS, pod | {"status": {"conditions": [condition]}})
    just = kube.dump(PODS, "just-admitted-worker-0-1", "default")
    gated = {"reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty scheduling gates"}
    kube.seed(PODS, just | {"status": {"conditions": [{**condition, **gated}]}})
    with served(kube, monkeypatch):
        _, *rows = CliRunner().invoke(queue, []).stdout.splitlines()
    assert {row.split()[2]: [cell.strip() for cell in row.split("   ") if cell][-2:] for row in rows} == {
        "free": ["-", "it can start now"],
        "just-admitted": ["Admitted", "waits for kube-scheduler to bind it"],
        "unbound": ["Admitted", "kube-scheduler found no node: 2 Insufficient cpu"],
    }


async def test_condition_that_names_a_lack_of_gpus_agrees_with_the_queue():
    """Regression: a job could start now beneath a condition that found no GPU for it."""
    kube = a_queue(a=(0, 10))
    seed_node(kube, gpu_node("b", 1))
    placed = {"type": "Placed", "status": "False", "reason": "NoGpuFits", "message": "1 GPU: in use"}
    status = {"status": {"state": "Queued", "conditions": [placed]}}
    await kube.patch(GPU_TRAINING_JOBS, "a", status, namespace="default", subresource="status")
    lines = (await explain_job(kube, "a", "default", RULES, Options(CLOCK, order=ARRIVAL))).lines
    assert lines[0].endswith("1 GPU: in use; that was written before GPUs became free for it")
    assert lines[2].startswith("would go to b ")


async def test_only_admissible_pods_without_a_place_are_in_the_queue():
    kube = a_queue(a=(0, 10))
    add(kube, "bound", nodeName="a")
    seed_pod(kube, "first")  # it has a reservation, and is being bound
    seed_job(kube, "no-pod-yet")
    add(kube, "held", schedulingGates=[{"name": "carpool.dev/admission"}, {"name": "kueue.x-k8s.io/admission"}])
    add(kube, "refused")
    job = kube.dump(GPU_TRAINING_JOBS, "refused", "default")
    kube.seed(GPU_TRAINING_JOBS, job | {"metadata": job["metadata"] | {"annotations": {ANNOTATION_POLICY: "best"}}})
    add(kube, "leaving")
    leaving = pod_of("leaving")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
    kube.seed(PODS, leaving)
    # Objects that cannot be read are left out.
    odd = {"name": "odd", "uid": "job-odd", "namespace": "other"}
    kube.seed(GPU_TRAINING_JOBS, {"metadata": odd, "spec": {"sharing": {"mode": "Novel"}}})
    seed_pod(kube, "odd")
    seed_pod(kube, "invalid", priority="high")
    assert "1st of 1 pending job " in (await place(kube, "a"))[0]


@pytest.mark.parametrize("state", ["", "Suspended"])
async def test_job_without_a_pending_pod_has_no_place(state):
    kube = a_queue(a=(0, 10))
    seed_job(kube, "x")
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": {"state": state}}, namespace="default", subresource="status")
    assert await place(kube, "x") == []
    kube.fail_next("list", PODS, Forbidden("no"))
    assert (await place(kube, "x") == []) == (state == "Suspended"), "it may have a pending pod that cannot be read"


async def test_only_job_that_can_start_now_has_no_place_to_name():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    assert await place_of_new(kube) == []


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        pytest.param(PODS, Forbidden("no"), "you may not list pods of all namespaces", id="pods"),
        pytest.param(GPU_TRAINING_JOBS, Forbidden("no"), "you may not list jobs of all namespaces", id="jobs"),
        pytest.param(GPU_TRAINING_JOBS, Invalid("of no use"), "jobs of all namespaces cannot be listed: of no use",
                     id="failed"),
    ],
)  # fmt: skip
async def test_missing_rights_are_named_and_the_rest_is_answered(kind, error, reason):
    kube = a_queue(a=(0, 10), b=(1, 10))
    kube.fail_next("list", kind, error)
    lines = (await explain_job(kube, "a", "default", RULES, Options(CLOCK))).lines
    assert lines[1] == UNKNOWN + reason
    assert lines[2] == "would have to wait now: 1 GPU: in use, and the job wants a GPU of its own"


async def test_forecast_changes_nothing_on_the_server():
    kube = a_queue(**FIVE)
    before = kube.dump_all(GPU_NODES)
    await place(kube, "e")
    assert kube.dump_all(GPU_NODES) == before
    assert {call.verb for call in kube.calls} <= {"get", "list"}


def test_queue_marks_starts_that_depend_on_a_job_without_steps(monkeypatch):
    kube = a_queue(a=(0, 600), b=(1, None), c=(2, 600))
    monkeypatch.setattr(commands, "SystemClock", lambda: CLOCK)
    with served(kube, monkeypatch):
        lines = CliRunner().invoke(queue, ["-A", "--queue-order", "Arrival"]).stdout.splitlines()
    assert ["(assumed)" in line for line in lines[1:]] == [False, False, True]


def test_queue_lists_pending_jobs_in_order_with_reasons_and_expected_starts(monkeypatch):
    kube = a_queue(a=(0, 600), b=(1, 1200))
    add(kube, "held", 2, schedulingGates=[{"name": "carpool.dev/admission"}, {"name": "kueue.x-k8s.io/admission"}])
    monkeypatch.setattr(commands, "SystemClock", lambda: CLOCK)
    with served(kube, monkeypatch):
        document = CliRunner().invoke(queue, ["--queue-order", "Arrival", "-o", "json"])
        table = CliRunner().invoke(queue, ["-n", "other"])
        printed = CliRunner().invoke(queue, ["--queue-order", "Arrival"])
    first, second, outside = json.loads(document.output)["items"]
    assert (first["position"], first["name"], first["reason"]) == (1, "a", "NoGpuFits")
    assert second["startsInSeconds"] - first["startsInSeconds"] == pytest.approx(60, abs=1)  # a: 600 steps of 0.1 s
    assert "startIsAssumed" not in first
    assert outside["message"].endswith("its pods have the scheduling gate kueue.x-k8s.io/admission")
    assert "position" not in outside
    assert (table.exit_code, table.stdout) == (0, "")
    _, *rows = printed.stdout.splitlines()
    for row, item in zip(rows, json.loads(document.output)["items"], strict=True):
        cells = [cell.strip() for cell in row.split("   ") if cell]
        assert cells[1:5] == [item["namespace"], item["name"], str(item.get("priority", 0)), "1"]
        assert cells[-1] == item["message"], "whole, as on the board's page"
    assert printed.stderr == "3 pending jobs by the order Arrival; starts are forecasts\n"
    kube.fail_next("list", PODS, Forbidden("no", status=403))
    with served(kube, monkeypatch):
        refused = CliRunner().invoke(queue, [])
    assert (refused.exit_code, "you may not list pods of all namespaces; " in refused.output) == (2, True)
