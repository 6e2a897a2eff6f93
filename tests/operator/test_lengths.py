"""How long a job takes: on which GPUs, and what its user is told of it."""

from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.demand import demand_of
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction, ProductPrediction
from carpool_operator.actions import RecordEvent
from carpool_operator.attempts import spec_digest
from carpool_operator.prediction import describe_duration, suitable_durations_s
from carpool_operator.reconcile import reconcile
from operator_decisions import condition, deleted, events, predicted_job, status_of
from operator_fixtures import A100, abstention, job, node, pod, prediction, snapshot
from operator_world import World

H100 = "NVIDIA H100 80GB HBM3"


def slower(product: str, step_s: float) -> ProductPrediction:
    (told_of,) = prediction(product).products
    step = msgspec.structs.replace(told_of.step_time_seconds, median=step_s)
    return msgspec.structs.replace(told_of, step_time_seconds=step)


BOTH = msgspec.structs.replace(
    prediction(), products=[slower(H100, 0.3), *prediction(A100).products, *prediction("NVIDIA L4").products]
)
"""Of two products that `mixed` has, and of one that it has not."""


def mixed() -> GpuNode:
    """A node with one GPU of each of two products."""
    devices = node(gpus=2).status.devices
    devices[1] = msgspec.structs.replace(devices[1], product=H100, memory_mib=81_559)
    return msgspec.structs.replace(node(), status=msgspec.structs.replace(node().status, devices=devices))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        pytest.param({}, {A100: 100.0, H100: 300.0}, id="both"),
        pytest.param({"product": "A100"}, {A100: 100.0}, id="the one that it asks for"),
        pytest.param({"minMemory": "60Gi"}, {H100: 300.0}, id="the one that is large enough"),
        pytest.param({"product": "L4"}, {}, id="one that the cluster has not"),
    ],
)
def test_only_gpus_that_it_may_have_tell_its_length(gpu: dict[str, Any], expected: dict[str, float]) -> None:
    of = job({"prediction": msgspec.to_builtins(BOTH)}, training={"steps": 1000}, gpu=gpu)
    here = snapshot(of, nodes=(mixed(),))
    assert suitable_durations_s(of, demand_of(of), here.inventory) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "seconds", "said"),
    [
        (1, 0.25, "1 step takes about 250 ms alone"),
        (900, 89.0, "900 steps take about 89 s alone"),
        (1000, 100.0, "1,000 steps take about 1.7 min alone"),
        (50_000, 5000.0, "50,000 steps take about 83 min alone"),
        (120_000, 50_400.0, "120,000 steps take about 14 h alone"),
        (10**12, 1e11, "1,000,000,000,000 steps take about 1,157,407 d alone"),
    ],
)
def test_length_is_told_in_a_unit_that_people_use(steps: int, seconds: float, said: str) -> None:
    assert describe_duration(steps, {A100: seconds}) == said


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        pytest.param(
            {A100: 3132.0, "Tesla T4": 24_480.0, H100: 1440.0},
            f"35,000 steps take about 24 min ({H100}) to 6.8 h (Tesla T4) alone",
            id="the fastest and the slowest",
        ),
        pytest.param({A100: 3600.0, H100: 3900.0}, "35,000 steps take about 62 min alone", id="hardly different"),
        pytest.param(
            {A100: 4000.0, H100: 3600.0},
            f"35,000 steps take about 60 min ({H100}) to 67 min ({A100}) alone",
            id="by more than a tenth",
        ),
    ],
)
def test_length_is_told_of_the_products_between_which_it_lies(lengths: dict[str, float], said: str) -> None:
    assert describe_duration(35_000, lengths) == said


