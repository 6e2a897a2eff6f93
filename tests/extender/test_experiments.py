"""What is written of experiments: tables, the document, and of which version they are."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_extender.conditions import Conditions
from carpool_extender.policies import POLICIES
from carpool_extender.simulation import document, goals, hotcloud, idleness, losses, report, results, workdone
from carpool_extender.simulation.contest import (
    DEFAULT,
    EXPERIMENTS,
    FIGURES,
    ORACLE,
    Figures,
    Line,
    attributed,
    contest,
    named,
    ours,
    policed,
    shipped,
    wrong,
)
from carpool_extender.simulation.paired import Difference, by_chance, change, difference, percent
from carpool_extender.simulation.pictures import draw, lanes
from carpool_extender.simulation.provenance import Provenance, commit_of
from carpool_extender.simulation.report import POLICED, markdown
from carpool_extender.simulation.state import Finished
from carpool_extender.simulation.workload import WorkloadError
from scipy.stats import t as student
from simulated_world import ALONE, CARPOOL, job, workload

THEN = Provenance(when="2026-01-31 12:00", version="1.0, commit abc")


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
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, THEN)
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
    results.write(tmp_path, "hotcloud" + results.ATTRIBUTED, workload(job("a")), told, THEN)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "All results are of one version." in text
    assert "same seed: true durations, the longest first -30.0%, true slowdowns -20.0%, true activity" in text
    results.write(tmp_path, "hotcloud" + results.ATTRIBUTED, workload(job("a")), told, Provenance())
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert "against Carpool's own" not in text, "of unlike versions nothing is told seed by seed"
    assert "not all of one version" in text
    assert "| hotcloud-attribution | time not noted | version not noted |" in text
    dirty = Provenance(when=THEN.when, version=f"{THEN.version}-dirty")
    for one in ("hotcloud", "hotcloud" + results.ATTRIBUTED):
        results.write(tmp_path, one, workload(job("a")), told if one.endswith("attribution") else lines, dirty)
    document.write(tmp_path, tmp_path / "experiments.md")
    assert "not all of one version" in (tmp_path / "experiments.md").read_text(), "who knows what was not committed"
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


def line_of(strategy, *runs, **every):
    """One run for each mapping of figures; what none names is 1."""
    return Line(strategy, [Figures(**(dict.fromkeys(FIGURES, 1.0) | every | run)) for run in runs or [{}]])


def minutes(*values):
    return [{"makespan_min": value} for value in values]


def test_differences_are_told_seed_by_seed_with_their_standard_error():
    line, other = (line_of(ALONE, *minutes(*values)) for values in ((90.0, 170.0, 100.0), (100.0, 200.0, 140.0)))
    found = difference(line, other, "makespan_min")
    assert (found.mean, found.error) == (pytest.approx(-80 / 3), pytest.approx(15.275 / 3**0.5, rel=1e-3))
    assert (str(found), found.is_beyond) == ("-26.7 ± 8.8", True)
    assert (str(difference(line, other, "oom")), difference(line, other, "oom").is_beyond) == ("=", False)
    assert difference(line_of(ALONE), line_of(ALONE, oom=9.0), "oom") == Difference(-8.0, None)
    assert [Difference(2.0, error).is_beyond for error in (0.99, 1.0, 0.0, None)] == [True, False, True, False]
    told = [str(Difference(0.25, error)) for error in (0.0312, 24.0, 0.0, None)]
    assert told == ["+0.250 ± 0.031", "+0 ± 24", "+0.25", "+0.25"]
    assert [str(Difference(-0.25, 24.0)), str(Difference(-0.0042, 0.0))] == ["+0 ± 24", "-0.0042"]


def test_what_differs_only_because_files_have_six_digits_is_no_difference():
    """Regression: where all seeds agreed but for their last digit, "+1.6666667 ± 0.0000033" was told."""
    other = line_of(ALONE, *minutes(100.0, 200.0, 300.0))
    found = difference(line_of(ALONE, *minutes(101.667, 201.667, 301.666)), other, "makespan_min")
    assert (str(found), found.is_beyond) == ("+1.67", True)
    assert str(difference(line_of(ALONE, *minutes(100.001, 200.001, 300.0)), other, "makespan_min")) == "="
    assert str(difference(line_of(ALONE, *minutes(100.01, 200.03, 300.0)), other, "makespan_min")) == "+0.0133 ± 0.0088"


def test_changes_of_means_have_the_standard_error_of_a_ratio():
    """Both means and what seeds have in common count: residuals of 0.8 times the other's are -2, 0 and 2 min."""
    line, other = line_of(ALONE, *minutes(78.0, 160.0, 242.0)), line_of(ALONE, *minutes(100.0, 200.0, 300.0))
    found = change(line, other, "makespan_min")
    assert (found.mean, found.error) == (pytest.approx(-20.0), pytest.approx(100 * 2 / 3**0.5 / 200))
    assert percent(found) == "-20.00 ± 0.58%"
    assert change(line_of(ALONE, *minutes(80.0, 160.0, 240.0)), other, "makespan_min").error == 0.0
    assert change(line_of(ALONE, makespan_min=80.0), line_of(ALONE, makespan_min=100.0), "makespan_min").error is None
    assert percent(Difference(-20.0, None)) == "-20.0%"
    assert percent(Difference(-0.01, 0.0)) == "+0.0%"


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 10, 11, 50])
def test_how_often_nothing_is_marked_is_known(seeds):
    assert by_chance(seeds) == pytest.approx(2 * student.sf(2, seeds - 1))


