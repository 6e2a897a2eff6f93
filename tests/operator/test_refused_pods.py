"""Pods that the API server does not let be created for now: who looks at the job hears of it once."""

import msgspec
import pytest
from carpool_core.kube.api import EVENTS, PODS, SERVICES
from carpool_core.kube.errors import Forbidden
from carpool_operator.reconcile import REFUSAL_TIMEOUT_S, reconcile
from carpool_operator.snapshot import Refusal
from operator_decisions import again, condition, created, events, predicted_job, status_of
from operator_fixtures import pod, snapshot
from operator_world import World

NOPE = 'pods "x-worker-0-1" is forbidden: no PriorityClass with name nope was found'
QUOTA = 'pods "x-worker-0-1" is forbidden: exceeded quota: pods=10'


def told(world: World) -> list[tuple[str, str, str, int]]:
    """The job's warnings: type, reason, message and how often."""
    return [
        (event["type"], event["reason"], event["message"], event["count"])
        for event in world.kube.dump_all(EVENTS)
        if event["type"] == "Warning"
    ]


async def tried(world: World, refused: Forbidden | None, kind: str = "pods") -> None:
    """Let the operator try once more."""
    if refused is not None:
        world.kube.fail_next("create", SERVICES if kind == "services" else PODS, refused)
    await world.settle()
    world.clock.advance(REFUSAL_TIMEOUT_S)


async def test_refused_pod_is_a_warning_once_however_often_it_is_tried() -> None:
    """Regression: `kubectl describe` showed no events of a job whose pod admission refused."""
    world = World()
    world.apply()
    for _ in range(4):
        await tried(world, Forbidden(NOPE, status=403))
    assert told(world) == [("Warning", "PodForbidden", NOPE, 1)]
    world.start()
    await tried(world, Forbidden(NOPE, status=403))
    assert told(world) == [("Warning", "PodForbidden", NOPE, 1)], "nor by an operator that begins anew"
    await tried(world, None)
    assert world.living() == ["x-worker-0-1"]


async def test_pod_refused_for_another_reason_is_told_anew() -> None:
    world = World()
    world.apply()
    for said in (NOPE, QUOTA, QUOTA):
        await tried(world, Forbidden(said, status=403))
    assert told(world) == [("Warning", "PodForbidden", QUOTA, 2)]


async def test_quota_whose_figures_move_with_other_pods_is_told_once() -> None:
    """Regression: each try was another event, because others' pods came and went meanwhile."""
    world = World()
    world.apply()
    for used in ("pods=10,cpu=9500m", "pods=9,cpu=9", "pods=10,cpu=1.5Ki"):
        await tried(world, Forbidden(f"{QUOTA}, used: {used}", status=403))
    assert told(world) == [("Warning", "PodForbidden", f"{QUOTA}, used: pods=10,cpu=9500m", 1)]


def test_worker_refused_beside_one_that_waits_is_told_once_until_it_exists() -> None:
    """Regression: with each try the condition went to what the other pod waits for, and back."""
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}], workers=2)
    refusal = Refusal("PodForbidden", NOPE, is_final=False)
    before = snapshot(of, pods=(pod(0, phase="Pending"),), refusal=refusal)
    refused = reconcile(before)
    assert events(refused) == ["PodForbidden"]
    tried_again = again(before, refused, refusal=None)
    assert created(tried_again) == ["x-worker-1-1"]
    still = msgspec.structs.replace(of, status=status_of(refused, of))
    assert condition(tried_again, still, "Placed").message == NOPE
    assert events(again(before, refused)) == []
    both = again(before, refused, refusal=None, pods=(pod(0, phase="Pending"), pod(1, phase="Pending")))
    assert condition(both, still, "Placed").reason == "Scheduling"


@pytest.mark.parametrize("times", [1, 3])
async def test_refused_service_of_the_workers_is_told_likewise(times: int) -> None:
    world = World()
    world.apply(workers=2)
    for _ in range(times):
        await tried(world, Forbidden("services is forbidden", status=403), "services")
    assert told(world) == [("Warning", "ServiceForbidden", "services is forbidden", 1)]
