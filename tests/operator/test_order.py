"""Where a job's pods stand among those that wait: by their lengths, where the site wants the longest first."""

from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.demand import demand_of
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.lengths import RUNGS, rung
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.resources.prediction import Prediction, ProductPrediction
from carpool_core.settings import SettingsError
from carpool_operator.decisions.actions import CheckTemplate, CreatePod, RecordEvent
from carpool_operator.decisions.order import class_of, length_of, told
from carpool_operator.decisions.reconcile import REFUSED_AGAIN_AFTER_S, reconcile
from carpool_operator.settings import OperatorSettings
from carpool_operator.state.attempts import spec_digest
from carpool_operator.state.conditions import find
from carpool_operator.workers.pods import build_pod
from operator_decisions import condition, deleted, events, predicted_job, status_of
from operator_fixtures import A100, abstention, job, node, pod, prediction, snapshot, template
from operator_world import World

PREFIX = "c-length-"
H100 = "NVIDIA H100 80GB HBM3"
UNKNOWN = f"{PREFIX}{rung(None):02}"


def given(steps: int | None, predicted: Prediction | None = None, **spec: Any) -> GpuTrainingJob:
    """A job whose step takes 0.1 s, and that has so many."""
    training = {} if steps is None else {"steps": steps}
    return job({"prediction": msgspec.to_builtins(predicted or prediction())}, training=training, **spec)


def classified(of: GpuTrainingJob, prefix: str = PREFIX) -> str | None:
    return class_of(snapshot(of, length_classes=prefix), demand_of(of))


@pytest.mark.parametrize(
    ("steps", "number"),
    [
        pytest.param(599, 0, id="under a minute"),
        pytest.param(600, 1, id="a minute"),
        pytest.param(36_000, 11, id="an hour"),
        pytest.param(10**12, RUNGS - 1, id="the longest of all"),
        pytest.param(None, rung(None), id="nobody said how many: an hour"),
    ],
)
def test_class_is_that_of_the_length(steps: int | None, number: int) -> None:
    assert classified(given(steps)) == f"c-length-{number:02}"


def test_length_that_cannot_be_told_counts_as_an_hour() -> None:
    assert classified(given(10**9, abstention())) == UNKNOWN


def test_order_of_arrival_needs_no_class() -> None:
    assert classified(given(36_000), prefix="") is None


@pytest.mark.parametrize(
    "own",
    [
        {"priorityClassName": "urgent"},
        {"priority": 0},
        {"preemptionPolicy": "PreemptLowerPriority"},
    ],
    ids=lambda own: next(iter(own)),
)
def test_template_with_a_say_of_its_own_keeps_it(own: dict[str, Any]) -> None:
    """The API server refuses a pod whose priority or policy is another than its class's."""
    of = given(36_000, template=template(**own))
    assert classified(of) is None
    assert build_pod(of, 0, 1)["spec"].items() >= own.items()


@pytest.mark.parametrize("nothing", ["", None])
def test_empty_class_of_a_template_is_none(nothing: str | None) -> None:
    of = given(36_000, template=template(priorityClassName=nothing))
    assert classified(of) == "c-length-11"
    assert "priorityClassName" not in build_pod(of, 0, 1)["spec"], "a pod with another would look foreign"


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
        pytest.param({}, 200.0, id="the mean of both"),
        pytest.param({"product": "A100"}, 100.0, id="the one that it asks for"),
        pytest.param({"minMemory": "60Gi"}, 300.0, id="the one that is large enough"),
        pytest.param({"product": "L4"}, None, id="one that the cluster has not"),
    ],
)
def test_only_gpus_that_it_may_have_tell_its_length(gpu: dict[str, Any], expected: float | None) -> None:
    of = given(1000, BOTH, gpu=gpu)
    here = snapshot(of, nodes=(mixed(),))
    found = length_of(of, demand_of(of), here.inventory)
    assert found == (None if expected is None else pytest.approx(expected))


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
    assert told(steps, {A100: seconds}) == said


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
    assert told(35_000, lengths) == said


def test_every_pod_of_a_job_gets_the_class() -> None:
    of = predicted_job(attempts=[], workers=2, training={"steps": 36_000})
    made = [a for a in reconcile(snapshot(of, length_classes=PREFIX)).actions if isinstance(a, CreatePod)]
    assert [action.priority_class for action in made] == ["c-length-11", "c-length-11"]


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


def classes(world: World) -> list[str | None]:
    return [item["spec"].get("priorityClassName") for item in world.kube.dump_all(PODS)]


@pytest.mark.parametrize(("prefix", "expected"), [(PREFIX, [f"{PREFIX}23"]), ("", [None])], ids=["on", "off"])
async def test_pod_is_created_with_its_class(prefix: str, expected: list[str | None]) -> None:
    world = World(length_classes=prefix)
    world.apply(training={"steps": 10**12})
    await world.settle()
    assert classes(world) == expected


def test_template_is_tried_without_the_class_which_is_none_of_its_doing() -> None:
    of = job(training={"steps": 36_000})
    decision = reconcile(snapshot(of, is_template_checked=False, length_classes=PREFIX))
    (tried,) = [action for action in decision.actions if isinstance(action, CheckTemplate)]
    assert "priorityClassName" not in tried.body["spec"]


async def test_missing_class_is_told_of_and_waited_for() -> None:
    """As while a release that had none is being changed to one that has."""
    world = World(length_classes=PREFIX)
    world.apply()
    missing = Forbidden(f"no PriorityClass with name {UNKNOWN} was found", status=403)
    world.kube.fail_next("create", PODS, missing)
    await world.settle()
    placed = find(world.job().status, keys.CONDITION_PLACED)
    assert placed is not None
    assert placed.reason == "PodForbidden"
    assert UNKNOWN in placed.message
    world.clock.advance(REFUSED_AGAIN_AFTER_S)
    await world.settle()
    assert classes(world) == [UNKNOWN]


async def killed_after_its_pod_was_made() -> World:
    """A world whose operator was killed before it could write down which pod it had made."""
    for write in range(1, 12):
        world = World(length_classes=PREFIX)
        world.apply(training={"steps": 100})
        assert await world.survive(write, happens=True)
        if world.pods():
            return world
    raise AssertionError("no pod was made")


@pytest.mark.parametrize("later", [PREFIX, ""], ids=["another length", "switched off"])
async def test_pod_made_before_a_crash_is_the_jobs_own_whatever_its_class(later: str) -> None:
    """A pod of which nobody knows who made it is compared with what would be made now, when another length counts."""
    world = await killed_after_its_pod_was_made()
    (before,) = world.pods()
    assert classes(world) == [f"{PREFIX}00"]
    body = world.kube.dump(GPU_TRAINING_JOBS, "x", "default")
    body["spec"]["training"]["steps"] = 10**12
    body["metadata"]["generation"] += 1
    world.kube.seed(GPU_TRAINING_JOBS, body)
    world.settings = OperatorSettings(length_classes=later)
    world.start()
    await world.settle()
    assert world.pods() == [before]
    assert world.job().status.attempts[-1].pod_uids == [before["metadata"]["uid"]]


@pytest.mark.parametrize("prefix", ["Length-", "-length", "a b", "length_"])
def test_prefix_that_no_class_can_have_is_refused_at_the_start(prefix: str) -> None:
    with pytest.raises(SettingsError, match="CARPOOL_LENGTH_CLASSES: expected the beginning of the PriorityClasses'"):
        World(length_classes=prefix)
