"""What is written of experiments: tables, the document, and of which version they are."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_extender.conditions import Conditions
from carpool_extender.policies import POLICIES
from carpool_extender.simulation import document, results, workdone
from carpool_extender.simulation.contest import (
    DEFAULT,
    EXPERIMENTS,
    FIGURES,
    UNCOUNTED,
    Figures,
    Line,
    attributed,
    contest,
    named,
    ours,
    policed,
    shipped,
)
from carpool_extender.simulation.pictures import draw, lanes
from carpool_extender.simulation.provenance import Provenance, commit_of
from carpool_extender.simulation.report import POLICED, markdown
from carpool_extender.simulation.state import Finished
from carpool_extender.simulation.workload import WorkloadError
from simulated_world import ALONE, CARPOOL, job, workload


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_policies_by_name_know_what_carpool_knows_and_whole_gpus_come_first(name):
    """Regression: they learned and measured nothing, so that of HotCloud's jobs a third died under the default."""
    base = shipped(EXPERIMENTS[name])
    by_name = {one.name: one for one in named("all", base)}
    assert next(iter(by_name)) == "exclusive"
    assert by_name.keys() == POLICIES.keys()
    assert replace(by_name[base.policy], name=base.name) == base
    asked = Conditions(most_jobs=2)
    assert [(one.policy, one.conditions) for one in named("energy, best-fit,energy", base, asked)] == [
        ("energy", asked),
        ("best-fit", asked),
    ]


def test_whoever_has_a_gpu_at_the_same_time_has_another_lane():
    def ran(name, start_s, end_s, *gpus):
        return Finished(job(name), start_s, end_s, gpus, 0)

    bars = lanes([ran("c", 10.0, 20.0, "g"), ran("a", 0.0, 10.0, "g", "h"), ran("b", 5.0, 15.0, "g")])
    assert [(bar.job.job.name, bar.gpu, bar.lane) for bar in bars] == [
        ("a", "g", 0),
        ("a", "h", 0),
        ("b", "g", 1),
        ("c", "g", 0),
    ]


def test_who_ran_where_is_drawn_of_the_first_line_and_of_carpools(data, tmp_path):
    """Regression: the last line was drawn, an oracle's in most tables."""
    lines = contest(lambda _: workload(job("a")), named("exclusive,least-slowdown,energy", CARPOOL), 1, data, print)
    drawn = draw(tmp_path, "x", lines)
    assert [path.name for path in drawn] == [
        "x-utilization.png",
        "x-cdf.png",
        "x-gantt-exclusive.png",
        "x-gantt-least-slowdown.png",
    ]
    assert [path.name for path in draw(tmp_path, "x", lines[::2])][2:] == [
        "x-gantt-exclusive.png",
        "x-gantt-energy.png",
    ]


def test_the_document_is_written_from_results_alone(tmp_path):
    def line(strategy, **figures):
        every = dict.fromkeys(FIGURES, 0.0) | figures
        return Line(strategy, [Figures(**every)])

    base = {"makespan_min": 100.0, "utilization_percent": 40.0, "completion_min": 50.0, "oom": 0.0, "energy_mj": 10.0}
    experiment = EXPERIMENTS["hotcloud"]
    carpool, *_, oracle, _ = ours(experiment.mode)
    lines = [
        line(experiment.published[0], **base),
        line(carpool, **(base | {"makespan_min": 60.0, "utilization_percent": 60.0, "oom": 2.0})),
        line(oracle, **(base | {"makespan_min": 50.0})),
    ]
    then = Provenance(when="2026-01-31 12:00", version="1.0, commit abc")
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, then)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "| HotCloud, makespan | -33.6% | -40.0% | -40.0% | yes |" in text
    assert "| HotCloud, mean utilization | +61.5% | +75.0% | +50.0% | **no** |" in text
    assert "| HotCloud, out of memory | 0 | 0 | 2.0 | **no** |" in text
    assert "| hotcloud | +20.0% |" in text
    told = [
        line(one, **(base | {"makespan_min": 60.0 - 6 * number}))
        for number, one in enumerate(attributed(experiment.mode))
    ]
    assert "Results of 2026-01-31 12:00, 1.0, commit abc." in text
    assert "not all of one version" not in text
    older = ["with true memory"]
    results.write(tmp_path, "hotcloud" + results.ATTRIBUTED, workload(job("a")), told, Provenance(), older)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "single pieces: true durations, the longest first -30.0%, true slowdowns -20.0%, true activity" in text
    assert "hotcloud, out of memory (2.0): slot-based (0.0)." in text
    assert "not all of one version" in text
    assert "| hotcloud-attribution | time not noted | version not noted |" in text
    assert "hotcloud, utilization" not in text
    assert text.count("Of an older version, and to be read with care: with true memory.") == 1
    (tmp_path / "hotcloud.json").write_text("{}")
    with pytest.raises(WorkloadError, match="expected results of this version"):
        document.write(tmp_path, tmp_path / "experiments.md")
    with pytest.raises(WorkloadError, match="found none; run"):
        document.write(tmp_path / "nowhere", tmp_path / "experiments.md")


