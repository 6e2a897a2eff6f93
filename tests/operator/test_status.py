"""A job's status: placement and its reasons, measurements, durations, columns."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.resources.job import JobStatus, JobSummary, Observed, WorkerPlacement
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, NodeName, PodUid, SharingMode
from carpool_operator.actions import RecordEvent, WriteStatus
from carpool_operator.attempts import spec_digest
from carpool_operator.performer import status_body
from carpool_operator.placement import without_progress
from carpool_operator.reconcile import reconcile
from carpool_operator.status import summarize
from operator_fixtures import (
    A100,
    NOW,
    abstention,
    again,
    condition,
    device,
    events,
    job,
    node,
    pod,
    predicted_job,
    prediction,
    reservation,
    settled,
    snapshot,
    status_of,
)
from operator_world import World


def placed_message(product: str, reserved: dict[str, Any], **spec: Any) -> str:
    of = predicted_job(**spec)
    home = node(reservation("pod-0-1", **reserved))
    devices = [device(product=product)]
    home = msgspec.structs.replace(home, status=msgspec.structs.replace(home.status, devices=devices))
    return condition(reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(home,))), of, "Placed").message


LATER = "has its GPU to itself until its own peak was measured"
EXCLUSIVE = "runs alone on its GPU (Exclusive)"
ALONE = {"mode": "Exclusive", "memoryLimitMib": None}


@pytest.mark.parametrize(
    ("reserved", "spec", "how"),
    [
        pytest.param({}, {}, EXCLUSIVE, id="a GPU of its own"),
        pytest.param({"mode": "MPS", "tenant": {"provisional": True}}, {}, LATER, id="not measured yet"),
        pytest.param({"mode": "MPS", "tenant": {"provisional": True, "measuredMib": 5500}}, {}, LATER, id="measured"),
        pytest.param({"mode": "MPS"}, {}, "has its GPU to itself until it ends", id="peaks do not count"),
        pytest.param({"mode": "TimeSlicing"}, {}, "has its GPU to itself until it ends", id="time-slicing"),
        pytest.param({}, {"sharing": {"mode": "Exclusive"}}, None, id="asked for"),
        pytest.param({}, {"memory": {"limit": "8Gi"}}, None, id="memory is given"),
    ],
)
def test_job_alone_on_an_unpredicted_product_says_why(
    reserved: dict[str, Any], spec: dict[str, Any], how: str | None
) -> None:
    """Regression: on a product outside of the table a predicted job ran alone without a reason."""
    why = "because nothing was predicted for GPU product NVIDIA B300"
    message = placed_message("NVIDIA B300", ALONE | reserved, **spec)
    assert (why in message) == (how is not None)
    assert f"{how}, {why}" in message or how is None
    assert why not in placed_message(A100, ALONE | reserved, **spec)


def test_memory_limit_lifts_the_exclusive_clause_of_an_unknown_model() -> None:
    of = settled(job({"attempts": [{"number": 1, "outcome": "Creating"}]}, model=None, memory={"limit": "8Gi"}))
    one = snapshot(of, prediction=abstention(), pods=(pod(nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(one)
    assert "runs alone" not in condition(decision, of, "Placed").message
    message = condition(decision, of, "Predicted").message
    assert message.startswith("spec.model is left out")
    assert "spec.memory.limit (8Gi), so the job may share" in message
    assert [a.reason for a in decision.actions if isinstance(a, RecordEvent) and a.type == "Warning"] == []


def test_placed_and_running_from_the_reservation() -> None:
    of = predicted_job()
    nodes = (node(reservation("pod-0-1"), reservation("other", job_uid="other", name="y")),)
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes))
    status = status_of(decision, of)
    place = status.placement[0]
    assert (place.node, place.gpu_uuids, place.mode, place.product) == ("n1", ["GPU-0"], "MPS", f"Simulated {A100}")
    assert [neighbour.job for neighbour in place.neighbours] == ["y"]
    expected = "worker 0: n1/GPU-0, MPS, 3,000 MiB, expected slowdown 1.12: least slowdown of 4 GPUs"
    assert condition(decision, of, "Placed").message == expected
    assert status.state == "Running"
    assert status.start_time == "2026-01-31T11:59:00Z"


@pytest.mark.parametrize("exit_code", [0, 3])
def test_container_that_keeps_the_gpu_after_the_training_is_named(exit_code: int) -> None:
    """Regression: a container that follows a log kept the job Running without a reason."""
    of = predicted_job()
    containers = [{"name": "train", "resources": {"limits": {"carpool.dev/gpu": 1}}}, {"name": "logs"}]
    states = [{"terminated": {"exitCode": exit_code}}, {"running": {"startedAt": "2026-01-31T11:59:00Z"}}]
    status = {"containerStatuses": [{"name": c["name"], "state": s} for c, s in zip(containers, states, strict=True)]}
    nodes = (node(reservation("pod-0-1")),)
    one = pod(phase="Running", nodeName="n1", containers=containers, status=status)
    found = condition(reconcile(snapshot(of, pods=(one,), nodes=nodes)), of, "Running")
    assert found.message == (
        f"1 of 1 workers run, attempt 1; container train of pod x-worker-0-1 has ended with exit code {exit_code}, but "
        "logs still runs and keeps the GPU: make it a sidecar, which is an init container with restartPolicy Always"
    )


REASON = (
    "least-slowdown: MPS on GPU 0 of n1 beside default/y; 30,221 of 40,536 MiB left; expected slowdown 1.12 of 1.50"
)
OTHER_NODE = REASON.replace("of n1 ", "of n1-a.example ")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        pytest.param(REASON, "worker 0: GPU-0, 100% of threads, 3,000 MiB", id="each fact once"),
        pytest.param(OTHER_NODE, "worker 0: n1/GPU-0, 100% of threads, 3,000 MiB", id="node name in another word"),
    ],
)
def test_placement_is_described_with_the_reason_of_the_scheduler(reason: str, expected: str) -> None:
    """Regression: the event repeated node, mode and slowdown, which the scheduler's reason contains."""
    reserved = reservation("pod-0-1", reason=reason, threadPercentage=100)
    decision = reconcile(snapshot(predicted_job(), pods=(pod(nodeName="n1"),), nodes=(node(reserved),)))
    assert [a.message for a in decision.actions if isinstance(a, RecordEvent)] == [f"{expected}: {reason}"]