def test_length_is_told_with_the_prediction() -> None:
    of = job(training={"steps": 36_000})
    decision = reconcile(snapshot(of, prediction=prediction()))
    assert (
        condition(decision, of, keys.CONDITION_PREDICTED).message == "estimated; 36,000 steps take about 60 min alone"
    )
    (said,) = [a.message for a in decision.actions if isinstance(a, RecordEvent) and a.reason == "Predicted"]
    assert said.endswith("step 0.1 s; 36,000 steps take about 60 min alone")


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        pytest.param({}, f"about 60 min ({A100}) to 3 h ({H100}) alone", id="any"),
        pytest.param({"product": "H100"}, "about 3 h alone", id="the one that it asks for"),
    ],
)
def test_length_is_told_of_every_product_that_the_job_may_run_on(gpu: dict[str, Any], said: str) -> None:
    """And of no other: one mean over unlike products would be true of none of them."""
    of = job(training={"steps": 36_000}, gpu=gpu)
    decision = reconcile(snapshot(of, prediction=BOTH, nodes=(mixed(),)))
    assert condition(decision, of, keys.CONDITION_PREDICTED).message == f"estimated; 36,000 steps take {said}"
    (event,) = [a.message for a in decision.actions if isinstance(a, RecordEvent) and a.reason == "Predicted"]
    assert event.endswith(f"; 36,000 steps take {said}")


@pytest.mark.parametrize(
    ("training", "told_of"),
    [({}, prediction()), ({"steps": 36_000}, abstention())],
    ids=["nobody said how many steps", "abstained"],
)
def test_nothing_is_said_of_an_unknown_length(training: dict[str, Any], told_of: Prediction) -> None:
    of = job(training=training)
    decision = reconcile(snapshot(of, prediction=told_of))
    assert condition(decision, of, keys.CONDITION_PREDICTED).message == told_of.message
    assert not [a for a in decision.actions if isinstance(a, RecordEvent) and "alone" in a.message]


def test_amount_of_memory_that_nobody_can_read_fails_the_job_as_before() -> None:
    of = job(training={"steps": 36_000}, memory={"limit": "many"})
    decision = reconcile(snapshot(of, prediction=prediction()))
    assert condition(decision, of, keys.CONDITION_FAILED).reason == "InvalidSpec"


def corrected(before: GpuTrainingJob, steps: int) -> GpuTrainingJob:
    """A job after its user has changed the number of its steps: its attempt knows of which spec it was made."""
    digest = spec_digest(before.spec)
    tried = [msgspec.structs.replace(attempt, spec_digest=digest) for attempt in before.status.attempts]
    spec = msgspec.structs.replace(before.spec, training=msgspec.structs.replace(before.spec.training, steps=steps))
    metadata = msgspec.structs.replace(before.metadata, generation=before.metadata.generation + 1)
    status = msgspec.structs.replace(before.status, attempts=tried)
    return msgspec.structs.replace(before, metadata=metadata, spec=spec, status=status)


def test_corrected_steps_leave_a_waiting_pod_alone() -> None:
    first = snapshot(predicted_job(training={"steps": 100}), pods=(pod(),), prediction=prediction())
    of = corrected(first.job, steps=200)
    decision = reconcile(snapshot(of, pods=(pod(),)))
    assert deleted(decision) == []
    assert [attempt.outcome for attempt in status_of(decision, of).attempts] == ["Running"]
    assert "Predicted" not in events(decision)


def test_corrected_steps_are_told_without_another_prediction() -> None:
    new = job(training={"steps": 36_000})
    decided = reconcile(snapshot(new, prediction=prediction()))
    of = corrected(msgspec.structs.replace(new, status=status_of(decided, new)), steps=72_000)
    decision = reconcile(snapshot(of))
    said = condition(decision, of, keys.CONDITION_PREDICTED)
    assert said.message == "estimated; 72,000 steps take about 2 h alone"
    assert events(decision) == ["PodCreated"]


async def test_one_trace_serves_jobs_that_differ_in_their_steps() -> None:
    world = World()
    catalog = {"catalog": {"name": "timm/resnet18"}}
    world.apply("x", model=catalog, training={"steps": 100})
    world.apply("y", model=catalog, training={"steps": 10**9})
    await world.settle()
    assert len(world.tracer.traced) == 1
    of_x, of_y = (world.job(name).status.prediction for name in "xy")
    assert of_x is not None
    assert of_x == of_y
