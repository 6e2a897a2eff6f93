"""The pure estimator: its promises over all inputs, and when it must not answer."""

import math
import time
from typing import Any

import msgspec
import pytest
from carpool_core.products import PRODUCTS, find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, Parallelism, TracedStep
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.resources.prediction import Interval, Prediction
from carpool_core.values import MIB, CrossEntropy, Optimizer, ParallelKind, Precision
from carpool_predictor.catalog import store
from carpool_predictor.features import cost_at
from carpool_predictor.models.memory import class_width_mib, correction_of, shipped
from carpool_predictor.predict import Abstention, predict
from hypothesis import given, settings
from hypothesis import strategies as st

A100 = find_product("A100-SXM4-40GB")


def step(batch: int, peak_mib: float, *, flops: float = 1e12, kernels: int = 500) -> TracedStep:
    return TracedStep(
        batch_size=batch,
        peak_bytes=int(peak_mib * MIB),
        activation_bytes=int(peak_mib * MIB / 2),
        flops=flops * batch,
        bytes_moved=1e9 * batch,
        kernels=kernels,
    )


def features(*steps: TracedStep, **changes: object) -> ModelFeatures:
    base = ModelFeatures(
        name="m",
        parameters=25_000_000,
        trainable_parameters=25_000_000,
        parameter_bytes=100 * MIB,
        layers=LayerCounts(convolution=53, linear=1),
        steps=list(steps) or [step(32, 3000), step(64, 5800)],
    )
    return msgspec.structs.replace(base, **changes)


@st.composite
def any_features(draw: st.DrawFn) -> ModelFeatures:
    parameter_bytes = draw(st.integers(1, 2**36))
    batches = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=4)))
    activations = [draw(st.integers(0, 2**40)) for _ in batches]
    work = [(draw(st.floats(0, 1e18)), draw(st.floats(0, 1e15)), draw(st.integers(1, 10**6))) for _ in batches]
    steps = [
        TracedStep(
            batch_size=batch, peak_bytes=parameter_bytes + activation, activation_bytes=activation, flops=flops,
            bytes_moved=moved, kernels=kernels,
        )
        for batch, activation, (flops, moved, kernels) in zip(batches, activations, work, strict=True)
    ]  # fmt: skip
    count = parameter_bytes // 4
    return ModelFeatures(
        parameters=count, trainable_parameters=count, parameter_bytes=parameter_bytes, steps=steps,
        layers=LayerCounts(convolution=draw(st.integers(0, 9)), linear=draw(st.integers(0, 9))),
    )  # fmt: skip


def in_order(interval: Interval, top: float = math.inf) -> bool:
    return 0 <= interval.lower <= interval.median <= interval.upper <= top


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(any_features(), st.integers(1, 32768))
def test_every_answer_keeps_its_bounds(model: ModelFeatures, batch: int) -> None:
    prediction = predict(model, Training(batch_size=batch), PRODUCTS)
    assert prediction.reason
    assert prediction.message
    assert msgspec.convert(msgspec.to_builtins(prediction), type=Prediction) == prediction
    for product in prediction.products:
        memory, activity = product.memory, product.activity
        assert memory.median_mib <= memory.upper_mib
        assert memory.class_lower_mib < memory.upper_mib
        assert memory.median_mib <= memory.class_upper_mib
        assert cost_at(model, batch).peak_bytes / MIB <= memory.median_mib
        assert in_order(activity.gpu_util_percent, 100)
        assert in_order(activity.sm_active_ratio, 1)
        assert in_order(activity.dram_active_ratio, 1)
        assert in_order(product.step_time_seconds)
        assert product.step_time_seconds.lower > 0


@settings(deadline=None)  # wall-clock time varies on a shared machine
@given(any_features(), st.integers(1, 32768), st.integers(1, 32768))
def test_costs_never_fall_as_the_batch_grows(model: ModelFeatures, one: int, other: int) -> None:
    small, large = (cost_at(model, batch) for batch in sorted((one, other)))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(small, large, strict=True))


def test_traced_batch_sizes_are_exact() -> None:
    model = features(step(32, 3000), step(64, 5800), step(128, 11000))
    for traced in model.steps:
        assert cost_at(model, traced.batch_size).peak_bytes == traced.peak_bytes


