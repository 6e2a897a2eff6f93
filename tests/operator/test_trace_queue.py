"""Models that are traced one after the other."""

import asyncio

import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.testing.clock import FakeClock
from carpool_operator.prediction import MAX_REPORTED_POSITION
from carpool_operator.prediction_worker import PredictionWorker, TraceQueue
from carpool_operator.reconcile import reconcile
from operator_decisions import condition
from operator_fixtures import A100, FEATURES, job, snapshot
from operator_world import FakeTracer

RESNET = ModelSource(catalog=CatalogModel(name="timm/resnet50"))


class SlowTracer(FakeTracer):
    """Traces one model at a time, and each only when told to."""

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


async def test_equal_inputs_are_traced_once_though_products_differ() -> None:
    """Regression: GPUs that came while a model was being traced had it traced a second time."""
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


async def test_everybody_knows_how_many_are_before_him_and_hears_of_it() -> None:
    moved: list[list[str]] = []
    tracer = SlowTracer()
    queue = TraceQueue(tracer, 1, moved.append)
    tasks = [asyncio.create_task(queue.trace(name, RESNET, Training())) for name in "abc"]
    await until_idle()
    assert [queue.ahead(name) for name in "abcd"] == [0, 1, 2, 3]
    tracer.turn.release()
    await until_idle()
    assert moved == [["b", "c"]]
    assert [queue.ahead(name) for name in "bc"] == [0, 1]
    await queue.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_far_back_in_the_queue_nobody_is_told_of_every_step() -> None:
    moved: list[list[str]] = []
    tracer = SlowTracer()
    queue = TraceQueue(tracer, 2, moved.append)
    names = [f"digest-{number}" for number in range(40)]
    tasks = [asyncio.create_task(queue.trace(name, RESNET, Training())) for name in names]
    await until_idle()
    assert queue.ahead(names[-1]) == MAX_REPORTED_POSITION + 1
    tracer.turn.release()
    await until_idle()
    assert len(moved[0]) == 2 + MAX_REPORTED_POSITION
    await queue.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_job_that_waits_for_its_trace_says_for_how_many_others() -> None:
    """Regression: each of several new jobs said `Tracing` while only the first one was being traced."""
    of = job(model={"catalog": {"name": "timm/resnet50"}})
    for ahead, reason, told in (
        (0, "Tracing", "tracing one training step of timm/resnet50"),
        (1, "TraceQueued", "after 1 other model"),
        (3, "TraceQueued", "after 3 other models"),
        (MAX_REPORTED_POSITION + 1, "TraceQueued", "after more than 10 other models"),
    ):
        found = condition(reconcile(snapshot(of, traces_ahead=ahead)), of, "Predicted")
        assert (found.status, found.reason) == ("Unknown", reason)
        assert told in found.message
