"""The feature store: what it knows, what it reckons, and what it refuses to read."""

import time
import zlib
from pathlib import Path

import pytest
from carpool_core.resources.features import LayerCounts
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor import store
from carpool_predictor.records import ModelRecord, StepRecord
from carpool_predictor.source import SubprocessTracer
from carpool_predictor.trees import MalformedError

KNOWN = CatalogModel(name="timm/vgg11_bn")


def record(name: str = "timm/x") -> ModelRecord:
    step = StepRecord(
        batch_size=16, peak_bytes=900, activation_bytes=300, flops=1e9, bytes_moved=2e9, kernels=7,
        by_kind=(1, 2, 3, 4, 5, 6, 7), saved_bytes=800, peak_before_update=900, workspace_max=5, workspace_peak=905,
        unfolded_max=6, largest_bytes=100, reserved_bytes=1000, reserved_workspace_bytes=1010,
        families={"matrix": [3, 1e9, 1e9], "copy": [4, 0.0, 1e9]},
    )  # fmt: skip
    return ModelRecord(
        name=name, family="x", input_shape=(3, 8, 8), parameters=25, trainable_parameters=25, parameter_bytes=100,
        layers=LayerCounts(linear=3), steps=(step,),
    )  # fmt: skip


def test_what_is_packed_is_unpacked() -> None:
    failed = ModelRecord(name="timm/y", failure="TraceFailed: for a reason")
    found = store.unpack(store.pack([failed, record()], {"timm": "1"}))
    assert found.record("timm/x") == record()
    assert found.record("timm/y") is None
    assert found.failures() == {"timm/y": "TraceFailed: for a reason"}
    assert found.names() == ["timm/x"]
    assert store.pack([record(), failed], {"timm": "1"}) == store.pack([failed, record()], {"timm": "1"})


@pytest.mark.parametrize("content", [b"", b"no", zlib.compress(b"{}"), zlib.compress(b"[1]")[:-3]])
def test_what_is_no_store_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedError, match="feature store"):
        store.unpack(content)


def test_a_newer_store_is_refused() -> None:
    text = zlib.decompress(store.pack([], {})).replace(b'"format":1', b'"format":2')
    with pytest.raises(MalformedError, match="upgrade carpool"):
        store.unpack(zlib.compress(text))


def test_the_shipped_store_is_small_and_answers_in_a_millisecond() -> None:
    found = store.shipped()
    training = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)
    found.features(KNOWN, training)
    begun = time.perf_counter()
    for _ in range(20):
        assert found.features(KNOWN, training)
    assert (time.perf_counter() - begun) / 20 < 0.005
    assert Path(store.__file__).with_name("artifacts").joinpath("catalog.json.z").stat().st_size < 8e6


@pytest.mark.parametrize(
    ("model", "training"),
    [
        pytest.param(CatalogModel(name="timm/resnet51"), Training(), id="unknown"),
        pytest.param(CatalogModel(name="timm/vgg11_bn", num_classes=10), Training(), id="other classes"),
        pytest.param(CatalogModel(name="timm/vgg11_bn", input=[3, 64, 64]), Training(), id="other input"),
        pytest.param(KNOWN, Training(precision=Precision.BF16_MIXED), id="other precision"),
        pytest.param(KNOWN, Training(optimizer=Optimizer.ADAGRAD), id="other optimizer"),
        pytest.param(KNOWN, Training(activation_checkpointing=True), id="checkpointing"),
    ],
)
def test_what_it_cannot_know_is_left_to_the_tracer(model: CatalogModel, training: Training) -> None:
    assert store.shipped().features(model, training) is None


@pytest.mark.parametrize("optimizer", list(store.STATE))
def test_another_optimizer_is_reckoned_as_it_is_traced(optimizer: Optimizer) -> None:
    pytest.importorskip("torch")
    from carpool_predictor.catalog import recipe_of
    from carpool_predictor.tracing import record_recipe

    training = Training(batch_size=16, optimizer=optimizer)
    traced = record_recipe(recipe_of(KNOWN), training, (16,)).features().steps[0]
    reckoned = store.shipped().features(KNOWN, training)
    assert reckoned is not None
    assert reckoned.steps[0].peak_bytes == pytest.approx(traced.peak_bytes, rel=0.02)
    assert reckoned.steps[0].reserved_bytes == pytest.approx(traced.reserved_bytes, rel=0.1)


async def test_a_model_of_the_store_starts_no_process() -> None:
    tracer = SubprocessTracer(command=("/bin/false",))
    found = await tracer.trace(ModelSource(catalog=KNOWN), Training(batch_size=32, optimizer=Optimizer.ADAMW))
    assert found == store.shipped().features(KNOWN, Training(batch_size=32, optimizer=Optimizer.ADAMW))