def test_the_document_shows_every_policy_beside_the_first_line(tmp_path):
    experiment = EXPERIMENTS["hotcloud"]

    def line(strategy, minutes):
        return Line(strategy, [Figures(**(dict.fromkeys(FIGURES, 1.0) | {"makespan_min": minutes}))])

    results.write(tmp_path, "hotcloud", workload(job("a")), [line(experiment.published[0], 200.0)], Provenance())
    lines = [line(one, 100.0 + number) for number, one in enumerate(policed(experiment))]
    results.write(tmp_path, "hotcloud" + results.POLICED, workload(job("a")), lines, Provenance())
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    _, table = text.split(POLICED)
    named_there = [row.split(" | ")[0].removeprefix("| ") for row in table.split("\n\n")[1].splitlines()]
    assert named_there[2:4] == ["slot-based", "exclusive"]
    assert set(named_there[3:]) == POLICIES.keys()
    assert "| exclusive | 100.0 | -50.0% |" in table


def test_utilization_is_told_by_the_work_that_is_done_too():
    """Alone the GPU was busy for 40 of 100 minutes; the same work took 50, of which kernels overlapped for some."""

    def line(name, minutes, busy):
        figures = dict.fromkeys(FIGURES, 1.0) | {"makespan_min": minutes, "utilization_percent": busy}
        return Line(replace(ALONE, name=name), [Figures(**figures)])

    told, _ = workdone.of_hotcloud([line("slot-based", 100.0, 40.0), line(DEFAULT, 50.0, 70.0)])
    assert told.endswith("would be 80.0% (+100.0%) instead of 70.0%.")
    assert workdone.of_hotcloud([line("slot-based", 100.0, 40.0)]) == []


def test_the_document_compares_seed_by_seed(tmp_path):
    default, *others = ours(EXPERIMENTS["hotcloud"].mode)
    uncounted = next(one for one in others if one.name == UNCOUNTED)

    def line(strategy, *makespans):
        return Line(strategy, [Figures(**(dict.fromkeys(FIGURES, 1.0) | {"makespan_min": m})) for m in makespans])

    lines = [line(default, 90.0, 170.0), line(uncounted, 100.0, 200.0)]
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, Provenance())
    document.write(tmp_path, tmp_path / "experiments.md")
    compared = "| hotcloud | -20.00 ± 10.00 | +0.00 ± 0.00 | +0.00 ± 0.00 |"
    assert compared in (tmp_path / "experiments.md").read_text()
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, Provenance(), older=[UNCOUNTED])
    document.write(tmp_path, tmp_path / "experiments.md")
    assert compared not in (tmp_path / "experiments.md").read_text()  # it is of another version


def test_tables_tell_mean_spread_and_change(data, tmp_path):
    told = []
    lines = contest(lambda seed: workload(job("a"), job("b")), [ALONE, CARPOOL], 2, data, told.append)
    table = markdown(lines)
    assert table[2].startswith("| alone | 3.3 ± 0.0 |")
    assert table[3].startswith("| carpool | 3.3 ± 0.0 | +0.0% |")
    assert len(told) == 2
    results.write_csv(tmp_path / "x.csv", lines)
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5


def test_a_commit_is_told_of_a_checkout_and_of_nothing_else(tmp_path):
    assert commit_of(tmp_path / "x.py") == ""
    assert commit_of(Path("/nowhere/x.py")) == ""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git here")
    for arguments in (["init", "-q"], ["add", "."]):
        (tmp_path / "x.py").write_text("")
        subprocess.run([git, *arguments], cwd=tmp_path, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([git, *who, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path / "x.py")
    assert len(commit) >= 7
    assert commit_of(tmp_path / "y.py") == "", "a file that it does not hold"
    (tmp_path / "x.py").write_text("1")
    assert commit_of(tmp_path / "x.py") == f"{commit}-dirty"