def test_every_line_of_carpool_and_every_policy_is_compared_with_the_default_and_what_is_no_noise_is_bold(tmp_path):
    experiment = EXPERIMENTS["hotcloud"]
    default, *others = ours(experiment.mode)
    lines = [line_of(one, *minutes(100.0, 120.0, 140.0)) for one in (*experiment.published, default)]
    lines += [line_of(one, *minutes(90.0, 111.0, 129.0), oom=29.0) for one in others[:1]]
    lines += [line_of(one, *minutes(130.0, 90.0, 170.0)) for one in others[1:]]
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, THEN)
    policies = [line_of(one, *minutes(100.0, 120.0, 140.0)) for one in policed(experiment)]
    results.write(tmp_path, "hotcloud" + results.POLICED, workload(job("a")), policies, THEN)
    document.write(tmp_path, tmp_path / "experiments.md")
    told, table = (
        (tmp_path / "experiments.md").read_text().split("on the same seed: mean difference")[1].split("\n\n")[:2]
    )
    assert told.endswith(
        "over 3 seeds; `=` is the same on each. Bold is beyond 2 standard errors; where nothing differs, one in 5 "
        "would be, too, of separate lines and figures: those that hang together are bold together."
    )
    assert "out of memory" in table.splitlines()[0], "what somebody gains stands beside who dies of it"
    rows = dict(row.removeprefix("| ").split(" | ", 1) for row in table.splitlines()[2:])
    named_there = {one.name for one in (*experiment.published, *others)}
    assert rows.keys() == named_there | POLICIES.keys() - {default.policy}
    assert rows["Carpool, slowdown ≤ 2"] == "**-10.00 ± 0.58** | = | = | = | = | **+28.00** | = |"
    assert rows["Carpool, nothing learned"] == "+10 ± 20 | = | = | = | = | = | = |"
    assert rows["exclusive"] == "= | = | = | = | = | = | = |"


def test_a_policy_that_is_called_as_a_published_line_is_told_apart(tmp_path):
    """Regression: RAD-RM's published "exclusive" and "round-robin" were overwritten by the policies of these names."""
    experiment = EXPERIMENTS["radrm-60"]
    by_name = {one.name: one for one in policed(experiment)}
    published = {one.name: one for one in experiment.published}
    lines = [
        line_of(published["exclusive"], *minutes(200.0, 220.0)),
        line_of(published["round-robin"], *minutes(90.0, 91.0)),
        line_of(shipped(experiment), *minutes(100.0, 101.0)),
    ]
    policies = [
        line_of(by_name["exclusive"], *minutes(201.0, 221.0)),
        line_of(by_name["round-robin"], *minutes(80.0, 81.0)),
        line_of(by_name["best-fit"], *minutes(95.0, 96.0)),
    ]
    results.write(tmp_path, "radrm-60", workload(job("a")), lines, THEN)
    results.write(tmp_path, "radrm-60" + results.POLICED, workload(job("a")), policies, THEN)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    lost, compared = (text.split(one)[1].split("\n\n")[1] for one in ("**radrm-60**", "same seed: mean difference"))
    assert lost.splitlines()[3:] == [
        "| round-robin | -10.00 |",
        "| policy round-robin | -20.00 |",
        "| best-fit | -5.00 |",
    ]
    rows = [row.split(" | ")[0].removeprefix("| ") for row in compared.splitlines()[2:]]
    assert rows == ["exclusive", "round-robin", "policy exclusive", "policy round-robin", "best-fit"]
    assert "| policy exclusive | 211.0 ± 14.1 |" in text