def test_later_co_tenant_is_reported_after_the_reason() -> None:
    """Regression: the condition still reported `alone` after another job had joined the GPU."""
    of = predicted_job()
    own = reservation("pod-0-1", reason="MPS on GPU 0 of n1 alone", reservedAt=rfc3339(NOW))
    after, before = rfc3339(NOW + timedelta(seconds=1)), rfc3339(NOW - timedelta(seconds=1))
    others = [
        reservation("later", job_uid="other", name="later", reservedAt=after),
        reservation("earlier", job_uid="another", name="earlier", reservedAt=before),
        reservation("elsewhere", job_uid="third", name="elsewhere", reservedAt=after, gpuUuids=["GPU-1"]),
    ]
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(own, *others),)))
    expected = "MPS on GPU 0 of n1 alone; joined since by default/later, not counted here"
    assert status_of(decision, of).placement[0].reason == expected
    assert expected in condition(decision, of, "Placed").message


def test_placement_survives_the_release_of_the_reservation() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    later = again(before, decision, nodes=(node(),), pods=(pod(phase="Succeeded", nodeName="n1"),))
    assert status_of(later, of).placement == status_of(decision, of).placement


def test_reservation_of_another_job_does_not_count() -> None:
    of = predicted_job()
    forged = reservation("pod-0-1", job_uid="another-job")
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(forged),)))
    assert condition(decision, of, "Placed").reason == "NoReservation"