def test_one_traced_step_scales_only_what_is_not_constant() -> None:
    cost = cost_at(features(step(32, 1000)), 64)
    assert cost.peak_bytes == 1500 * MIB
    assert cost.kernels == 500


def test_a_batch_below_the_traced_ones_needs_at_least_the_memory_of_the_update() -> None:
    """On an H100 this job's tensors took 3,175 MiB; a line through the traced batches said 2,480."""
    job = Training(batch_size=1, optimizer=Optimizer.ADAMW)
    found = store.shipped().features(CatalogModel(name="transformers/EleutherAI/pythia-160m"), job)
    assert found is not None
    assert found.steps[0].batch_size > 1
    assert cost_at(found, 1).peak_bytes / MIB == pytest.approx(3096, rel=0.001), "five times the weights, as traced"


KNOWN = CatalogModel(name="timm/vgg11_bn")
SGD = Training(batch_size=64, optimizer=Optimizer.SGD_MOMENTUM)


def known() -> ModelFeatures:
    found = store.shipped().features(KNOWN, SGD)
    assert found is not None
    return found


def test_on_the_calibrated_stack_the_shipped_model_is_applied() -> None:
    prediction = predict(known(), SGD, [A100])
    model, cost = shipped(), cost_at(known(), 64)
    corrected = correction_of(model, known(), cost, 64)
    line = model.slope * cost.reserved_bytes / MIB + model.intercept_mib
    assert prediction.outcome == "Predicted"
    assert prediction.reason == "Calibrated"
    memory = prediction.products[0].memory
    assert memory.median_mib == math.ceil(line * corrected.line_factor)
    assert memory.upper_mib == math.ceil(line * corrected.line_factor * model.factors[corrected.stratum])
    assert memory.coverage == model.coverage


def test_outside_the_training_data_only_the_line_predicts() -> None:
    strange = features(layers=LayerCounts(recurrent=40))
    prediction = predict(strange, Training(batch_size=64), [A100])
    memory = prediction.products[0].memory
    assert prediction.reason == "OutsideTraining"
    assert "unlike those that were measured" in prediction.message
    assert memory.coverage < shipped().coverage
    assert not correction_of(shipped(), strange, cost_at(strange, 64), 64).inside


@pytest.mark.parametrize(
    ("training", "gpu"),
    [
        pytest.param(Training(batch_size=64, precision=Precision.BF16_MIXED), "A100-SXM4-40GB", id="other precision"),
        pytest.param(Training(batch_size=64), "Tesla T4", id="other product"),
    ],
)
def test_on_another_stack_the_bound_is_wider_with_a_reason(training: Training, gpu: str) -> None:
    here = predict(known(), SGD, [A100]).products[0].memory
    training = msgspec.structs.replace(training, optimizer=SGD.optimizer)
    changed = msgspec.structs.replace(known(), precision=training.precision)
    prediction = predict(changed, training, [find_product(gpu)])
    memory = prediction.products[0].memory
    assert prediction.reason == "Uncalibrated"
    assert "calibrated on NVIDIA A100-SXM4-40GB in fp32 only" in prediction.message
    assert memory.upper_mib / memory.median_mib > 1.2 * here.upper_mib / here.median_mib
    assert memory.coverage < here.coverage


@pytest.mark.parametrize(
    "technique",
    [
        pytest.param({"parallelism": Parallelism(kind=ParallelKind.FSDP, gpus=8)}, id="sharded"),
        pytest.param({"compile": True}, id="compiled"),
        pytest.param({"activation_offloading": True}, id="offloaded"),
        pytest.param({"cross_entropy": CrossEntropy.CHUNKED}, id="chunked loss"),
        pytest.param({"varying_lengths": True}, id="varying lengths"),
    ],
)
def test_a_technique_that_was_never_measured_has_a_wider_bound_with_a_reason(technique: dict[str, Any]) -> None:
    here = predict(known(), SGD, [A100]).products[0].memory
    changed, training = (msgspec.structs.replace(one, **technique) for one in (known(), SGD))
    prediction = predict(changed, training, [A100], is_strict=True)
    memory = prediction.products[0].memory
    assert (prediction.reason, memory.trusted) == ("Uncalibrated", False)
    assert "was checked only against published cases" in prediction.message
    assert memory.upper_mib / memory.median_mib > 1.2 * here.upper_mib / here.median_mib
    assert memory.coverage < here.coverage


