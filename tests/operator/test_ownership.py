"""Which pods are a job's own; pods without a reservation."""

from typing import Any

import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.resources.job import GpuTrainingJob
from carpool_operator.expectations import REFUSAL_BACKOFF
from carpool_operator.pods import build_pod
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import Refusal
from carpool_operator.work_queue import DEBOUNCE_S
from operator_fixtures import (
    NOW,
    created,
    deleted,
    events,
    node,
    pod,
    predicted_job,
    reservation,
    snapshot,
    status_of,
    terminated,
)
from operator_world import World, running, submitted


@pytest.mark.parametrize("number", [1, 999])
@pytest.mark.parametrize("name", ["forged", "x-worker-0-999"])
def test_forged_labels_change_nothing(name: str, number: int) -> None:
    """Regression: a pod with the job's UID as controller and a worker's labels was followed, or its attempt adopted."""
    of = predicted_job()
    forged = pod(0, number, phase="Running", nodeName="n1", metadata={"name": name, "uid": "forged"})
    real = pod(phase="Running", nodeName="n1")
    decision = reconcile(snapshot(of, pods=(real, forged), nodes=(node(reservation("pod-0-1")),)))
    status = status_of(decision, of)
    assert ([attempt.number for attempt in status.attempts], status.state) == ([1], "Running")
    assert deleted(decision) == [name]
    died = pod(phase="Failed", status=terminated(1))
    decision = reconcile(snapshot(of, pods=(died, forged)))
    assert status_of(decision, of).attempts[0].outcome == "ContainerFailed"
    assert events(decision) == ["ForeignPod", "Restarting"]


def test_changed_labels_of_a_running_worker_change_nothing() -> None:
    """Regression: `kubectl label pod x-worker-0-1 carpool.dev/attempt=999 --overwrite` ended the attempt."""
    of = predicted_job()
    labels = {keys.LABEL_JOB: "x", keys.LABEL_WORKER: "7", keys.LABEL_ATTEMPT: "999"}
    real = pod(phase="Running", nodeName="n1", metadata={"labels": labels})
    decision = reconcile(snapshot(of, pods=(real,), nodes=(node(reservation("pod-0-1")),)))
    assert deleted(decision) == []
    assert [a.outcome for a in status_of(decision, of).attempts] == ["Running"]


def test_foreign_pod_that_is_slow_to_go_blocks_nothing() -> None:
    of = predicted_job(attempts=[])
    going = {"name": "forged", "uid": "forged", "deletionTimestamp": rfc3339(NOW), "finalizers": ["test/slow"]}
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", metadata=going),)))
    assert created(decision) == ["x-worker-0-1"]
    assert "ForeignPod" not in events(decision), "it is being deleted already"


def recorded(*uids: str, outcome: str = "Running") -> GpuTrainingJob:
    return predicted_job(attempts=[{"number": 1, "outcome": outcome, "podUids": list(uids)}])


def test_pod_with_the_jobs_uid_and_a_workers_name_is_foreign() -> None:
    """Regression: once the worker was gone, a pod of its name with the job's UID was followed in its place."""
    of = recorded("pod-0-1")
    forged = pod(phase="Succeeded", metadata={"uid": "forged"})
    decision = reconcile(snapshot(of, pods=(forged,)))
    status = status_of(decision, of)
    assert status.state != "Complete"
    assert status.attempts[0].outcome == "Creating", "the real one is gone, and was never bound"
    assert deleted(decision) == ["x-worker-0-1"]
    assert "ForeignPod" in events(decision)