def test_bound_pod_that_waits_says_why() -> None:
    of = predicted_job()
    why = {"reason": "CreateContainerConfigError", "message": "PreStartContainer refused: no reservation"}
    bound = pod(nodeName="n1", status={"containerStatuses": [{"name": "train", "state": {"waiting": why}}]})
    decision = reconcile(snapshot(of, pods=(bound,), nodes=(node(reservation("pod-0-1")),)))
    found = condition(decision, of, "Running")
    assert (found.status, found.reason) == ("False", "CreateContainerConfigError")
    assert "PreStartContainer refused" in found.message
    assert status_of(decision, of).state == "Starting"


NO_FIT = "needs 14,300 MiB; freest NVIDIA A100-SXM4-40GB has 9,120 MiB free"


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        pytest.param(
            f"0/22 nodes are available: 22 NoGpuFits: {NO_FIT}. no new claims to deallocate, preemption: 0/22 nodes",
            "NoGpuFits",
            NO_FIT,
            id="the extender's sentence",
        ),
        pytest.param(f"0/2 nodes are available: 2 NoGpuFits: {NO_FIT}.", "NoGpuFits", NO_FIT, id="nothing after"),
        pytest.param(
            "0/2 nodes are available: 2 node(s) had taints",
            "Unschedulable",
            "kube-scheduler found no node: 2 node(s) had taints",
            id="other words",
        ),
        pytest.param(
            f"0/24 nodes are available: 1 Insufficient cpu, 21 NoGpuFits: {NO_FIT}, freest Tesla T4 has 15 MiB total, "
            "2 products with less, 2 node(s) had untolerated taint(s). preemption: 0/24 nodes are available: none.",
            "NoGpuFits",
            f"{NO_FIT}, freest Tesla T4 has 15 MiB total, 2 products with less; "
            "other nodes: 1 Insufficient cpu, 2 node(s) had untolerated taint(s)",
            id="with kube-scheduler's reasons for other nodes",
        ),
    ],
)
def test_scheduler_message_becomes_the_condition(answer: str, reason: str, message: str) -> None:
    of = predicted_job()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": answer}
    found = condition(reconcile(snapshot(of, pods=(pod(status={"conditions": [unscheduled]}),))), of, "Placed")
    assert found.reason == reason
    assert found.message.endswith(message)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("", "NoGpuFits", ["NoGpuFits"]),
        ("", "WouldDelay", ["WouldDelay"]),
        ("NoGpuFits", "WouldDelay", []),
        ("WouldDelay", "NoGpuFits", []),
        ("NoGpuFits", "Unschedulable", ["Unschedulable"]),
    ],
)
def test_reasons_that_alternate_in_the_queue_have_one_event(before: str, now: str, expected: list[str]) -> None:
    known = [{"type": "Placed", "status": "False", "reason": before, "message": "waits"}] if before else []
    of = predicted_job(status={"conditions": known})
    waits = {"type": keys.CONDITION_ADMITTED, "status": "False", "reason": now, "message": "a sentence"}
    gated = pod(schedulingGates=[{"name": keys.GATE_ADMISSION}], status={"conditions": [waits]})
    decision = reconcile(snapshot(of, pods=(gated,)))
    assert condition(decision, of, "Placed").reason == now
    assert [event for event in events(decision) if event != "Predicted"] == expected


def test_observed_peak_never_falls_and_the_step_time_is_compared() -> None:
    of = predicted_job(status={"observed": {"peakMemoryMib": 2500}})
    used = {"podUid": "pod-0-1", "gpuUuid": "GPU-0", "memoryMib": 2000, "peakMemoryMib": 2100}
    tenants = [{**used, "gpuUtilPercent": 61.0, "smActiveRatio": 0.5, "stepTimeSeconds": 0.13}]
    nodes = (node(reservation("pod-0-1"), tenants=tenants),)
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes)
    decision = reconcile(before)
    measured = status_of(decision, of).observed
    assert measured is not None
    assert (measured.peak_memory_mib, measured.gpu_util_percent, measured.step_time_ratio) == (2500, 61.0, 1.3)
    after = again(before, decision, nodes=(node(),))
    assert status_of(after, msgspec.structs.replace(of, status=status_of(decision, of))).observed == measured