def test_a_faster_gpu_takes_less_time() -> None:
    prediction = predict(features(), Training(batch_size=64), [find_product("T4"), find_product("H100 80GB HBM3")])
    t4, h100 = (p.step_time_seconds.median for p in prediction.products)
    assert h100 < t4 / 3


def test_many_small_kernels_leave_the_gpu_idle() -> None:
    tiny = [msgspec.structs.replace(step(b, 200), flops=1e6, bytes_moved=1e6) for b in (1, 2)]
    model = features(*(msgspec.structs.replace(s, kernels=2000) for s in tiny))
    activity = predict(model, Training(batch_size=2), [A100]).products[0].activity
    assert activity.gpu_util_percent.median < 50
    assert activity.sm_active_ratio.median < 0.05


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        pytest.param(LayerCounts(linear=5, activation=4), 1024, id="MLP"),
        pytest.param(LayerCounts(convolution=50, linear=1), 8192, id="CNN"),
        pytest.param(LayerCounts(linear=48, embedding=2, normalization=25), 8192, id="transformer"),
    ],
)
def test_class_width_follows_gpumemnet(layers: LayerCounts, width: int) -> None:
    assert class_width_mib(layers) == width


def broken(**changes: object) -> ModelFeatures:
    return features(msgspec.structs.replace(step(32, 3000), **changes))


@pytest.mark.parametrize(
    ("model", "training", "reason", "word"),
    [
        pytest.param(Abstention(reason="X", message="why"), Training(), "X", "why", id="given abstention"),
        pytest.param(features(), Training(optimizer=Optimizer.SGD), "FeaturesMismatch", "optimizer", id="optimizer"),
        pytest.param(features(), Training(precision=Precision.BF16), "FeaturesMismatch", "precision", id="precision"),
        pytest.param(
            features(), Training(activation_checkpointing=True), "FeaturesMismatch", "Checkpointing", id="checkpointing"
        ),
        pytest.param(features(), Training(batch_size=513), "BatchOutOfRange", "513", id="batch far beyond"),
        pytest.param(features(), Training(batch_size=3), "BatchOutOfRange", "32", id="batch far below"),
        pytest.param(broken(flops=math.nan), Training(), "FeaturesAbsurd", "finite", id="NaN"),
        pytest.param(broken(flops=-1.0), Training(), "FeaturesAbsurd", "negative", id="negative"),
        pytest.param(broken(peak_bytes=10 * MIB, activation_bytes=0), Training(), "FeaturesAbsurd", "parameterBytes",
                     id="peak smaller than the weights"),
        pytest.param(features(steps=[]), Training(), "FeaturesAbsurd", "no traced step", id="no steps"),
        pytest.param(features(step(64, 3000), step(32, 5000)), Training(), "FeaturesAbsurd", "ascend", id="order"),
        pytest.param(features(step(1, 2.0**29), step(2, 2.0**30)), Training(batch_size=16), "FeaturesAbsurd", "needs",
                     id="extrapolates to a pebibyte"),
    ],
)  # fmt: skip
def test_abstains(model: ModelFeatures | Abstention, training: Training, reason: str, word: str) -> None:
    prediction = predict(model, training, [A100])
    assert (prediction.outcome, prediction.reason) == ("Abstained", reason)
    assert word in prediction.message
    assert prediction.products == []


@pytest.mark.parametrize("batch", [4, 512])
def test_eight_times_the_traced_batch_is_predicted(batch: int) -> None:
    assert predict(features(), Training(batch_size=batch), [A100]).outcome == "Predicted"


def test_is_quick() -> None:
    model, training = features(), Training(batch_size=64)
    predict(model, training, PRODUCTS)
    best = math.inf
    for _ in range(20):
        start = time.process_time()
        predict(model, training, PRODUCTS)
        best = min(best, time.process_time() - start)
    assert best < 1e-3 * len(PRODUCTS)