def test_policies_of_an_unlike_version_are_compared_with_nothing_seed_by_seed(tmp_path):
    experiment = EXPERIMENTS["hotcloud"]
    lines = [line_of(one, *minutes(100.0, 101.0)) for one in (experiment.published[0], shipped(experiment))]
    policies = [line_of(one, *minutes(50.0, 51.0)) for one in policed(experiment)]
    dirty = Provenance(when=THEN.when, version=f"{THEN.version}-dirty")
    later = Provenance(when="2026-02-01 12:00", version=dirty.version)
    for ours_made, theirs, are_alike in (
        (THEN, THEN, True),
        (THEN, Provenance(when="2026-02-01 12:00", version=THEN.version), True),
        (dirty, dirty, True),  # one run of the command wrote both
        (dirty, later, False),
        (THEN, Provenance(when=THEN.when, version="1.0, commit abd"), False),
        (Provenance(), Provenance(), False),
    ):
        results.write(tmp_path, "hotcloud", workload(job("a")), lines, ours_made)
        results.write(tmp_path, "hotcloud" + results.POLICED, workload(job("a")), policies, theirs)
        document.write(tmp_path, tmp_path / "experiments.md")
        text = (tmp_path / "experiments.md").read_text()
        assert ("| **-50.00** |" in text) is are_alike
        assert ("**hotcloud**, 2 seeds: nobody." in text) is not are_alike
        assert ("not compared seed by seed, neither here nor above" in text) is not are_alike
        assert "| best-fit | 50.5 ± 0.7 |" in text


def test_traces_of_several_seeds_are_compared_seed_by_seed_on_what_their_table_shows(tmp_path):
    experiment = EXPERIMENTS["alibaba"]
    first, default = experiment.published[0], shipped(experiment)
    lines = [line_of(first, *minutes(100.0, 101.0), waiting_min=3.0), line_of(default, *minutes(90.0, 91.0))]
    shown = replace(workload(job("a")), shown=("makespan_min", "waiting_min"))
    results.write(tmp_path, "alibaba", shown, lines, THEN)
    document.write(tmp_path, tmp_path / "experiments.md")
    text = (tmp_path / "experiments.md").read_text()
    assert f"| less the default's | makespan min | waiting min |\n|---|---|---|\n| {first.name} | **+10.00**" in text


def test_of_one_seed_nothing_is_compared_and_policies_of_other_seeds_are_refused(tmp_path):
    experiment = EXPERIMENTS["hotcloud"]
    lines = [line_of(one) for one in (*experiment.published, *ours(experiment.mode))]
    results.write(tmp_path, "hotcloud", workload(job("a")), lines, THEN)
    document.write(tmp_path, tmp_path / "experiments.md")
    assert "on the same seed: mean difference" not in (tmp_path / "experiments.md").read_text()
    policies = [line_of(one, *minutes(1.0, 2.0)) for one in policed(experiment)]
    results.write(tmp_path, "hotcloud" + results.POLICED, workload(job("a")), policies, THEN)
    with pytest.raises(WorkloadError, match="has, found 2; run the workload again"):
        document.write(tmp_path, tmp_path / "experiments.md")
    (tmp_path / f"hotcloud{results.POLICED}.csv").unlink()
    results.write(tmp_path, "hotcloud" + results.ATTRIBUTED, workload(job("a")), policies, THEN)
    with pytest.raises(
        WorkloadError, match=r"-attribution\.csv: expected 1 seed, as hotcloud\.csv has, found 2"
    ):
        document.write(tmp_path, tmp_path / "experiments.md")


