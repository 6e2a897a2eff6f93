"""Predictions with what jobs taught of a stack."""

import json
from pathlib import Path

import numpy as np
import pytest
from calibration_world import T4, job, learn
from carpool_core.products import find_product
from carpool_core.resources.features import LayerCounts, ModelFeatures, TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import MIB, Precision
from carpool_predictor.calibration.document import MIN_JOBS, model_for, write_calibration
from carpool_predictor.cli import predict as command
from carpool_predictor.cli import write_features
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, predict, prepare, run_prediction_of
from click.testing import CliRunner


def neural(batch: int) -> PredictionContext:
    steps = [
        TracedStep(batch_size=b, peak_bytes=MIB * (400 + 50 * b), activation_bytes=MIB * 50 * b, flops=2e10 * b,
                   bytes_moved=1e9 * b, kernels=500)
        for b in (32, 64)
    ]  # fmt: skip
    features = ModelFeatures(
        parameters=10**7, trainable_parameters=10**7, parameter_bytes=4 * 10**7,
        layers=LayerCounts(convolution=53, linear=1), steps=steps,
    )  # fmt: skip
    found = prepare(features, Training(batch_size=batch))
    assert isinstance(found, PredictionContext)
    return found


def test_predictions_follow_the_stack_and_grow_surer() -> None:
    rng = np.random.default_rng(5)
    asked = neural(64)
    before = asked.memory_on(T4)
    widths = []
    for jobs in (MIN_JOBS, 20, 60):
        model = model_for(learn(job(i, rng) for i in range(jobs)), T4, Precision.FP32, shipped())
        again = prepare(asked.features, asked.training, model)
        assert isinstance(again, PredictionContext)
        memory = again.memory_on(T4)
        widths.append(memory.upper_mib / memory.median_mib)
    assert memory.median_mib > before.median_mib
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < before.upper_mib / before.median_mib


def test_an_unknown_stack_and_one_seen_too_rarely_keep_the_shipped_model() -> None:
    rng = np.random.default_rng(6)
    few = learn(job(i, rng) for i in range(MIN_JOBS - 1))
    assert model_for(few, T4, Precision.FP32, shipped()) is shipped()
    assert model_for(few, T4, Precision.BF16_MIXED, shipped()) is shipped()


def test_what_must_be_remembered_of_a_prediction() -> None:
    asked = neural(64)
    found = run_prediction_of(asked, "mine", 4000, T4)
    assert found.live_mib == pytest.approx(400 + 50 * 64)
    assert found.upper_mib == 4000


def test_a_calibration_is_used_by_predict() -> None:
    rng = np.random.default_rng(8)
    asked = neural(64)
    learned = learn(job(i, rng) for i in range(20))
    plain = predict(asked.features, asked.training, [T4])
    found = predict(asked.features, asked.training, [T4, find_product("A30")], learned)
    assert [plain.reason, found.reason] == ["Uncalibrated", "Uncalibrated"]
    assert predict(asked.features, asked.training, [T4], learned).reason != "Uncalibrated"
    assert found.products[0].memory.median_mib > plain.products[0].memory.median_mib
    assert found.products[0].activity == plain.products[0].activity


def test_the_command_reads_a_calibration(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    block, document = tmp_path / "features.yaml", tmp_path / "calibration.json"
    block.write_text(write_features(neural(64).features))
    document.write_bytes(write_calibration(learn(job(i, rng) for i in range(20))))
    arguments = [str(block), "--batch-size", "64", "--gpu", "T4", "--json"]
    plain, found = (
        json.loads(CliRunner().invoke(command, [*arguments, *more]).stdout)["products"][0]
        for more in ([], ["--calibration", str(document)])
    )
    assert found["memory"]["median_mib"] > plain["memory"]["median_mib"]
    document.write_text("{")
    result = CliRunner().invoke(command, [*arguments, "--calibration", str(document)])
    assert result.exit_code == 2
    assert "expected a calibration" in result.stderr