@pytest.mark.parametrize(
    ("attempts", "spec"),
    [
        pytest.param([{"number": 1, "outcome": "Creating"}], {}, id="creating"),
        pytest.param([{"number": 1, "outcome": "Creating"}], {"workers": 2}, id="creating and refused by a quota"),
        pytest.param([], {}, id="not begun"),
        pytest.param([], {"runPolicy": {"suspend": True}}, id="suspended from the start"),
        pytest.param(
            [{"number": 1, "outcome": "Suspended", "endedAt": rfc3339(NOW), "podUids": ["pod-0-1"]}],
            {"runPolicy": {"suspend": True}},
            id="suspended",
        ),
    ],
)
def test_pod_without_recorded_uid_is_deleted(attempts: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    """Regression: a pod with a worker's name held GPUs of a suspended job for 48 h."""
    of = predicted_job(attempts=attempts, **spec)
    forged = pod(phase="Running", metadata={"uid": "forged"}, nodeName="n1")
    refusal = Refusal("PodForbidden", "exceeded quota", is_final=False, retry_in_s=15)
    decision = reconcile(snapshot(of, pods=(forged,), refusal=refusal if "workers" in spec else None))
    assert deleted(decision) == ["x-worker-0-1"]
    assert "ForeignPod" in events(decision)
    assert status_of(decision, of).placement == []


async def test_uids_are_recorded_before_the_cache_shows_the_pods() -> None:
    world = World()
    world.apply(workers=2)
    await world.settle(pods=False)
    assert world.job().status.attempts[0].pod_uids == sorted(pod["metadata"]["uid"] for pod in world.pods())
    assert world.job().status.attempts[0].outcome == "Running"


def seed(world: World, **changes: Any) -> str:
    """A pod of the worker's name that exists before the operator creates it; returns its UID."""
    body = build_pod(world.job(), 0, 1)
    body["spec"] |= changes
    return str(world.kube.seed(PODS, body)["metadata"]["uid"])


async def test_forged_pod_of_the_workers_name_is_replaced() -> None:
    world = World()
    world.apply()
    forged = seed(world, containers=[{"name": "train", "image": "forged:1"}])
    await world.settle()
    assert [p["metadata"]["uid"] == forged for p in world.pods()] == [False]
    assert world.pods()[0]["spec"]["containers"][0]["image"] == "train:1"
    assert "ForeignPod" in {event["reason"] for event in world.kube.dump_all(EVENTS)}
    await world.settle(after_s=DEBOUNCE_S)
    assert world.job().status.attempts[0].pod_uids == [world.pods()[0]["metadata"]["uid"]]


@pytest.mark.parametrize("image", ["forged:1", "train:1"])
async def test_terminating_pod_of_the_workers_name_is_awaited(image: str) -> None:
    """Regression: a terminating pod of the worker's name was deleted again in a loop without a pause."""
    world = World()
    world.apply()
    body = build_pod(world.job(), 0, 1)
    body["spec"]["containers"][0]["image"] = image
    body["metadata"] |= {"deletionTimestamp": rfc3339(NOW), "finalizers": ["test/slow"]}
    world.kube.seed(PODS, body)
    await world.settle()
    assert [call.verb for call in world.kube.calls if call.plural == "pods"] == ["check", "create", "get"]
    placed = world.condition("Placed")
    assert (placed.reason, "x-worker-0-1 has the worker's name" in placed.message) == ("PodNameTaken", True)
    await world.settle(after_s=REFUSAL_BACKOFF.most_s)
    assert [call.verb for call in world.kube.calls if call.plural == "pods"][3:] == ["create", "get"]
    world.kube.lose(PODS, "x-worker-0-1", "default")
    await world.settle()
    assert world.living() == ["x-worker-0-1"], "created as soon as the other is gone"


def strip(world: World, name: str) -> None:
    """Take its labels and its controller from a pod, as a user may."""
    pod = world.kube.dump(PODS, name, "default")
    pod["metadata"] |= {"labels": {}, "ownerReferences": []}
    world.kube.seed(PODS, pod)


async def test_pod_without_labels_and_controller_stays_the_jobs_own() -> None:
    """Regression: `kubectl label pod NAME carpool.dev/job-` hid the pod, and it ran on beside the next attempt."""
    world = await running()
    strip(world, "x-worker-0-1")
    await world.settle()
    await world.settle(after_s=DEBOUNCE_S)
    assert world.living() == ["x-worker-0-1"]
    assert [a.outcome for a in world.job().status.attempts] == ["Running"]


@pytest.mark.parametrize("run_policy", [{"suspend": True}, {"activeDeadlineSeconds": 60}])
async def test_pod_without_labels_and_controller_ends_with_its_attempt(run_policy: dict[str, object]) -> None:
    world = await running()
    strip(world, "x-worker-0-1")
    world.clock.advance(3600)
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "default")
    job["spec"]["runPolicy"] = run_policy
    world.kube.seed(GPU_TRAINING_JOBS, job)
    await world.settle()
    assert world.living() == []


async def test_pod_of_the_workers_name_that_names_no_job_is_kept() -> None:
    world = await running()
    pod = world.kube.dump(PODS, "x-worker-0-1", "default")
    pod["metadata"] |= {"uid": "foreign", "ownerReferences": []}
    world.kube.seed(PODS, pod)
    await world.settle()
    assert world.living() == ["x-worker-0-1", "x-worker-0-2"]


async def bound_without_reservation(world: World, phase: str = "Pending") -> None:
    """The worker's pod is bound without the extender, or its GpuNode was replaced."""
    pod = world.kube.dump(PODS, "x-worker-0-1", "default")
    pod["spec"]["nodeName"] = "n1"
    pod["status"]["phase"] = phase
    world.kube.seed(PODS, pod)
    await world.settle()
    await world.settle(after_s=DEBOUNCE_S)


async def test_bound_pod_without_reservation_ends_its_attempt() -> None:
    """Regression: such a pod waited for ever, also with activeDeadlineSeconds."""
    world = await submitted(runPolicy={"activeDeadlineSeconds": 600})
    await bound_without_reservation(world)
    assert world.condition("Placed").reason == "NoReservation"
    await world.settle(after_s=59)
    assert world.living() == ["x-worker-0-1"]
    await world.settle(after_s=1)
    assert world.living() == ["x-worker-0-2"]
    await world.settle(after_s=DEBOUNCE_S)
    status = world.job().status
    assert [a.outcome for a in status.attempts] == ["NoReservation", "Running"]
    assert "its GpuNode held no reservation for it for 60 s" in status.attempts[0].message
    assert status.restarts == 0
    await world.start_pods()
    assert world.job().status.state == "Running"


async def test_running_pod_without_reservation_keeps_running() -> None:
    world = await running(runPolicy={"activeDeadlineSeconds": 600})
    node = world.kube.dump(GPU_NODES, "n1")
    node["spec"]["reservations"] = []
    world.kube.seed(GPU_NODES, node)
    await world.settle()
    assert world.condition("Placed").status == "True", "a pod that just ended loses its reservation first"
    await world.settle(after_s=DEBOUNCE_S)
    await world.settle(after_s=60)
    placed = world.condition("Placed")
    assert (placed.status, placed.reason) == ("False", "NoReservation")
    assert "x-worker-0-1 runs on node n1" in placed.message
    assert "it keeps running" in placed.message
    job = world.job()
    assert (job.status.state, job.status.placement[0].node) == ("Running", "n1")
    assert world.living() == ["x-worker-0-1"]
