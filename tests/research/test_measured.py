"""The shipped models on this project's own measurements, as the tables of docs/measurements.md show them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_predictor.models.slowdown import slowdowns
from carpool_predictor.profiler.session import COLUMNS
from carpool_research import measured
from carpool_research.measured import FILES, read, repeats, texts, together, workload
from carpool_research.slowdown import candidates
from click.testing import CliRunner

H100, H200 = FILES
PAGE = Path(__file__).parents[2] / "docs" / "measurements.md"


@pytest.mark.parametrize(("file", "rows", "alone"), [(H100, 222, 72), (H200, 248, 134)])
def test_every_job_of_a_file_was_measured_alone_in_both_modes(file: Path, rows: int, alone: int) -> None:
    found = read([file])
    jobs = {key: len(of) for key, of in repeats(found).items() if not key[2]}
    assert (len(found), sum(jobs.values())) == (rows, alone)
    assert len(jobs) == 2 * len({job for _, job, _ in jobs}) == 72


def test_the_page_shows_the_tables_of_the_shipped_models() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [title for title, table in texts(read()).items() if f"## {title}\n\n{table}\n" not in page] == []


def test_the_bound_covers_every_measured_peak() -> None:
    found = [line.split("|") for line in texts(read())["Memory of jobs alone"].splitlines()]
    assert [cells[5] for cells in found if cells[2] == "process"] == ["72/72", "134/134"]


def test_a_product_alone_has_no_ratios() -> None:
    assert "The same runs on both GPUs" not in texts(read([H200]))


@pytest.mark.parametrize("mode", ["time-slicing", "mps"])
def test_slowdowns_follow_from_the_activity_alone_in_the_same_mode(mode: str) -> None:
    """The own job comes first, and its partners in the order of the row."""
    rows = read([H100])
    alone = {workload(row).key: row for row in rows if not row.partners and row.mode == mode}
    row = next(row for row in rows if row.mode == mode and row.partners.count("+") == 1)
    jobs = [alone[key] for key in (workload(row).key, *row.partners.split("+"))]
    util = np.array([[(one.gpu_util_percent or 0) / 100 for one in jobs]])
    sm, dram = (np.array([[getattr(one, name) for one in jobs]]) for name in ("sm_active_ratio", "dram_active_ratio"))
    kind = SharingMode.MPS if mode == "mps" else SharingMode.TIME_SLICING
    found = together(rows)[f"{row.product}, {mode}, 3 jobs"]
    assert 1 / found.speed[0] == pytest.approx(row.slowdown)
    assert candidates.shipped_median(found)[0] == pytest.approx(slowdowns(kind, util, sm, dram)[0, 0])
    assert (candidates.shipped_upper(found) > candidates.shipped_median(found)).all()


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("run,mode\n")
    result = CliRunner().invoke(measured.measured, [str(path)])
    assert result.exit_code == 2
    assert "lacks the columns" in result.stderr


def test_rows_that_failed_are_left_out(tmp_path: Path) -> None:
    lines = H100.read_text().splitlines()
    path = tmp_path / "rows.csv"
    cells = dict(zip(COLUMNS, lines[1].split(","), strict=True)) | {"status": "failed", "step_time_s": ""}
    path.write_text("\n".join([*lines, ",".join(cells.values())]) + "\n")
    assert len(read([path])) == 222


def test_an_upper_end_is_judged_with_the_factor_of_the_other_gpus() -> None:
    """One GPU's slowdowns are 1.2 times the median, the other's 1.5 times."""
    busy = np.full((10, 2), 0.3)
    nothing = candidates.Speeds(busy, busy, busy, np.zeros(10, np.bool_), np.ones(10), [("a", "b")] * 10)
    median = candidates.shipped_median(nothing)
    calm, wild = (dataclasses.replace(nothing, speed=1 / (factor * median)) for factor in (1.2, 1.5))
    found = measured.upper_row("exp(f) · median", {"calm": [calm], "wild": [wild]})
    assert (found["f"], found["calm"], found["wild"]) == (f"{np.log(1.5):.3f}", "100%", "0%")
    assert (found["calm admits"], found["wild admits"]) == ("0%", "0%")  # 1.5 times 1.05