@pytest.mark.parametrize(
    ("was", "now", "found"),
    [
        pytest.param("alone,1", "other,0", "2 seeds of every strategy, found 1 of alone", id="a run short"),
        pytest.param("alone,1", "alone,0", "found seed 0 of alone as its run 1", id="a seed twice"),
        pytest.param(",killed", ",slain", "found KeyError", id="another column"),
        pytest.param(",1\r\n", "\r\n", "found TypeError", id="a cell short"),
        pytest.param("alone,1", "alone,x", "found ValueError", id="no seed"),
        pytest.param("alone,", "", "found", id="no strategy"),
    ],
)
def test_results_that_are_not_whole_are_refused_with_what_is_missing(tmp_path, was, now, found):
    """Regression: a line short ended in a bare ValueError where seeds were compared."""
    results.write(tmp_path, "x", workload(job("a")), [line_of(ALONE, *minutes(1.0, 2.0))], THEN)
    path = tmp_path / "x.csv"
    text = path.read_bytes().decode()
    path.write_bytes(text.replace(was, now).encode())
    with pytest.raises(WorkloadError, match=rf"x\.csv: expected .*{found}.*; run the workload again"):
        results.read(tmp_path, "x")
    path.write_text(text.splitlines()[0])
    with pytest.raises(WorkloadError, match="2 seeds of every strategy, found no run"):
        results.read(tmp_path, "x")


def test_processor_time_is_told_of_one_run(tmp_path):
    line = replace(line_of(ALONE, *minutes(1.0, 2.0, 3.0)), cpu_s=7.5)
    results.write(tmp_path, "x", workload(job("a")), [line], THEN)
    found = results.read(tmp_path, "x")
    assert found is not None
    assert found.about.cpu_s == {"alone": 2.5}


def test_lines_of_silent_predictions_that_came_to_the_same_are_explained(tmp_path):
    experiment = EXPERIMENTS["hotcloud"]
    results.write(tmp_path, "hotcloud", workload(job("a")), [line_of(experiment.published[0])], Provenance())
    for last, told in ((1.0, True), (2.0, False)):
        *lines, silent, counted = wrong(experiment.mode)
        off = [*map(line_of, (*lines, silent)), line_of(counted, makespan_min=last)]
        results.write(tmp_path, "hotcloud" + results.WRONG, workload(job("a")), off, Provenance())
        document.write(tmp_path, tmp_path / "experiments.md")
        assert '"off by 0%" is as predicted' in (tmp_path / "experiments.md").read_text()
        assert ("The last two lines are the same on each seed" in (tmp_path / "experiments.md").read_text()) is told


def losses_of(*lines, policies=(), shown=("makespan_min", "utilization_percent", "oom")):
    about = results.About(title="", jobs=1, seeds=1, assumptions=[], cpu_s={}, shown=list(shown))
    return "\n".join(losses.section({"x": results.Results(about, list(lines))}, {"x": policies}))


def test_whoever_does_better_beyond_noise_is_told_of_and_whoever_came_to_the_same_is_told_of_once():
    slots, default, noisy, oracle, best = (
        replace(ALONE, name=name) for name in ("slots", DEFAULT, "noisy", "an oracle's", "best")
    )
    told = losses_of(
        line_of(slots, *minutes(200.0, 220.0, 241.0), utilization_percent=5.0),
        line_of(default, *minutes(100.0, 120.0, 140.0), utilization_percent=2.0),
        line_of(noisy, *minutes(50.0, 130.0, 139.0)),
        line_of(oracle, *minutes(1.0, 2.0, 3.0)),
        line_of(best, *minutes(90.0, 111.0, 129.0)),
        policies=[line_of(replace(ALONE, name="best-fit"), *minutes(90.0, 111.0, 129.0))],
    )
    assert "**x**, 3 seeds: where nothing differs, one cell in 11 would be filled, too, of separate lines" in told
    assert told.split("\n\n")[-1].splitlines() == [
        "| | makespan min | utilization % |",
        "|---|---|---|",
        "| the default | 120.0 | 2.0 |",
        "| slots |  | +3.00 |",
        "| best; best-fit | -10.00 ± 0.58 |  |",
    ]


def test_of_one_seed_losses_are_told_as_they_came_but_not_the_tiniest():
    slots, default, other = (replace(ALONE, name=name) for name in ("slots", DEFAULT, "other"))
    lines = [
        line_of(slots, makespan_min=99.95, oom=3.0),
        line_of(default, makespan_min=100.0, oom=2.0),
        line_of(other, makespan_min=99.0, oom=2.0),
    ]
    told = losses_of(*lines)
    assert "**x**, 1 seed: nobody knows what is noise; what differs by less than 0.1% is left out." in told
    assert told.rstrip().endswith("| | makespan min |\n|---|---|\n| the default | 100.0 |\n| other | -1.00 |")
    assert "**x**, 1 seed: nobody." in losses_of(*lines[:2])
    assert "**x**" not in losses_of(lines[0])


