"""What a job says of its place: where it is, why there, why alone, why nowhere; what was observed there."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_operator.actions import RecordEvent
from carpool_operator.reconcile import reconcile
from operator_decisions import again, condition, predicted_job, status_of
from operator_fixtures import A100, NOW, abstention, device, job, node, pod, reservation, snapshot


def placed_message(product: str, reserved: dict[str, Any], **spec: Any) -> str:
    of = predicted_job(**spec)
    home = node(reservation("pod-0-1", **reserved))
    devices = [device(product=product)]
    home = msgspec.structs.replace(home, status=msgspec.structs.replace(home.status, devices=devices))
    return condition(reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(home,))), of, "Placed").message


LATER = "has its GPU to itself until its own peak was measured"
ALONE = {"mode": "Exclusive", "memoryLimitMib": None}


@pytest.mark.parametrize(
    ("product", "reserved", "spec", "is_told"),
    [
        pytest.param("NVIDIA B300", ALONE, {}, True, id="a product that nothing was predicted for"),
        pytest.param(A100, ALONE, {}, False, id="a product that was predicted for"),
        pytest.param("NVIDIA B300", ALONE, {"sharing": {"mode": "Exclusive"}}, False, id="asked for"),
        pytest.param("NVIDIA B300", ALONE, {"memory": {"limit": "8Gi"}}, False, id="memory is given"),
    ],
)
def test_job_alone_on_an_unknown_product_says_why(
    product: str, reserved: dict[str, Any], spec: dict[str, Any], is_told: bool
) -> None:
    """Regression: on a GPU product outside of the table a predicted job ran alone and nobody said why."""
    told = "because nothing was predicted for GPU product NVIDIA B300"
    assert (told in placed_message(product, reserved, **spec)) == is_told


@pytest.mark.parametrize(
    ("mode", "tenant", "how"),
    [
        pytest.param("Exclusive", {}, "runs alone on its GPU (Exclusive)", id="nobody can join it"),
        pytest.param("MPS", {"provisional": True}, LATER, id="not measured yet"),
        pytest.param("MPS", {"provisional": True, "measuredMib": 5500}, LATER, id="measured"),
        pytest.param("MPS", {}, "has its GPU to itself until it ends", id="peaks do not count"),
        pytest.param("TimeSlicing", {}, "has its GPU to itself until it ends", id="by turns, and peaks do not count"),
    ],
)
def test_job_that_others_may_join_later_says_so(mode: str, tenant: dict[str, Any], how: str) -> None:
    """Regression: it was promised to others also where its own peak never counts."""
    told = placed_message("NVIDIA B300", ALONE | {"mode": mode, "tenant": tenant})
    assert f"{how}, because nothing was predicted for GPU product NVIDIA B300" in told


def test_memory_limit_lifts_the_exclusive_clause_of_an_unknown_model() -> None:
    of = job(model=None, memory={"limit": "8Gi"})
    one = snapshot(of, prediction=abstention(), pods=(pod(nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(one)
    assert "runs alone" not in condition(decision, of, "Placed").message
    told = condition(decision, of, "Predicted").message
    assert told.startswith("spec.model is left out")
    assert "spec.memory.limit (8Gi), so the job may share" in told
    warnings = [a.reason for a in decision.actions if isinstance(a, RecordEvent) and a.type == "Warning"]
    assert warnings == [], "nobody has to act"


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
def test_who_keeps_the_gpu_of_a_training_that_has_ended_is_told(exit_code: int) -> None:
    """Regression: a container that follows a log for ever kept the job Running, and nobody said why."""
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


SCHEDULER_S_REASON = (
    "least-slowdown: MPS on GPU 0 of n1 beside default/y; 30,221 of 40,536 MiB left; expected slowdown 1.12 of 1.50"
)


def test_each_fact_of_a_place_is_told_once() -> None:
    """Regression: the event said node, mode and slowdown, and then the scheduler's reason, which says them too."""
    of = predicted_job()
    reserved = reservation("pod-0-1", reason=SCHEDULER_S_REASON, threadPercentage=100)
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(reserved),)))
    expected = f"worker 0: GPU-0, 100% of threads, 3,000 MiB: {SCHEDULER_S_REASON}"
    assert [a.message for a in decision.actions if isinstance(a, RecordEvent)] == [expected]


