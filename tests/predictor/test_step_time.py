"""Step time on GPUs held out, on invented measurements."""

import csv
from pathlib import Path

import numpy as np
import pytest
from carpool_predictor.evaluation.suites import DataError
from carpool_predictor.neusight import GPUS, MODELS, ModelRow, Product, operators, read_models
from carpool_predictor.step_time_fit import ROOFLINE, Utilization, by_roofline, by_utilization, fit, gpus_held_out
from carpool_predictor.step_time_suite import run

COLUMNS = ["gpu", "model", "mode", "seqlen", "batch", "variant", "e2e_ms"]
TRUE = Utilization(products=0.8, bandwidth=0.6, waves=0.3, kernel_s=8e-6)


def write(data: Path, rows: list[list[object]], columns: list[str] = COLUMNS) -> Path:
    folder = data / "neusight"
    folder.mkdir(exist_ok=True)
    with (folder / "e2e_labels_flat.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return data


def invented(data: Path) -> Path:
    rows: list[list[object]] = []
    for gpu in ("Tesla_P4", "Tesla_V100-PCIE-32GB", "NVIDIA_A100-PCIE-40GB", "NVIDIA_H100_80GB_HBM3"):
        for model, batch in (("bert_large", 2), ("gpt2_large", 1)):
            for mode in ("inf", "train"):
                products, passes = operators(MODELS[model], batch, 256, training=mode == "train")
                step = ModelRow(gpu, model, mode == "train", batch, 1.0, products, passes)
                rows.append([gpu, model, mode, 256, batch, "", 1e3 * TRUE.step_time_s(step, GPUS[gpu])])
    return write(data, rows)


def test_what_made_the_times_is_found_again(tmp_path: Path) -> None:
    rows, left_out = read_models(invented(tmp_path))
    found = fit(rows)
    assert left_out == 0
    assert (found.products, found.bandwidth) == pytest.approx((TRUE.products, TRUE.bandwidth), rel=0.02)
    assert found.kernel_s == pytest.approx(TRUE.kernel_s, rel=0.05)


def test_a_gpu_is_predicted_from_the_others(tmp_path: Path) -> None:
    rows, _ = read_models(invented(tmp_path))
    measured = np.array([row.time_s for row in rows])
    assert gpus_held_out(rows, by_utilization) == pytest.approx(measured, rel=0.03)
    assert np.all(by_roofline([], rows) < measured)


def test_a_backward_pass_takes_twice_the_flops_of_its_forward() -> None:
    forward, _ = operators(MODELS["gpt2_large"], 2, 128, training=False)
    both, _ = operators(MODELS["gpt2_large"], 2, 128, training=True)
    assert sum(p.times * p.flops for p in both) == 3 * sum(p.times * p.flops for p in forward)


def test_flops_of_bert_agree_with_the_common_estimate() -> None:
    shape, tokens = MODELS["bert_large"], 8 * 512
    products, _ = operators(shape, 8, 512, training=False)
    weights = shape.layers * (4 * shape.width**2 + 2 * shape.width * shape.hidden)
    attention = shape.layers * 4 * 8 * 512**2 * shape.width
    assert sum(p.times * p.flops for p in products) == 2 * weights * tokens + attention


def test_the_roofline_takes_the_longer_of_computing_and_moving() -> None:
    gpu = GPUS["Tesla_V100-PCIE-32GB"]
    wide, thin = Product(1, 1, 4096, 4096, 4096), Product(1, 1, 4096, 1, 4096)
    for product, expected in ((wide, wide.flops / 14.1e12), (thin, thin.bytes / 900e9)):
        step = ModelRow("Tesla_V100-PCIE-32GB", "x", False, 1, 1.0, (product,), ())
        assert ROOFLINE.step_time_s(step, gpu) == pytest.approx(expected)


def test_what_cannot_be_judged_is_left_out_and_counted(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        ["AMD_Instinct_MI100", "bert_large", "inf", 512, 8, "", 5.0],
        ["NVIDIA_L4", "switch4", "inf", 512, 8, "", 5.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "fusion", 5.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "", 0.0],
        ["NVIDIA_L4", "bert_large", "inf", 512, 8, "", 5.0],
    ]
    kept, left_out = read_models(write(tmp_path, rows))
    assert (len(kept), left_out) == (1, 4)


def test_faults_of_the_data_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no such file"):
        read_models(tmp_path)
    with pytest.raises(DataError, match="lacks the columns e2e_ms"):
        read_models(write(tmp_path, [], COLUMNS[:-1]))
    with pytest.raises(DataError, match=r"\.csv:2: cannot read"):
        read_models(write(tmp_path, [["NVIDIA_L4", "bert_large", "inf", "long", 8, "", 5.0]]))


def test_the_suite_writes_the_same_card_twice(tmp_path: Path) -> None:
    data = invented(tmp_path)
    reports = [run(data, tmp_path / name) for name in ("one", "two")]
    one, two = ([path.read_bytes() for path in report.files] for report in reports)
    assert one == two
    assert all(figure.met for figure in reports[0].figures if figure.met is not None)