STEPPING = {
    "steps": 100, "stepsAt": rfc3339(NOW), "stepTimeSeconds": 0.3, "soloStepTimeSeconds": 0.2, "samplesPerSecond": 64.0,
    "stepTimeDeviationSeconds": 0.01, "dataWaitRatio": 0.1, "checkpointRatio": 0.25, "copyRatio": 0.01,
}  # fmt: skip


def measured_steps(total: int | None, old: dict[str, object] | None = None, **changes: object) -> Observed:
    """What the status shows of a pod with two GPUs whose agent measured this."""
    of = predicted_job(training={"steps": total}, status={"observed": old} if old else {})
    used = {"podUid": "pod-0-1", "memoryMib": 2000, "peakMemoryMib": 2100, **STEPPING, **changes}
    nodes = (node(reservation("pod-0-1"), tenants=[{**used, "gpuUuid": gpu} for gpu in ("GPU-0", "GPU-1")]),)
    found = status_of(reconcile(snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes)), of).observed
    assert found is not None
    return found


def test_measured_steps_give_the_slowdown_and_the_expected_end() -> None:
    found = measured_steps(1100)
    assert (found.steps, found.samples_per_second, found.data_wait_ratio) == (100, 64.0, 0.1)
    assert found.slowdown == 1.5, "against its own steps alone, not the predicted ones"
    assert found.expected_end == rfc3339(NOW + timedelta(seconds=1000 * 0.3 / 0.75)), "with its checkpoints"

    assert found.step_time_interval == Interval(median=0.3, lower=0.2823, upper=0.3177)
    assert found.latest_end == rfc3339(NOW + timedelta(seconds=1000 * 0.3177 / 0.75))
    old = {"stepTimeInterval": {"median": 0.3, "lower": 0.282, "upper": 0.318}}
    again = measured_steps(1100, old, stepTimeSeconds=0.6, stepTimeDeviationSeconds=None)
    assert again.step_time_interval == Interval(median=0.6, lower=0.564, upper=0.636), "the agent has just started"


@pytest.mark.parametrize(
    ("total", "changes"),
    [
        pytest.param(1100, {"steps": 19}, id="before-twenty-steps"),
        pytest.param(None, {}, id="number-of-steps-unknown"),
        pytest.param(10**12, {"stepTimeSeconds": 1e9}, id="never"),
    ],
)
def test_without_enough_steps_no_end_is_expected(total: int | None, changes: dict[str, object]) -> None:
    found = measured_steps(total, **changes)
    assert (found.expected_end, found.latest_end) == (None, None)


def test_a_job_that_was_never_alone_has_no_measured_slowdown() -> None:
    assert measured_steps(1100, soloStepTimeSeconds=None).slowdown is None
    assert measured_steps(1100, {"soloStepTimeSeconds": 0.15}, soloStepTimeSeconds=None).slowdown == 2.0


def test_another_attempt_begins_without_progress() -> None:
    found = without_progress(measured_steps(1100))
    assert found == Observed(peak_memory_mib=2100)


def test_condition_keeps_its_transition_time() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    moved = (node(reservation("pod-0-1", expectedSlowdown=1.4)),)
    later = again(before, decision, now=snapshot(of, after_s=50).now, nodes=moved)
    found = condition(later, of, "Placed")
    assert "1.40" in found.message
    assert found.last_transition_time == rfc3339(NOW)