def test_neighbour_that_came_later_is_told_beside_the_reason_from_before() -> None:
    """Regression: a condition went on saying `alone` of a job whose GPU another had joined."""
    of = predicted_job()
    own = reservation("pod-0-1", reason="MPS on GPU 0 of n1 alone", reservedAt=rfc3339(NOW))
    after, before = rfc3339(NOW + timedelta(seconds=1)), rfc3339(NOW - timedelta(seconds=1))
    others = [
        reservation("later", job_uid="other", name="later", reservedAt=after),
        reservation("earlier", job_uid="another", name="earlier", reservedAt=before),
        reservation("elsewhere", job_uid="third", name="elsewhere", reservedAt=after, gpuUuids=["GPU-1"]),
    ]
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(own, *others),)))
    told = "MPS on GPU 0 of n1 alone; joined since by default/later, not counted here"
    assert status_of(decision, of).placement[0].reason == told
    assert told in condition(decision, of, "Placed").message


def test_node_whose_name_is_a_part_of_another_word_is_told() -> None:
    of = predicted_job()
    reserved = reservation("pod-0-1", reason=SCHEDULER_S_REASON.replace("of n1 ", "of n1-a.example "))
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(reserved),)))
    assert condition(decision, of, "Placed").message.startswith("worker 0: n1/GPU-0, 3,000 MiB: least-slowdown: MPS")


def test_placement_survives_the_release_of_the_reservation() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    later = again(before, decision, nodes=(node(),), pods=(pod(phase="Succeeded", nodeName="n1"),))
    assert status_of(later, of).placement == status_of(decision, of).placement


def test_reservation_of_another_job_is_not_ours() -> None:
    of = predicted_job()
    forged = reservation("pod-0-1", job_uid="somebody-else")
    decision = reconcile(snapshot(of, pods=(pod(nodeName="n1"),), nodes=(node(forged),)))
    assert condition(decision, of, "Placed").reason == "NoReservation"


def test_bound_pod_that_waits_says_what_for() -> None:
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
    ("said", "reason", "message"),
    [
        pytest.param(
            f"0/22 nodes are available: 22 NoGpuFits: {NO_FIT}. no new claims to deallocate, preemption: 0/22 nodes",
            "NoGpuFits",
            NO_FIT,
            id="the extender's sentence",
        ),
        pytest.param(f"0/2 nodes are available: 2 NoGpuFits: {NO_FIT}.", "NoGpuFits", f"{NO_FIT}.", id="nothing after"),
        pytest.param("0/2 nodes are available: 2 node(s) had taints", "Unschedulable", "had taints", id="other words"),
        pytest.param(
            f"0/24 nodes are available: 1 Insufficient cpu, 21 NoGpuFits: {NO_FIT}, freest Tesla T4 has 15 MiB total, "
            "2 products with less, 2 node(s) had untolerated taint(s). preemption: 0/24 nodes are available: none.",
            "NoGpuFits",
            f"{NO_FIT}, freest Tesla T4 has 15 MiB total, 2 products with less; "
            "other nodes: 1 Insufficient cpu, 2 node(s) had untolerated taint(s)",
            id="both: the extender's sentence, and what kube-scheduler says of the other nodes",
        ),
    ],
)
def test_scheduler_s_words_become_the_condition(said: str, reason: str, message: str) -> None:
    of = predicted_job()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = condition(reconcile(snapshot(of, pods=(pod(status={"conditions": [unscheduled]}),))), of, "Placed")
    assert found.reason == reason
    assert found.message.endswith(message)


def test_observed_peak_never_falls_and_the_step_time_is_compared() -> None:
    of = predicted_job(status={"observed": {"peakMemoryMib": 2500}})
    used = {"podUid": "pod-0-1", "gpuUuid": "GPU-0", "memoryMib": 2000, "peakMemoryMib": 2100}
    tenants = [{**used, "gpuUtilPercent": 61.0, "smActiveRatio": 0.5, "stepTimeSeconds": 0.13}]
    nodes = (node(reservation("pod-0-1"), tenants=tenants),)
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=nodes)
    decision = reconcile(before)
    seen = status_of(decision, of).observed
    assert seen is not None
    assert (seen.peak_memory_mib, seen.gpu_util_percent, seen.step_time_ratio) == (2500, 61.0, 1.3)
    after = again(before, decision, nodes=(node(),))
    assert status_of(after, msgspec.structs.replace(of, status=status_of(decision, of))).observed == seen


def test_condition_keeps_its_transition_time() -> None:
    of = predicted_job()
    before = snapshot(of, pods=(pod(phase="Running", nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    decision = reconcile(before)
    moved = (node(reservation("pod-0-1", expectedSlowdown=1.4)),)
    later = again(before, decision, now=snapshot(of, after_s=50).now, nodes=moved)
    found = condition(later, of, "Placed")
    assert "1.40" in found.message
    assert found.last_transition_time == rfc3339(NOW)
