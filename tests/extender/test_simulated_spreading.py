"""Jobs that come one after the other, of an experiment that does not say how nearly all are there at the start."""

from dataclasses import replace

import pytest
from carpool_extender.simulation import document, results, spreading
from carpool_extender.simulation.contest import DEFAULT, EXPERIMENTS, LONGEST_FIRST, ours, shipped
from carpool_extender.simulation.provenance import Provenance
from results_world import THEN, line_of, minutes
from simulated_world import job, workload

HOTCLOUD = EXPERIMENTS["hotcloud"]


def test_only_what_is_all_there_at_the_start_is_spread():
    assert [name for name, one in EXPERIMENTS.items() if one.is_at_once] == ["hotcloud"]


def test_the_same_jobs_come_evenly_the_first_at_the_start(published):
    before, after = HOTCLOUD.draw(published, 1), spreading.spread(HOTCLOUD, 600.0).draw(published, 1)
    arrivals = [one.arrival_s for one in after.jobs]
    assert arrivals == pytest.approx([600.0 * i / 99 for i in range(100)])
    assert [replace(one, arrival_s=0.0) for one in after.jobs] == list(before.jobs)
    assert after.nodes == before.nodes


def test_strategies_differ_from_the_experiments_own_in_their_names_alone():
    own = {one.name: one for one in (HOTCLOUD.published[0], *ours(HOTCLOUD.mode))}
    tried = spreading.strategies(HOTCLOUD)
    names = ["slot-based", DEFAULT, LONGEST_FIRST]
    assert [one.name for one in tried] == [f"{name}, over {s}" for s in ("60 s", "10 min", "60 min") for name in names]
    assert all(
        replace(one, name=own.name) == own for one, own in zip(tried, [own[name] for name in names] * 3, strict=True)
    )


def written(folder, spread, made=THEN):
    first, default = HOTCLOUD.published[0], shipped(HOTCLOUD)
    lines = [
        line_of(first, *minutes(200.0, 400.0)),
        line_of(default, *minutes(100.0, 200.0), slowed_percent=2.0),
        line_of(replace(default, name=LONGEST_FIRST), *minutes(60.0, 120.0)),
    ]
    results.write(folder, "hotcloud", workload(job("a")), lines, THEN)
    if spread:
        results.write(folder, "hotcloud" + results.SPREAD, workload(job("a")), spread, made)
    document.write(folder, folder / "experiments.md")
    return (folder / "experiments.md").read_text()


def test_the_document_compares_with_whole_gpus_to_which_jobs_come_alike(tmp_path):
    slots, default, *_ = spreading.strategies(HOTCLOUD)
    spread = [line_of(slots, *minutes(210.0, 420.0)), line_of(default, *minutes(168.0, 336.0), oom=1.0)]
    _, section = written(tmp_path, spread).split(f"## {spreading.TITLE}\n")
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in section.split("\n\n")[2].splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [
        (DEFAULT, "-50.0%"),
        (LONGEST_FIRST, "-70.0%"),
        (f"{DEFAULT}, over 60 s", "-20.0%"),
    ]
    assert [rows[0][4], rows[2][5]] == ["2.0", "1.0"]


def test_results_of_another_version_are_not_compared(tmp_path):
    assert spreading.TITLE not in written(tmp_path, [])
    other = Provenance(when=THEN.when, version="1.1, commit abd")
    told = written(tmp_path, [line_of(spreading.strategies(HOTCLOUD)[0], *minutes(1.0, 2.0))], other)
    assert told.count(f"**hotcloud**: {spreading.UNLIKE}.") == 1