def predicted(product: str, upper_mib: int, util: float, unenforced_mib: int = 0) -> ProductPrediction:
    interval = Interval(median=util, lower=0, upper=100)
    return ProductPrediction(
        product=product,
        memory=MemoryPrediction(
            median_mib=upper_mib // 2, upper_mib=upper_mib, upper_unenforced_mib=unenforced_mib, coverage=0.95
        ),
        activity=ActivityPrediction(gpu_util_percent=interval, sm_active_ratio=interval, dram_active_ratio=interval),
        step_time_seconds=interval,
    )


PREDICTION = Prediction(
    outcome="Predicted", reason="Calibrated", products=[predicted("A100", 4096, 40), predicted("H100", 5120, 25)]
)


def place(
    worker: int, node: str, *, limit: int | None = None, mode: SharingMode = SharingMode.MPS, gpus: int = 1
) -> WorkerPlacement:
    return WorkerPlacement(
        worker=worker,
        pod=f"p{worker}",
        pod_uid=PodUid(str(worker)),
        node=NodeName(node),
        gpu_uuids=[GpuUuid(f"GPU-{worker}-{gpu}") for gpu in range(gpus)],
        product="Simulated A100",
        mode=mode,
        memory_limit_mib=limit,
        expected_slowdown=1.2,
    )


