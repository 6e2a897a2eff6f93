"""The prediction worker, the trace queue, and when predictions are renewed."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, JobSpec, ModelSource, Training
from carpool_core.testing.clock import FakeClock
from carpool_operator.prediction import MAX_REPORTED_POSITION, describe
from carpool_operator.prediction_worker import (
    CalibrationKeys,
    CalibrationSource,
    PredictionWorker,
    TraceQueue,
    known_products,
)
from carpool_operator.reconcile import reconcile
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.features import Abstention
from carpool_predictor.predict import model_version
from operator_fixtures import A100, FEATURES, condition, job, prediction, snapshot
from operator_world import FakeTracer, World, submitted


def predictions(woken: list[str]) -> PredictionWorker:
    return PredictionWorker(FakeTracer(), FakeClock(), enqueue=woken.append, observe_seconds=lambda _: None)


async def test_burst_of_different_jobs_is_computed_once_per_job() -> None:
    """Regression: more jobs than the cache holds requested the same predictions again and again."""
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


async def test_equal_jobs_share_one_computation() -> None:
    enqueued: list[str] = []
    service = predictions(enqueued)
    for key in ("a", "b"):
        service.request(key, job().spec, "digest", (A100,))
    await service.idle()
    assert sorted(enqueued) == ["a", "b"]
    assert service.get("c", "digest", (A100,)) is not None
    assert service.get("a", "another digest", (A100,)) is None
    assert service.get("a", "digest", (A100, "Tesla T4")) is None
    await service.close()


async def test_prediction_is_stored_under_the_keys_that_it_was_made_from() -> None:
    """Regression: it was stored under the keys at its end, so that no better one was requested."""
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


async def test_transient_abstention_is_tried_again_while_the_job_waits() -> None:
    """Regression: a single trace that timed out made the job run alone for ever."""
    world = World(FakeTracer(TIMED_OUT))
    await world.submit(model=CATALOG, gpusPerWorker=8)
    assert outcome(world) == ("Abstained", "TraceTimedOut")
    for pause_s, traced in ((599, 1), (1, 2), (1199, 2), (1, 3)):
        await world.settle(after_s=pause_s)
        assert len(world.tracer.traced) == traced
    world.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    await world.settle(after_s=2400)
    assert outcome(world)[0] == "Predicted"


@pytest.mark.parametrize(
    ("answer", "gpus"),
    [(TIMED_OUT, 1), (Abstention(reason="OperatorUnsupported", message="no fake kernel"), 8)],
    ids=["a job with pods", "an abstention because of the model"],
)
async def test_abstention_is_final(answer: Abstention, gpus: int) -> None:
    world = World(FakeTracer(answer))
    await world.submit(model=CATALOG, gpusPerWorker=gpus)
    assert world.living() == (["x-worker-0-1"] if gpus == 1 else [])
    world.clock.advance(86400)
    await world.reconcile_again()
    assert len(world.tracer.traced) == 1


async def test_resumed_job_is_tried_again_before_its_first_pod() -> None:
    world = World(FakeTracer(TIMED_OUT))
    await world.submit(model=CATALOG, runPolicy={"suspend": True})
    await world.settle(after_s=3600)
    assert len(world.tracer.traced) == 1, "a suspended job does not wait for it"
    world.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    resumed = {"spec": {"runPolicy": {"suspend": False}}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", resumed, namespace="default")
    await world.settle()
    assert outcome(world)[0] == "Predicted"
    assert world.living() == ["x-worker-0-1"]


async def test_new_version_of_the_predictor_renews_predictions() -> None:
    """Regression: jobs that waited through an upgrade kept the old model's prediction."""
    world = await submitted(gpusPerWorker=8)
    old = {"status": {"prediction": {"modelVersion": "older"}}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", old, namespace="default", subresource="status")
    world.start()
    await world.settle()
    prediction = world.job().status.prediction
    assert prediction is not None
    assert prediction.model_version == model_version()


def test_unknown_products_are_left_out() -> None:
    assert [p.name for p in known_products((A100, "Voodoo 2"))] == [A100]


@pytest.mark.parametrize(("number", "rest"), [(2, ""), (3, "and 1 more product"), (4, "and 2 more products")])
def test_two_products_are_described(number: int, rest: str) -> None:
    text = describe(prediction(*[f"product {n}" for n in range(number)]))
    assert text.count("memory") == 2
    assert text.partition("product 1:")[2].partition("; ")[2] == rest


RESNET = ModelSource(catalog=CatalogModel(name="timm/resnet50"))


class SlowTracer(FakeTracer):
    """Traces one model for each release of its semaphore."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Semaphore(0)

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures:
        self.traced.append(model)
        await self.turn.acquire()
        return msgspec.convert(FEATURES, ModelFeatures)


async def until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_equal_inputs_with_other_products_are_traced_once() -> None:
    """Regression: a GPU product that was added during a trace caused a second trace."""
    tracer, woken = SlowTracer(), list[str]()
    service = PredictionWorker(tracer, FakeClock(), enqueue=woken.append, observe_seconds=lambda _: None)
    spec = job(model={"catalog": {"name": "timm/resnet50"}}).spec
    service.request("a", spec, "digest", (A100,))
    service.request("b", spec, "digest", (A100, "Tesla T4"))
    await until_idle()
    tracer.turn.release()
    await service.idle()
    assert len(tracer.traced) == 1
    assert set(woken) == {"a", "b"}
    found = service.get("b", "digest", (A100, "Tesla T4"))
    assert found is not None
    assert [p.product for p in found.products] == [A100, "Tesla T4"]
    await service.close()


@pytest.mark.parametrize(("traces", "waiting"), [(1, 3), (2, 40)])
async def test_trace_queue_reports_positions_near_its_head(traces: int, waiting: int) -> None:
    moved: list[list[str]] = []
    tracer = SlowTracer()
    queue = TraceQueue(tracer, traces, moved.append)
    names = [f"digest-{number}" for number in range(waiting)]
    tasks = [asyncio.create_task(queue.trace(name, RESNET, Training())) for name in names]
    await until_idle()
    most = MAX_REPORTED_POSITION + 1
    assert [queue.ahead(name) for name in [*names, "new"]] == [
        min(most, max(0, n - traces + 1)) for n in range(waiting + 1)
    ]
    tracer.turn.release()
    await until_idle()
    assert moved == [names[1 : 1 + traces + MAX_REPORTED_POSITION]]
    await queue.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_job_that_waits_for_its_trace_reports_its_position() -> None:
    """Regression: each of several new jobs reported `Tracing` while only the first was being traced."""
    of = job(model={"catalog": {"name": "timm/resnet50"}})
    for ahead, reason, message in (
        (0, "Tracing", "tracing one training step of timm/resnet50"),
        (1, "TraceQueued", "after 1 other model"),
        (3, "TraceQueued", "after 3 other models"),
        (MAX_REPORTED_POSITION + 1, "TraceQueued", "after more than 10 other models"),
    ):
        found = condition(reconcile(snapshot(of, traces_ahead=ahead)), of, "Predicted")
        assert (found.status, found.reason) == ("Unknown", reason)
        assert message in found.message