def test_more_memory_in_use_is_better_and_more_minutes_are_not():
    default, other = (replace(ALONE, name=name) for name in (DEFAULT, "other"))
    lines = [line_of(default, memory_percent=40.0), line_of(other, memory_percent=50.0, makespan_min=2.0)]
    told = losses_of(*lines, shown=("makespan_min", "memory_percent"))
    assert told.rstrip().endswith("| | memory in use % |\n|---|---|\n| the default | 40.0 |\n| other | +10.00 |")


def goals_of(*lines, name="hotcloud"):
    about = results.About(title="", jobs=100, seeds=1, assumptions=[], cpu_s={})
    return "\n".join(goals.section({name: results.Results(about, list(lines))}))


def test_that_nobody_dies_is_told_beside_who_would_without_what_is_learned():
    known = {one.name: one for one in ours(EXPERIMENTS["hotcloud"].mode)}
    default, unlearned, eager = (known[name] for name in (DEFAULT, goals.UNLEARNED, goals.EAGER))
    told = goals_of(line_of(default, oom=0.0), line_of(unlearned, oom=29.0), line_of(eager, oom=12.5))
    assert "That no job dies of memory on hotcloud hangs on what is learned, and on jobs that run alone" in told
    assert "| hotcloud, 100 jobs | 0.0 | 29.0 | 12.5 |" in told
    told = goals_of(line_of(default, oom=1.0), line_of(unlearned, oom=1.0), line_of(eager, oom=0.0))
    assert "hangs on" not in told
    assert "On hotcloud no more die without either. Deaths in the mean" in told
    told = goals_of(line_of(default, oom=0.0), line_of(unlearned, oom=0.02), line_of(eager, oom=0.0))
    assert "That no job dies of memory on hotcloud hangs on what is learned. Deaths" in told
    assert "| hotcloud, 100 jobs | 0.0 | 0.02 | 0.0 |" in told
    told = goals_of(line_of(default, oom=1.0), line_of(unlearned, oom=0.0), line_of(eager, oom=2.0))
    assert "How few jobs die of memory on hotcloud hangs on jobs that run alone where nothing was measured yet." in told
    assert "Deaths" not in goals_of(line_of(default), line_of(eager))


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        pytest.param((60.0, 122.0, 178.0), "-40.00 ± 0.58% | yes |", id="met"),
        pytest.param((90.0, 182.0, 268.0), "-10.00 ± 0.58% | **no** |", id="missed"),
        pytest.param((65.0, 133.0, 192.0), "-35.00 ± 0.87% | within noise |", id="met by less than noise"),
        pytest.param((67.0, 137.0, 198.0), "-33.00 ± 0.87% | within noise |", id="missed by less than noise"),
    ],
)
def test_a_goal_is_met_or_missed_by_more_than_noise(values, cell):
    first, default = EXPERIMENTS["hotcloud"].published[0], shipped(EXPERIMENTS["hotcloud"])
    lines = [line_of(first, *minutes(100.0, 200.0, 300.0)), line_of(default, *minutes(*values))]
    assert f"| HotCloud, makespan | -33.6% | -40.0% | {cell}" in goals_of(*lines)


def test_noise_excuses_no_death():
    first, default = EXPERIMENTS["hotcloud"].published[0], shipped(EXPERIMENTS["hotcloud"])
    died = [{"oom": float(seed == 0)} for seed in range(50)]
    told = goals_of(line_of(first, *died), line_of(default, *died))
    assert "| HotCloud, out of memory | 0 | 0 | 0.02 | **no** |" in told


def test_the_distance_to_an_oracle_has_an_error():
    default, oracle = (replace(ALONE, name=name) for name in (DEFAULT, ORACLE))
    told = goals_of(line_of(default, *minutes(120.0, 232.0, 368.0)), line_of(oracle, *minutes(100.0, 200.0, 300.0)))
    assert "| hotcloud | +20.0 ± 2.3% | +0.0% | +0.0% |" in told


def test_what_the_authors_own_strategy_comes_to_stands_beside_what_they_report_of_it():
    first, proactive = hotcloud.STRATEGIES[0], next(s for s in hotcloud.STRATEGIES if s.name == goals.PROACTIVE)
    told = goals_of(
        line_of(first, utilization_percent=40.0, makespan_min=200.0),
        line_of(proactive, utilization_percent=50.0, makespan_min=150.0, oom=4.1),
    )
    assert "it comes to +25.0% and -25.0%, with 4.1 deaths of memory in a run" in told
    assert "authors" not in goals_of(line_of(first))


