"""Predictions in the background."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import JobSpec
from carpool_core.testing.clock import FakeClock
from carpool_operator.prediction import describe
from carpool_operator.prediction_worker import CalibrationKeys, CalibrationSource, PredictionWorker, known_products
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.features import Abstention
from carpool_predictor.predict import model_version
from operator_fixtures import A100, FEATURES, job, prediction
from operator_world import FakeTracer, World


def predictions(woken: list[str]) -> PredictionWorker:
    return PredictionWorker(FakeTracer(), FakeClock(), enqueue=woken.append, observe_seconds=lambda _: None)


async def test_burst_of_different_jobs_is_computed_once_each() -> None:
    """Regression: more jobs at once than recent results are kept asked again and again for what was overwritten."""
    woken: list[str] = []
    service = predictions(woken)
    for number in range(600):
        service.request(f"default/{number}", job().spec, f"digest-{number}", (A100,))
    await service.idle()
    assert len(woken) == 600
    first = service.get("default/0", "digest-0", (A100,))
    assert first is not None
    assert first.input_digest == "digest-0"
    service.forget("default/0")
    assert service.get("default/0", "digest-0", (A100,)) is None
    await service.close()


async def test_jobs_alike_share_one_computation() -> None:
    woken: list[str] = []
    service = predictions(woken)
    for key in ("a", "b"):
        service.request(key, job().spec, "digest", (A100,))
    await service.idle()
    assert sorted(woken) == ["a", "b"]
    assert service.get("c", "digest", (A100,)) is not None
    await service.close()


async def test_prediction_of_an_older_input_is_not_taken_for_the_new_one() -> None:
    service = predictions([])
    service.request("a", job().spec, "old", (A100,))
    await service.idle()
    assert service.get("a", "new", (A100,)) is None
    assert service.get("a", "old", (A100, "Tesla T4")) is None
    await service.close()


async def test_what_is_learned_while_a_prediction_is_computed_is_not_taken_to_be_in_it() -> None:
    """Regression: it was kept under what was known when it was done, so that nobody asked for a better one."""
    runs = 0

    def calibration() -> Calibration:
        asyncio.get_running_loop().call_soon(learn)
        return Calibration()

    def learn() -> None:
        nonlocal runs
        runs = 1

    def marks(_spec: JobSpec, _products: tuple[str, ...], _size: float | None) -> CalibrationKeys:
        return {A100: (0, runs)}

    learned = CalibrationSource(calibration, marks)
    service = PredictionWorker(
        FakeTracer(), FakeClock(), enqueue=lambda _: None, observe_seconds=lambda _: None, source=learned
    )
    service.request("a", job().spec, "digest", (A100,))
    await service.idle()
    assert runs == 1
    assert service.get("b", "digest", (A100,), {A100: (0, 0)}) is not None
    assert service.get("b", "digest", (A100,), {A100: (0, 1)}) is None
    await service.close()


TIMED_OUT = Abstention(reason="TraceTimedOut", message="took longer than 120 s")
CATALOG = {"catalog": {"name": "timm/resnet50"}}


def outcome(world: World) -> tuple[str, str]:
    prediction = world.job().status.prediction
    assert prediction is not None
    return prediction.outcome, prediction.reason


async def test_abstention_of_the_moment_is_tried_again_while_the_job_waits() -> None:
    """Regression: a trace that timed out once, on a busy machine, made the job run alone for ever."""
    world = World(FakeTracer(TIMED_OUT))
    world.apply(model=CATALOG, gpusPerWorker=8)
    await world.settle()
    assert outcome(world) == ("Abstained", "TraceTimedOut")
    for pause_s, traced in ((599, 1), (1, 2), (1199, 2), (1, 3)):
        world.clock.advance(pause_s)
        await world.settle()
        assert len(world.tracer.traced) == traced
    world.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    world.clock.advance(2400)
    await world.settle()
    assert outcome(world)[0] == "Predicted"


async def test_job_with_pods_is_not_predicted_again() -> None:
    world = World(FakeTracer(TIMED_OUT))
    world.apply(model=CATALOG)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]
    world.clock.advance(3600)
    world.operator.queue.add("default/x")
    await world.settle()
    assert len(world.tracer.traced) == 1


async def test_resumed_job_is_tried_again_before_its_first_pod() -> None:
    world = World(FakeTracer(TIMED_OUT))
    world.apply(model=CATALOG, runPolicy={"suspend": True})
    await world.settle()
    world.clock.advance(3600)
    await world.settle()
    assert len(world.tracer.traced) == 1, "nobody waits for it"
    world.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    resumed = {"spec": {"runPolicy": {"suspend": False}}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", resumed, namespace="default")
    await world.settle()
    assert outcome(world)[0] == "Predicted"
    assert world.living() == ["x-worker-0-1"]


async def test_abstention_for_the_model_s_own_sake_is_final() -> None:
    world = World(FakeTracer(Abstention(reason="OperatorUnsupported", message="no fake kernel")))
    world.apply(model=CATALOG, gpusPerWorker=8)
    await world.settle()
    world.clock.advance(86400)
    world.operator.queue.add("default/x")
    await world.settle()
    assert len(world.tracer.traced) == 1


async def test_new_version_of_the_predictor_renews_predictions() -> None:
    """Regression: jobs that waited through an upgrade kept what the old model had said of them."""
    world = World()
    world.apply(gpusPerWorker=8)
    await world.settle()
    old = {"status": {"prediction": {"modelVersion": "older"}}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", old, namespace="default", subresource="status")
    world.start()
    await world.settle()
    prediction = world.job().status.prediction
    assert prediction is not None
    assert prediction.model_version == model_version()


def test_products_that_the_predictor_does_not_know_are_left_out() -> None:
    assert [p.name for p in known_products((A100, "Voodoo 2"))] == [A100]


def test_features_fixture_is_well_formed() -> None:
    assert msgspec.to_builtins(job().spec.model) == {"features": FEATURES}


@pytest.mark.parametrize(("number", "told"), [(2, ""), (3, "and 1 more product"), (4, "and 2 more products")])
def test_of_many_products_the_first_two_are_told(number: int, told: str) -> None:
    said = describe(prediction(*[f"product {n}" for n in range(number)]))
    assert said.count("memory") == 2
    assert said.partition("product 1:")[2].partition("; ")[2] == told
