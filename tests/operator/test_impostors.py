"""Pods that name a job as their controller and are not its workers."""

import json
from typing import Any

import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.api import EVENTS, PODS
from carpool_core.resources.job import GpuTrainingJob
from carpool_operator.pods import build_pod, is_as_built
from carpool_operator.reconcile import REFUSAL_TIMEOUT_S, reconcile
from carpool_operator.work_queue import DEBOUNCE_S
from operator_decisions import created, deleted, events, predicted_job, status_of
from operator_fixtures import NOW, job, node, pod, reservation, snapshot, terminated
from operator_world import World


def test_forged_labels_do_not_make_a_pod_a_worker() -> None:
    """Regression: another pod with our UID as controller and a worker's labels stood in for the real, failed one."""
    of = predicted_job()
    forged = pod(0, 1, phase="Running", nodeName="n1", metadata={"name": "forged", "uid": "forged"})
    real = pod(0, 1, phase="Failed", status=terminated(1))
    decision = reconcile(snapshot(of, pods=(real, forged)))
    assert status_of(decision, of).attempts[0].outcome == "ContainerFailed"
    assert deleted(decision) == ["forged"]
    assert events(decision) == ["ForeignPod", "Restarting"]


@pytest.mark.parametrize("name", ["forged", "x-worker-0-999"])
def test_pod_of_an_attempt_that_never_was_disturbs_nobody(name: str) -> None:
    """Regression: one pod labelled attempt=999 made the operator adopt attempt 999 and delete the running worker."""
    of = predicted_job()
    real = pod(phase="Running", nodeName="n1")
    forged = pod(0, 999, phase="Running", metadata={"name": name, "uid": "forged"})
    decision = reconcile(snapshot(of, pods=(real, forged), nodes=(node(reservation("pod-0-1")),)))
    status = status_of(decision, of)
    assert [attempt.number for attempt in status.attempts] == [1]
    assert status.state == "Running"
    assert deleted(decision) == [name]


def test_changed_labels_of_a_running_worker_disturb_nobody() -> None:
    """Regression: `kubectl label pod x-worker-0-1 carpool.dev/attempt=999 --overwrite` ended the attempt."""
    of = predicted_job()
    labels = {keys.LABEL_JOB: "x", keys.LABEL_WORKER: "7", keys.LABEL_ATTEMPT: "999"}
    real = pod(phase="Running", nodeName="n1", metadata={"labels": labels})
    decision = reconcile(snapshot(of, pods=(real,), nodes=(node(reservation("pod-0-1")),)))
    assert deleted(decision) == []
    assert [a.outcome for a in status_of(decision, of).attempts] == ["Running"]


def test_impostor_that_cannot_be_deleted_holds_nothing_up() -> None:
    of = predicted_job(attempts=[])
    going = {"name": "forged", "uid": "forged", "deletionTimestamp": rfc3339(NOW), "finalizers": ["test/slow"]}
    decision = reconcile(snapshot(of, pods=(pod(phase="Running", metadata=going),)))
    assert created(decision) == ["x-worker-0-1"]
    assert "ForeignPod" not in events(decision), "it is on its way out"


def recorded(*uids: str, outcome: str = "Running") -> GpuTrainingJob:
    return predicted_job(attempts=[{"number": 1, "outcome": outcome, "podUids": list(uids)}])


def test_pod_with_our_uid_and_a_worker_s_name_is_not_ours() -> None:
    """Regression: once the worker was gone, a pod of its name with the job's UID was followed in its place."""
    of = recorded("pod-0-1")
    forged = pod(phase="Succeeded", metadata={"uid": "forged"})
    decision = reconcile(snapshot(of, pods=(forged,)))
    status = status_of(decision, of)
    assert status.state != "Complete"
    assert status.attempts[0].outcome == "PodDeleted", "the real one is gone"
    assert deleted(decision) == ["x-worker-0-1"]
    assert "ForeignPod" in events(decision)


def test_pod_that_stands_there_before_ours_is_not_followed() -> None:
    of = recorded(outcome="Creating")
    forged = pod(phase="Succeeded", metadata={"uid": "forged"})
    decision = reconcile(snapshot(of, pods=(forged,)))
    assert created(decision) == ["x-worker-0-1"], "which finds it in the way and looks at it"
    assert status_of(decision, of).state != "Complete"


