"""A new job's status has time: its pods carry the prediction, and one write tells it together with their place."""

from pathlib import Path

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_PREDICTION, CONDITION_PLACED
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.sealing import sealer_of
from carpool_core.values import JobState
from carpool_operator.conditions import find
from carpool_operator.informers import NEWS_S
from operator_fixtures import job_body, template
from operator_world import World


@pytest.fixture
def world(key_file: Path) -> World:
    return World(prediction_key=key_file)


def status_writes(world: World) -> int:
    return sum(call.verb == "replace" for call in world.kube.calls)


def written(world: World, since: int = 0) -> list[tuple[str, str]]:
    calls = world.kube.calls[since:]
    return [(c.verb, c.plural) for c in calls if c.verb in ("replace", "create") and c.plural != "events"]


def carried(world: World) -> list[str]:
    return [pod["metadata"]["annotations"].get(ANNOTATION_PREDICTION, "") for pod in world.pods()]


async def test_prediction_attempt_and_place_are_told_with_one_write(world: World, key_file: Path) -> None:
    world.apply(workers=2)
    await world.settle()
    assert status_writes(world) == 0
    world.run_pods()
    await world.settle()
    world.clock.advance(NEWS_S)
    await world.settle()
    assert status_writes(world) == 1
    of = world.job()
    assert of.status.state is JobState.RUNNING
    assert of.status.attempts[-1].pod_uids == sorted(pod["metadata"]["uid"] for pod in world.pods())
    assert len(of.status.placement) == 2
    sealer = sealer_of(key_file)
    assert sealer is not None
    opened = [sealer.open(one, of.metadata.uid, of.metadata.generation) for one in carried(world)]
    assert opened == [of.status.prediction] * 2


async def test_without_a_key_the_status_comes_first() -> None:
    world = World()
    world.apply()
    await world.settle()
    assert written(world)[:2] == [("replace", "gputrainingjobs"), ("create", "pods")]
    assert world.job().status.prediction is not None
    assert carried(world) == [""]


async def test_pod_that_finds_no_place_is_told_of_soon(world: World) -> None:
    world.apply()
    await world.settle()
    world.clock.advance(NEWS_S)
    await world.settle()
    assert status_writes(world) == 1
    placed = find(world.job().status, CONDITION_PLACED)
    assert placed is not None
    assert placed.reason == "Scheduling"
    assert world.job().status.prediction is not None


async def test_refused_pod_is_told_of_at_once(world: World) -> None:
    world.apply()
    world.kube.fail_next("create", PODS, Forbidden("exceeded quota", status=403))
    await world.settle()
    placed = find(world.job().status, CONDITION_PLACED)
    assert placed is not None
    assert placed.reason == "PodForbidden"


async def test_labels_that_change_meanwhile_lose_nothing(world: World) -> None:
    world.apply()
    await world.settle()
    await world.kube.patch(GPU_TRAINING_JOBS, "x", {"metadata": {"labels": {"team": "a"}}}, namespace="default")
    before = [pod["metadata"]["uid"] for pod in world.pods()]
    await world.settle()
    world.clock.advance(NEWS_S)
    await world.settle()
    assert [pod["metadata"]["uid"] for pod in world.pods()] == before
    assert world.job().status.attempts[-1].pod_uids == before
    assert world.job().metadata.labels == {"team": "a"}


async def test_spec_that_changes_meanwhile_replaces_the_pods(world: World) -> None:
    world.apply()
    await world.settle()
    changed = {"spec": {"template": template(priorityClassName="high")}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", changed, namespace="default")
    await world.settle()
    world.clock.advance(10)
    await world.settle()
    assert [(a.number, a.outcome) for a in world.job().status.attempts] == [(1, "SpecChanged"), (2, "Running")]
    assert [pod["spec"].get("priorityClassName") for pod in world.pods()] == ["high"]
    assert carried(world) == [""], "by then the status tells the prediction"


async def test_status_that_somebody_else_writes_is_believed(world: World) -> None:
    world.apply()
    await world.settle()
    forced = {"status": {"startTime": "2026-01-31T12:00:00Z"}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", forced, namespace="default", subresource="status")
    await world.settle()
    world.clock.advance(30)
    await world.settle()
    assert world.job().status.start_time == "2026-01-31T12:00:00Z"
    assert world.job().status.attempts[-1].pod_uids == [pod["metadata"]["uid"] for pod in world.pods()]


async def test_job_made_anew_begins_without_what_was_held(world: World) -> None:
    world.apply()
    await world.settle()
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    world.kube.seed(GPU_TRAINING_JOBS, job_body(runPolicy={"suspend": True}))
    await world.settle()
    assert world.job().status.attempts == []
    assert world.job().status.state is JobState.SUSPENDED


async def test_running_pods_are_kept_by_who_takes_over_before_the_status_was_written(world: World) -> None:
    """The predecessor was killed after the pod ran, and before anything of it was told."""
    world.apply()
    await world.settle()
    world.run_pods()
    assert status_writes(world) == 0
    before = [pod["metadata"]["uid"] for pod in world.pods()]
    world.start()
    await world.settle()
    world.clock.advance(5)
    await world.settle()
    assert [pod["metadata"]["uid"] for pod in world.pods()] == before
    assert world.job().status.state is JobState.RUNNING
    assert world.job().status.attempts[-1].pod_uids == before


async def test_predicted_job_that_was_suspended_needs_no_annotation(world: World) -> None:
    world.apply(runPolicy={"suspend": True})
    await world.settle()
    assert world.job().status.prediction is not None
    told = status_writes(world)
    await world.kube.patch(GPU_TRAINING_JOBS, "x", {"spec": {"runPolicy": None}}, namespace="default")
    await world.settle()
    assert carried(world) == [""]
    assert status_writes(world) == told, "nobody waits for what else is told"


async def test_later_attempts_are_told_before_their_pods(world: World) -> None:
    """What an attempt failed of must not be forgotten."""
    world.apply()
    await world.settle()
    world.run_pods()
    await world.settle()
    world.end_pod("x-worker-0-1", exit_code=1)
    await world.settle()
    world.clock.advance(10)
    world.hear()
    order = len(world.kube.calls)
    await world.settle()
    assert written(world, order)[:2] == [("replace", "gputrainingjobs"), ("create", "pods")]
    assert msgspec.to_builtins(world.job().status.attempts[-1])["number"] == 2