def test_whom_the_default_slows_beyond_what_they_accept_is_told_of_each_experiment():
    default, oracle = (replace(ALONE, name=name) for name in (DEFAULT, ORACLE))
    told = goals_of(line_of(default, slowed_percent=2.34), line_of(oracle, slowed_percent=0.01))
    assert "slowed more than that 2.3% on hotcloud (less than 0.1% with an oracle's knowledge)." in told
    assert "No slowdowns are among what that oracle knows" in told
    assert "oracle knows" not in goals_of(line_of(default, slowed_percent=2.34))
    told = goals_of(line_of(default, slowed_percent=2.34), line_of(oracle, slowed_percent=0.0))
    assert "(none with an oracle's knowledge)" in told
    assert "accept" not in goals_of(line_of(default, slowed_percent=0.0))
    assert "accept" not in goals_of(line_of(default, slowed_percent=0.0, running_s=0.0)), "none ended"


def test_a_table_in_which_nobody_waits_says_that_it_tells_little():
    alone = line_of(ALONE, completion_min=200.0, waiting_min=1.9, gpus_in_use=50.0)
    default = line_of(
        replace(ALONE, name=DEFAULT), completion_min=201.0, gpus_in_use=49.5, slowed_percent=0.25, oom=0.0
    )
    told, _ = idleness.told([alone, default])
    assert told.startswith('Under "alone" a job waits 1.9 of its 200.0 minutes')
    assert "So hardly anybody shares (49.5 GPUs in use in place of 50.0, -1.0%)" in told
    assert "costs jobs hardly any time (+0.5%), that 0.2% of the jobs are slowed more than they accept, and" in told
    assert "and that none die of memory in a run" in told
    few = replace(default, runs=[replace(default.runs[0], oom=0.4, slowed_percent=0.02)])
    assert "that less than 0.1% of the jobs" in idleness.told([alone, few])[0]
    assert "and that 0.4 die of memory in a run" in idleness.told([alone, few])[0]
    for completion_min, in_use, said, share in (
        (203.8, 49.1, "costs jobs hardly any time (+1.9%)", "So hardly anybody shares"),
        (204.2, 48.9, "costs jobs time (+2.1%)", "So some share all the same"),
    ):
        figures = replace(default.runs[0], completion_min=completion_min, gpus_in_use=in_use)
        told, _ = idleness.told([alone, replace(default, runs=[figures])])
        assert said in told
        assert share in told
    assert idleness.told([line_of(ALONE, completion_min=200.0, waiting_min=2.0), default]) == [], "they wait"
    assert idleness.told([line_of(ALONE, completion_min=0.0, waiting_min=0.0), default]) == [], "none ended"
    assert idleness.told([alone]) == []


@pytest.mark.parametrize(("mean", "told"), [(0.0, "0.0"), (0.049, "0.05"), (0.002, "0.002"), (29.14, "29.1")])
def test_no_death_is_rounded_away(mean, told):
    assert report.deaths(mean) == told


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
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / "x.md").write_text("")
        subprocess.run([git, *arguments], cwd=tmp_path, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([git, *who, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path / "x.py")
    assert len(commit) >= 7
    assert commit_of(tmp_path / "y.py") == "", "a file that it does not hold"
    (tmp_path / "docs" / "x.md").write_text("1")
    assert commit_of(tmp_path / "x.py") == commit, "results change documents"
    (tmp_path / "x.py").write_text("1")
    assert commit_of(tmp_path / "x.py") == f"{commit}-dirty"


def test_a_checkout_of_which_git_tells_nothing_counts_as_unknown_not_as_clean(tmp_path, monkeypatch):
    """Regression: where `git status` failed or took too long a dirty tree was told to be clean."""
    (tmp_path / ".git").mkdir()
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    monkeypatch.setenv("PATH", str(fake.parent))
    assert commit_of(tmp_path / "x.py") == "unknown", "without git"
    for fails, found in (("status", "abc, changes unknown"), ("describe", "unknown"), ("ls-files", "unknown")):
        fake.write_text(f'#!/bin/sh\ncase "$2" in {fails}) exit 128;; status) ;; *) echo abc;; esac\n')
        fake.chmod(0o755)
        assert commit_of(tmp_path / "x.py") == found
        assert not Provenance(version=f"1.0, commit {found}").is_noted
    assert [Provenance(version=one).is_noted for one in ("1.0", "1.0, commit abc", "1.0, commit abc-dirty", "")] == [
        True,
        True,
        False,
        False,
    ]
