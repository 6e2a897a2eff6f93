"""Predictions with what jobs taught of a stack."""

import json
from pathlib import Path

import numpy as np
import pytest
from calibration_world import T4, job, learn
from carpool_core.products import find_product
from carpool_core.values import Precision
from carpool_predictor.calibration.document import MIN_JOBS, model_for, write_calibration
from carpool_predictor.cli import predict as command
from carpool_predictor.cli import write_features
from carpool_predictor.models.memory import shipped
from carpool_predictor.predict import PredictionContext, predict, prepare, run_prediction_of
from click.testing import CliRunner
from job_runs import asked, features


def test_predictions_follow_the_stack_and_bounds_narrow() -> None:
    rng = np.random.default_rng(5)
    context = asked()
    before = context.memory_on(T4)
    widths = []
    for jobs in (MIN_JOBS, 20, 60):
        model = model_for(learn(job(i, rng) for i in range(jobs)), T4, Precision.FP32, shipped())
        again = prepare(context.features, context.training, model)
        assert isinstance(again, PredictionContext)
        memory = again.memory_on(T4)
        widths.append(memory.upper_mib / memory.median_mib)
    assert memory.median_mib > before.median_mib
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < before.upper_mib / before.median_mib


def test_a_stack_with_too_few_jobs_keeps_the_shipped_model() -> None:
    rng = np.random.default_rng(6)
    few = learn(job(i, rng) for i in range(MIN_JOBS - 1))
    assert model_for(few, T4, Precision.FP32, shipped()) is shipped()
    assert model_for(few, T4, Precision.BF16_MIXED, shipped()) is shipped()


def test_a_run_prediction_holds_memory_and_bound() -> None:
    context = asked()
    found = run_prediction_of(context, "mine", 4000, T4)
    assert found.live_mib == pytest.approx(400 + 50 * 64)
    assert found.upper_mib == 4000


def test_a_calibration_is_used_by_predict() -> None:
    rng = np.random.default_rng(8)
    context = asked()
    learned = learn(job(i, rng) for i in range(20))
    plain = predict(context.features, context.training, [T4])
    found = predict(context.features, context.training, [T4, find_product("A30")], learned)
    assert [plain.reason, found.reason] == ["Uncalibrated", "Uncalibrated"]
    assert predict(context.features, context.training, [T4], learned).reason != "Uncalibrated"
    assert found.products[0].memory.median_mib > plain.products[0].memory.median_mib
    assert found.products[0].activity == plain.products[0].activity


def test_the_command_reads_a_calibration(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    block, document = tmp_path / "features.yaml", tmp_path / "calibration.json"
    block.write_text(write_features(features()))
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
