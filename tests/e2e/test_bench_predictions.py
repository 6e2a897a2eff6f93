"""The benchmark of predictions: its rows and its section of the report, without measuring."""

import json
from pathlib import Path

from carpool_e2e.bench.predictions import Figure, replaced, section, write_rows
from carpool_e2e.bench.run import dated, report
from carpool_predictor.catalog import store
from carpool_predictor.rows import read_row
from carpool_simulator.progress import Provenance


def test_rows_go_through_every_stored_model_and_make_sense(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    names = store.shipped().names()
    write_rows(path, 2 * len(names))
    rows = [read_row(line) for line in path.read_bytes().splitlines()]
    assert {json.loads(line)["catalog"]["name"] for line in path.read_text().splitlines()} == set(names)
    assert len({(row.gpu, row.training.batch_size, row.training.optimizer) for row in rows}) > 50


SECTION = section([Figure("rows a second", 9876.5, "rows/s", "≥ 2,000", True), Figure("start", 0.4, "s", "", None)])


def test_figures_stand_beside_what_was_asked_for() -> None:
    assert "| rows a second | 9,876 rows/s | ≥ 2,000 | kept |" in SECTION
    assert "| start | 0.4 s |  |  |" in SECTION


def test_a_section_is_renewed_where_it_stands_and_others_are_left_alone() -> None:
    before = "# Benchmarks\n\ntold\n\n## One\n\na\n\n## Predictions\n\nstale\n\n## Two\n\nb\n"
    after = replaced(before, SECTION)
    assert "stale" not in after
    assert after.index("## One") < after.index("## Predictions") < after.index("rows a second") < after.index("## Two")
    assert after.startswith("# Benchmarks\n\ntold\n\n## One\n\na\n\n## Predictions")
    assert replaced(after, SECTION) == after


def test_a_section_that_is_missing_comes_last() -> None:
    after = replaced("# Benchmarks\n\n## One\n\na\n", SECTION)
    assert after.startswith("# Benchmarks\n\n## One\n\na\n\n## Predictions\n")
    assert after.endswith("|  |  |\n")


def test_each_section_says_below_its_heading_when_it_was_measured_and_of_which_version() -> None:
    made = Provenance(when="2026-01-31 12:00", version="1.0, commit abc")
    told = dated(SECTION, made)
    assert told[:4] == ["## Predictions", "", "Measured on 2026-01-31 12:00 UTC, version 1.0, commit abc.", ""]
    assert told[3:] == SECTION[1:]
    assert "`make bench` began this on 2026-01-31 12:00 UTC, version 1.0, commit abc, on " in report([], [], 1, made)
