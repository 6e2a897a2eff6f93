"""The prediction worker, the trace queue, and when predictions are renewed."""

import asyncio

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, GpuTrainingJob, ModelSource, Training
from carpool_core.testing.clock import FakeClock
from carpool_operator.actions import Predict
from carpool_operator.prediction import MAX_REPORTED_POSITION, describe, distrust
from carpool_operator.prediction_worker import (
    CalibrationKeys,
    PredictionWorker,
    TraceQueue,
    known_products,
)
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import CalibrationState
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.features import Abstention
from carpool_predictor.predict import model_version
from operator_fixtures import (
    A100,
    FEATURES,
    NOW,
    again,
    condition,
    created,
    job,
    node,
    pod,
    predicted_job,
    prediction,
    reservation,
    snapshot,
    status_of,
)
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


async def test_prediction_is_stored_under_the_keys_that_it_was_made_from() -> None:
    """Regression: it was stored under the keys at its end, so that no better one was requested."""
    runs = 0

    def calibration(_namespace: str, _gpus: int) -> Calibration:
        asyncio.get_running_loop().call_soon(learn)
        return Calibration()

    def learn() -> None:
        nonlocal runs
        runs = 1

    def marks(*_: object) -> CalibrationKeys:
        return {A100: (0, runs)}

    service = PredictionWorker(
        FakeTracer(),
        FakeClock(),
        enqueue=lambda _: None,
        observe_seconds=lambda _: None,
        calibration=calibration,
        calibration_keys=marks,
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
        self.cancelled: list[ModelSource] = []

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures:
        self.traced.append(model)
        try:
            await self.turn.acquire()
        except asyncio.CancelledError:
            self.cancelled.append(model)
            raise
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
    tasks = [asyncio.create_task(queue.trace("default", name, RESNET, Training())) for name in names]
    await until_idle()
    most = MAX_REPORTED_POSITION + 1
    assert [queue.ahead("default", name) for name in [*names, "new"]] == [
        min(most, max(0, n - traces + 1)) for n in range(waiting + 1)
    ]
    tracer.turn.release()
    await until_idle()
    assert moved == [names[1 : 1 + traces + MAX_REPORTED_POSITION]]
    await queue.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def catalog_job(name: str) -> GpuTrainingJob:
    return job(model={"catalog": {"name": f"timm/{name}"}})


def names(models: list[ModelSource]) -> list[str]:
    return [model.catalog.name.removeprefix("timm/") for model in models if model.catalog is not None]


async def requested(*keys: str) -> tuple[PredictionWorker, SlowTracer]:
    """A worker that traces one model at a time, and jobs that each wait for a model of their own."""
    tracer = SlowTracer()
    worker = PredictionWorker(tracer, FakeClock(), enqueue=lambda _: None, observe_seconds=lambda _: None)
    for key in keys:
        name = key.replace("/", "")
        worker.request(key, catalog_job(name).spec, name, (A100,))
    await until_idle()
    return worker, tracer


async def test_namespaces_take_turns_for_traces() -> None:
    """Regression: one queue for all tenants, so that 40 jobs of one delayed the jobs of all others."""
    worker, tracer = await requested("a/0", "a/1", "a/2", "b/0", "a/3", "c/0", "b/1")
    assert [worker.ahead(key, key.replace("/", "")) for key in ("b/0", "c/0", "a/3", "d/0")] == [2, 3, 6, 4]
    for _ in range(7):
        tracer.turn.release()
        await until_idle()
    assert names(tracer.traced) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
    await worker.close()


async def test_deleted_or_changed_job_cancels_its_trace() -> None:
    """Regression: 40 deleted jobs delayed the next prediction by 37 time limits of a trace."""
    worker, tracer = await requested(*(f"a/{number}" for number in range(40)), "a/40")
    worker.request("a/40", catalog_job("changed").spec, "changed", (A100,))
    for number in range(40):
        worker.forget(f"a/{number}")
    await until_idle()
    assert names(tracer.traced) == ["a0", "changed"]
    assert names(tracer.cancelled) == ["a0"]
    tracer.turn.release()
    await worker.idle()
    assert worker.get("a/40", "changed", (A100,)) is not None
    await worker.close()


async def test_trace_goes_on_while_another_job_waits_for_it() -> None:
    worker, tracer = await requested("a/0")
    worker.request("b/0", catalog_job("a0").spec, "a0", (A100,))
    await until_idle()
    worker.forget("a/0")
    await until_idle()
    tracer.turn.release()
    await worker.idle()
    assert worker.get("b/0", "a0", (A100,)) is not None
    assert (names(tracer.traced), tracer.cancelled) == (["a0"], [])
    await worker.close()


async def test_stored_features_do_not_wait_for_traces() -> None:
    worker, tracer = await requested("a/0")
    tracer.stored = msgspec.convert(FEATURES, ModelFeatures)
    worker.request("a/1", catalog_job("a1").spec, "a1", (A100,))
    await until_idle()
    assert worker.get("a/1", "a1", (A100,)) is not None
    await worker.close()


async def test_time_that_a_trace_has_waited_ends_with_its_turn() -> None:
    tracer, clock = SlowTracer(), FakeClock()
    worker = PredictionWorker(tracer, clock, enqueue=lambda _: None, observe_seconds=lambda _: None)
    for key in ("a/0", "a/1"):
        worker.request(key, catalog_job(key).spec, key, (A100,))
    await until_idle()
    clock.advance(61)
    assert [worker.trace_waited_s(key) for key in ("a/0", "a/1", "a/2")] == [0, 61, 0]
    tracer.turn.release()
    await until_idle()
    assert worker.trace_waited_s("a/1") == 0
    await worker.close()


def test_job_whose_trace_waits_too_long_starts_unpredicted_and_says_so() -> None:
    of = catalog_job("resnet50")
    waiting = reconcile(snapshot(of, traces_ahead=9, trace_waited_s=59))
    assert created(waiting) == []
    assert waiting.requeue_after_s == 1
    before = snapshot(of, traces_ahead=9, trace_waited_s=60)
    decision = reconcile(before)
    found = condition(decision, of, "Predicted")
    assert (found.status, found.reason) == ("False", "TraceQueueFull")
    assert "its trace has waited for 60 s behind others" in found.message
    assert created(decision) == ["x-worker-0-1"]
    assert not any(isinstance(action, Predict) for action in decision.actions), "which cancels the trace"
    placed = again(before, decision, pods=(pod(nodeName="n1"),), nodes=(node(reservation("pod-0-1")),))
    assert "because its memory is unknown: the model was not traced" in condition(placed, of, "Placed").message


@pytest.mark.parametrize("upper_mib", [3000, 3300], ids=["the same prediction", "another calibration"])
def test_prediction_after_a_doubted_attempt_is_renewed_without_trust(upper_mib: int) -> None:
    """Regression: an operator that had restarted predicted anew, and the job shared a GPU after all."""
    doubted = {"number": 1, "outcome": "GpuOutOfMemory", "endedAt": rfc3339(NOW), "doubted": True}
    of = predicted_job(attempts=[doubted, {"number": 2, "outcome": "Creating"}])
    assert of.status.prediction is not None
    [product] = of.status.prediction.products
    renewed = msgspec.structs.replace(product, memory=msgspec.structs.replace(product.memory, upper_mib=upper_mib))
    fresh = msgspec.structs.replace(of.status.prediction, products=[renewed])
    status = msgspec.structs.replace(of.status, prediction=distrust(of.status.prediction))
    of = msgspec.structs.replace(of, status=status)
    restarted = snapshot(of, prediction=fresh, calibration=CalibrationState(is_on=True))
    assert status_of(reconcile(restarted), of).prediction == distrust(fresh)


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
