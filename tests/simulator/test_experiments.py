"""What is written of experiments: tables, the document, and of which version they are."""

from dataclasses import replace

import pytest
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.scores import POLICIES
from carpool_simulator.engine import Finished
from carpool_simulator.progress import Provenance
from carpool_simulator.reports import document, results, workdone
from carpool_simulator.reports.pictures import draw, lanes
from carpool_simulator.reports.tables import POLICED, markdown
from carpool_simulator.sweep import (
    DEFAULT,
    EXPERIMENTS,
    FIGURES,
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
from carpool_simulator.truth import WorkloadError
from results_world import THEN, line_of, minutes
from simulated_world import ALONE, CARPOOL, job, truth, workload


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_policies_by_name_know_what_carpool_knows_and_whole_gpus_come_first(name):
    """Regression: they learned and measured nothing, so that of HotCloud's jobs a third died under the default."""
    base = shipped(EXPERIMENTS[name])
    by_name = {one.name: one for one in named("all", base)}
    assert next(iter(by_name)) == "exclusive"
    assert by_name.keys() == POLICIES.keys()
    assert replace(by_name[base.policy], name=base.name) == base
    asked = AdmissionLimits(max_jobs=2)
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
    assert document.UNLIKE in text
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
        assert (document.UNLIKE in text) is not are_alike
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
    with pytest.raises(WorkloadError, match=r"-attribution\.csv: expected 1 seed, as hotcloud\.csv has, found 2"):
        document.write(tmp_path, tmp_path / "experiments.md")


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


def test_whoever_waits_hears_how_far_a_run_is_and_what_came_of_it(data):
    told, watched = [], []
    jobs = workload(*(job(f"j{i}", of=truth(util=0.9, kind="lucid/ResNet18/32/0")) for i in range(4)))
    contest(lambda _: jobs, [ALONE, replace(CARPOOL, max_slowdown=9.0)], 2, data, told.append, watched.append)
    assert watched[:4] == [f"alone, run 1 of 2: {done}%" for done in (25, 50, 75, 100)]
    assert watched[-1] == "carpool, run 2 of 2: 100%"
    assert told[0].endswith("0.0 OOM")
    assert told[1].endswith("0.0 OOM, 100% slowed beyond 1.5")


def test_tables_tell_mean_spread_and_change(data, tmp_path):
    told = []
    lines = contest(lambda seed: workload(job("a"), job("b")), [ALONE, CARPOOL], 2, data, told.append)
    table = markdown(lines)
    assert table[0].startswith("| strategy | makespan min | change | utilization % | change |")
    assert "| slowed beyond 1.5 times, % of jobs |" in table[0]
    assert table[2].startswith("| alone | 3.3 ± 0.0 |")
    assert table[3].startswith("| carpool | 3.3 ± 0.0 | +0.0% |")
    assert "| +0.0% |" in markdown([line_of(ALONE, makespan_min=100.0), line_of(CARPOOL, makespan_min=99.99)])[3]
    assert len(told) == 2
    results.write_csv(tmp_path / "x.csv", lines)
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 5
