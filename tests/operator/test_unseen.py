"""Pods that somebody took Carpool's label from, so that the operator hears no more of them."""

import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_operator.reconcile import REFUSAL_TIMEOUT_S
from operator_fixtures import NOW
from operator_world import World


async def running(**spec: object) -> World:
    world = World()
    world.apply(**spec)
    await world.settle()
    world.run_pods()
    await world.settle()
    return world


def hide(world: World, name: str, **metadata: object) -> None:
    """What `kubectl label pod NAME carpool.dev/job-` does."""
    pod = world.kube.dump(PODS, name, "default")
    del pod["metadata"]["labels"][keys.LABEL_JOB]
    pod["metadata"] |= metadata
    world.kube.seed(PODS, pod)


def names(world: World) -> list[str]:
    return [pod["metadata"]["name"] for pod in world.kube.dump_all(PODS)]


async def test_pod_without_its_label_does_not_run_beside_the_next_attempt() -> None:
    """Regression: the pod counted as deleted, attempt 2 began, and the first pod ran on unseen."""
    world = await running()
    hide(world, "x-worker-0-1")
    await world.settle()
    world.clock.advance(REFUSAL_TIMEOUT_S)
    await world.settle()
    assert names(world) == ["x-worker-0-2"]
    assert [a.outcome for a in world.job().status.attempts] == ["PodDeleted", "Running"]


async def test_next_attempt_waits_for_a_hidden_pod_that_is_slow_to_go() -> None:
    world = await running()
    hide(world, "x-worker-0-1", finalizers=["test/slow"], deletionTimestamp=rfc3339(NOW))
    for _ in range(3):
        await world.settle()
        world.clock.advance(REFUSAL_TIMEOUT_S)
    assert names(world) == ["x-worker-0-1"]
    placed = next(c for c in world.job().status.conditions if c.type == "Placed")
    assert placed.reason == "WaitingForPods"
    assert "waits for pod x-worker-0-1" in placed.message
    world.kube.lose(PODS, "x-worker-0-1", "default")
    world.clock.advance(REFUSAL_TIMEOUT_S)
    await world.settle()
    assert names(world) == ["x-worker-0-2"]


@pytest.mark.parametrize("run_policy", [{"suspend": True}, {"activeDeadlineSeconds": 60}])
async def test_hidden_pod_ends_with_its_job_s_attempt(run_policy: dict[str, object]) -> None:
    world = await running()
    hide(world, "x-worker-0-1")
    world.clock.advance(3600)
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "default")
    job["spec"]["runPolicy"] = run_policy
    world.kube.seed(GPU_TRAINING_JOBS, job)
    await world.settle()
    assert names(world) == []


async def test_other_pod_of_that_name_is_left_alone() -> None:
    world = await running()
    hide(world, "x-worker-0-1", uid="somebody-else-s")
    await world.settle()
    assert names(world) == ["x-worker-0-1", "x-worker-0-2"]