CASES = [
    pytest.param(JobStatus(), None, id="nothing is known yet"),
    pytest.param(
        JobStatus(prediction=PREDICTION),
        JobSummary(predicted_memory="2.0-2.5 GiB", memory_bound="4.0-5.0 GiB", predicted_utilization="25-40%"),
        id="before it is placed, the range over all products",
    ),
    pytest.param(
        JobStatus(prediction=PREDICTION, placement=[place(0, "n1")]),
        JobSummary(
            node="n1", gpu="Simulated A100", mode="MPS", predicted_memory="2.0 GiB", memory_bound="4.0 GiB",
            predicted_utilization="40%", slowdown="1.20",
        ),
        id="placed: its product's prediction, median beside median, and the expected slowdown",
    ),
    pytest.param(
        JobStatus(
            placement=[place(0, "n2", limit=2048), place(1, "n1", limit=2048)],
            observed=Observed(
                peak_memory_mib=1536, gpu_util_percent=33.4, step_time_seconds=0.0526, step_time_ratio=1.27
            ),
        ),
        JobSummary(
            node="n1,n2", gpu="2x Simulated A100", mode="MPS", memory_bound="2.0 GiB", observed_memory="1.5 GiB",
            observed_utilization="33%", slowdown="1.20", step_time="53 ms (1.27x)",
        ),
        id="the user's own limit, several workers, and measurements",
    ),
    pytest.param(
        JobStatus(
            observed=Observed(
                slowdown=1.234, steps=1200, expected_end="2026-01-31T12:00:00.000000Z", step_time_seconds=0.1,
                latest_end="2026-01-31T12:30:00.000000Z",
                step_time_interval=Interval(median=0.1, lower=0.09, upper=0.12),
            )
        ),
        JobSummary(
            observed_memory="0.0 GiB", measured_slowdown="1.23", progress="1,200 of 35,000",
            expected_end="2026-01-31T12:00:00Z, at most 2026-01-31T12:30:00Z", step_time="100 ms, at most 120 ms",
        ),
        id="the progress that the probe reports",
    ),
    *(
        pytest.param(
            JobStatus(
                placement=[
                    msgspec.structs.replace(place(0, "n1", limit=4096), measured_mib=2048, provisional=provisional),
                    msgspec.structs.replace(place(1, "n1", limit=4096), measured_mib=3072, provisional=True),
                ],
                observed=Observed(peak_memory_mib=2560),
            ),
            JobSummary(
                node="n1", gpu="2x Simulated A100", mode="MPS", memory_bound=bound, slowdown="1.20",
                observed_memory="2.5 GiB",
            ),
            id=name,
        )
        for provisional, bound, name in (
            (True, "2.0-3.0 GiB", "each worker counts with its own measured peak, whatever another one took"),
            (False, "3.0-4.0 GiB", "one that took more than its measured peak counts with its bound"),
        )
    ),
    pytest.param(
        JobStatus(
            observed=Observed(slowdown=1.234, steps=1200, expected_end="2026-01-31T12:00:00.000000Z"),
            conditions=[Condition(type="Complete", status="True", reason="Succeeded")],
        ),
        JobSummary(observed_memory="0.0 GiB", measured_slowdown="1.23"),
        id="a job that has succeeded made more steps than the last reading has",
    ),
    pytest.param(
        JobStatus(observed=Observed(step_time_seconds=1.5)),
        JobSummary(observed_memory="0.0 GiB", step_time="1,500 ms"),
        id="a step time without a prediction",
    ),
    pytest.param(
        JobStatus(placement=[place(0, "n1", limit=3 * 1024**2 // 2)]),
        JobSummary(node="n1", gpu="Simulated A100", mode="MPS", memory_bound="1.5 TiB", slowdown="1.20"),
        id="so much that GiB would be hard to read",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("status", "expected"), CASES)
def test_columns(status: JobStatus, expected: JobSummary | None) -> None:
    assert summarize(status, 35_000) == expected


H100 = "NVIDIA H100 80GB HBM3"


def slower(product: str, step_s: float) -> ProductPrediction:
    (found,) = prediction(product).products
    return msgspec.structs.replace(
        found, step_time_seconds=msgspec.structs.replace(found.step_time_seconds, median=step_s)
    )


BOTH = msgspec.structs.replace(
    prediction(), products=[slower(H100, 0.3), *prediction(A100).products, *prediction("NVIDIA L4").products]
)
"""Two products that `mixed` has, and one that it has not."""


def mixed() -> GpuNode:
    """A node with one GPU of each of two products."""
    devices = node(gpus=2).status.devices
    devices[1] = msgspec.structs.replace(devices[1], product=H100, memory_mib=81_559)
    return msgspec.structs.replace(node(), status=msgspec.structs.replace(node().status, devices=devices))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        pytest.param({}, f"; 36,000 steps take about 60 min ({A100}) to 3 h ({H100}) alone", id="both"),
        pytest.param({"product": "A100"}, "; 36,000 steps take about 60 min alone", id="the product that it asks for"),
        pytest.param({"minMemory": "60Gi"}, "; 36,000 steps take about 3 h alone", id="the one that is large enough"),
        pytest.param({"product": "L4"}, "", id="a product that the cluster has not"),
    ],
)
def test_duration_is_reported_for_the_products_that_the_job_may_have(gpu: dict[str, Any], expected: str) -> None:
    of = job(training={"steps": 36_000}, gpu=gpu)
    decision = reconcile(snapshot(of, prediction=BOTH, nodes=(mixed(),)))
    assert condition(decision, of, keys.CONDITION_PREDICTED).message == f"estimated{expected}"
    (event,) = [a.message for a in decision.actions if isinstance(a, RecordEvent) and a.reason == "Predicted"]
    assert event.endswith(f"and 1 more product{expected}")


@pytest.mark.parametrize(
    ("training", "known"),
    [({}, prediction()), ({"steps": 36_000}, abstention())],
    ids=["steps are not given", "abstained"],
)
def test_unknown_duration_is_not_reported(training: dict[str, Any], known: Prediction) -> None:
    of = job(training=training)
    decision = reconcile(snapshot(of, prediction=known))
    assert condition(decision, of, keys.CONDITION_PREDICTED).message == known.message


def test_corrected_steps_are_reported_without_another_prediction() -> None:
    new = job(training={"steps": 36_000})
    decided = status_of(reconcile(snapshot(new, prediction=prediction())), new)
    changed = job(training={"steps": 72_000})
    metadata = msgspec.structs.replace(changed.metadata, generation=3)
    attempts = [msgspec.structs.replace(one, spec_digest=spec_digest(new.spec)) for one in decided.attempts]
    status = msgspec.structs.replace(decided, attempts=attempts)
    of = msgspec.structs.replace(changed, metadata=metadata, status=status)
    decision = reconcile(snapshot(of))
    message = condition(decision, of, keys.CONDITION_PREDICTED).message
    assert message == "estimated; 72,000 steps take about 2 h alone"
    assert events(decision) == ["PodCreated"]


async def test_another_node_of_a_kind_enqueues_only_jobs_that_fit_nowhere() -> None:
    """Regression: each new node enqueued every unfinished job."""
    world = World()
    world.apply("fits")
    await world.submit("large", memory={"limit": "88Gi"})
    world.seed_node("n2")
    world.deliver_events()
    assert [world.operator.queue.take_now(), world.operator.queue.take_now()] == ["default/large", None]


def test_status_of_a_large_job_is_bounded() -> None:
    """Regression: 1,024 workers with co-tenants made 4 MB, which etcd refused, so the job could not even be removed."""
    workers, gpus = 1024, [f"GPU-{number:036}" for number in range(16)]
    uids = [f"{number:036}" for number in range(workers)]
    pods = [pod(n, 10, phase="Running", nodeName=f"n{n // 8}", metadata={"uid": uid}) for n, uid in enumerate(uids)]
    own = [reservation(uid, gpuUuids=gpus, reason="r" * 4096) for uid in uids]
    others = [reservation(f"other-{n}", f"uid-{n}", name=f"job-{n}" + 40 * "x", gpuUuids=gpus) for n in range(8)]
    nodes = [node(*own[8 * n : 8 * n + 8], *others, name=f"n{n}") for n in range(workers // 8)]
    predicted = msgspec.to_builtins(prediction(A100, *(f"product {n}" for n in range(63))))
    tried = [{"number": n, "outcome": "ContainerFailed", "message": "m" * 4096} for n in range(1, 10)]
    running = {"number": 10, "outcome": "Running", "podUids": uids}
    of = predicted_job(workers=workers, attempts=[*tried, running], status={"prediction": predicted})
    before = snapshot(of, pods=tuple(pods), nodes=tuple(nodes))
    decision = reconcile(before)
    status = status_of(decision, of)
    assert len(msgspec.json.encode(status_body(status))) <= 200 * 1024
    assert (status.state, len(status.placement), status.omitted_placements) == ("Running", 64, 960)
    assert condition(decision, of, "Placed").message.startswith("1,024 workers are placed; worker 0: ")
    assert again(before, decision).actions == (), "the status does not alternate"
    pods[-1] = pod(1023, 10, phase="Succeeded", nodeName="n127", metadata={"uid": uids[-1]})
    nodes[-1] = node(*own[8 * 127 : 8 * 127 + 7], *others, name="n127")
    released = again(before, decision, pods=tuple(pods), nodes=tuple(nodes))
    assert [action for action in released.actions if not isinstance(action, WriteStatus)] == []
    of = msgspec.structs.replace(of, status=status)
    assert condition(released, of, "Placed").status == "True", "a worker that has succeeded was placed"


def test_columns_of_a_large_job_stay_after_its_reservations_are_released() -> None:
    """Regression: `100x` GPUs became `64x`, the number of placements in the status."""
    workers = range(100)
    running, ended = ([pod(n, phase=phase, nodeName="n1") for n in workers] for phase in ("Running", "Succeeded"))
    of = predicted_job(workers=len(workers))
    for left in (100, 99, 80, 64, 0):
        held = node(*(reservation(one.metadata.uid) for one in running[:left]))
        status = status_of(reconcile(snapshot(of, pods=(*running[:left], *ended[left:]), nodes=(held,))), of)
        assert status.summary is not None
        assert (status.summary.gpu, status.omitted_placements) == (f"100x Simulated {A100}", 36)
        of = msgspec.structs.replace(of, status=status)
    assert status.state == "Complete"