def test_pod_of_an_attempt_that_an_older_version_wrote_is_ours() -> None:
    of = recorded()
    decision = reconcile(snapshot(of, pods=(pod(phase="Succeeded"),), created_uids=frozenset()))
    assert status_of(decision, of).state == "Complete"


def seed(world: World, **changes: Any) -> str:
    """A pod that stands there under the worker's name before the operator creates it; returns its UID."""
    body = build_pod(world.job(), 0, 1)
    body["spec"] |= changes
    return str(world.kube.seed(PODS, body)["metadata"]["uid"])


async def test_forged_pod_in_the_way_is_deleted_and_ours_is_made() -> None:
    world = World()
    world.apply()
    forged = seed(world, containers=[{"name": "train", "image": "forged:1"}])
    await world.settle()
    assert [p["metadata"]["uid"] == forged for p in world.pods()] == [False]
    assert world.pods()[0]["spec"]["containers"][0]["image"] == "train:1"
    assert "ForeignPod" in {event["reason"] for event in world.kube.dump_all(EVENTS)}
    world.clock.advance(DEBOUNCE_S)
    await world.settle()
    assert world.job().status.attempts[0].pod_uids == [world.pods()[0]["metadata"]["uid"]]


@pytest.mark.parametrize("image", ["forged:1", "train:1"])
async def test_pod_in_the_way_that_is_slow_to_go_is_waited_for(image: str) -> None:
    """Regression: a terminating pod of the worker's name was met, and deleted again, in a loop without a pause."""
    world = World()
    world.apply()
    body = build_pod(world.job(), 0, 1)
    body["spec"]["containers"][0]["image"] = image
    body["metadata"] |= {"deletionTimestamp": rfc3339(NOW), "finalizers": ["test/slow"]}
    world.kube.seed(PODS, body)
    await world.settle()
    assert [call.verb for call in world.kube.calls if call.plural == "pods"] == ["check", "create", "get"]
    placed = next(c for c in world.job().status.conditions if c.type == "Placed")
    assert (placed.reason, "x-worker-0-1 has the worker's name" in placed.message) == ("PodNameTaken", True)
    world.clock.advance(REFUSAL_TIMEOUT_S)
    await world.settle()
    assert [call.verb for call in world.kube.calls if call.plural == "pods"][3:] == ["create", "get"]
    world.kube.lose(PODS, "x-worker-0-1", "default")
    await world.settle()
    assert world.living() == ["x-worker-0-1"], "created as soon as the other is gone"


async def test_pod_made_before_a_crash_is_kept() -> None:
    """What the API server and its admission add makes no other pod of it."""
    world = World()
    world.apply()
    made = seed(world, serviceAccountName="default", volumes=[{"name": "kube-api-access-x", "projected": {}}])
    await world.settle()
    assert [p["metadata"]["uid"] for p in world.pods()] == [made]
    assert world.job().status.attempts[0].pod_uids == [made]


BUILT = build_pod(job(workers=2), 1, 1)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The pod as built, with one thing replaced or added."""
    body = json.loads(json.dumps(BUILT))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    here = body
    for key in parents:
        here = here[key]
    here[last] = value
    return body


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        pytest.param(BUILT, True, id="the same"),
        pytest.param(changed("spec.nodeName", "n1"), True, id="bound"),
        pytest.param(changed("spec.tolerations", [{"key": "other"}, *BUILT["spec"]["tolerations"]]), True, id="more"),
        pytest.param(changed("metadata.labels", {**BUILT["metadata"]["labels"], "a": "b"}), True, id="labelled"),
        pytest.param(changed("spec.containers.0.image", "other:1"), False, id="another image"),
        pytest.param(changed("spec.containers", [*BUILT["spec"]["containers"], {"name": "b"}]), False, id="a sidecar"),
        pytest.param(changed("spec.containers.0.command", ["mine"]), False, id="a command"),
        pytest.param(changed("spec.containers.0.env", BUILT["spec"]["containers"][0]["env"][1:]), False, id="env"),
        pytest.param(changed("metadata.ownerReferences", []), False, id="no owner"),
    ],
)
def test_likeness(found: dict[str, Any], is_same: bool) -> None:
    assert is_as_built(found, BUILT) == is_same
