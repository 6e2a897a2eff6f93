"""What is said of who does better: seed by seed, against goals, against the default, and where nobody waits."""

from dataclasses import replace

import pytest
from carpool_research.experiments import hotcloud
from carpool_simulator.reports import goals, idleness, losses, results, tables
from carpool_simulator.reports.paired import Difference, by_chance, change, difference, percent
from carpool_simulator.sweep import DEFAULT, EVERYTHING, EXPERIMENTS, ORACLE, ours, shipped
from results_world import line_of, minutes
from scipy.stats import t as student
from simulated_world import ALONE


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
    assert "hangs on" not in told, "whether somebody dies or not"
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
        pytest.param((65.0, 133.0, 192.0), "-35.00 ± 0.87% | yes, within noise |", id="met by less than noise"),
        pytest.param((67.0, 137.0, 198.0), "-33.00 ± 0.87% | **no**, within noise |", id="missed by less than noise"),
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


def test_whoever_knows_everything_has_a_row_of_its_own_where_it_was_run():
    default, oracle, everything = (replace(ALONE, name=name) for name in (DEFAULT, ORACLE, EVERYTHING))
    lines = [line_of(default, *minutes(120.0)), line_of(oracle, *minutes(100.0))]
    about = results.About(title="", jobs=100, seeds=1, assumptions=[], cpu_s={})
    found = {"hotcloud": results.Results(about, lines)}
    told = "\n".join(goals.section(found, {"hotcloud": line_of(everything, *minutes(80.0))}))
    assert "| hotcloud | +20.0% |" in told
    assert "| hotcloud, everything | +50.0% |" in told
    assert "everything |" not in "\n".join(goals.section(found))


def test_whose_queue_waits_for_its_first_job_is_told_where_others_does_not():
    first, passing = replace(ALONE, name="first", in_order=True), replace(ALONE, name="passing", in_order=False)
    waiting, others = (line_of(one, *minutes(1.0)) for one in (first, passing))
    assert "whoever finds no place: first; the others" in "\n".join(tables.section("", [], [waiting, others]))
    for alike in ([waiting], [others]):
        assert "in order" not in "\n".join(tables.section("", [], alike))


def test_what_the_authors_own_strategy_comes_to_stands_beside_what_they_report_of_it():
    first, proactive = hotcloud.STRATEGIES[0], next(s for s in hotcloud.STRATEGIES if s.name == goals.PROACTIVE)
    told = goals_of(
        line_of(first, utilization_percent=40.0, makespan_min=200.0),
        line_of(proactive, utilization_percent=50.0, makespan_min=150.0, oom=4.1),
    )
    assert "it comes to +25.0% and -25.0%, with 4.1 deaths of memory in a run" in told
    assert "an oracle of memory" not in told
    assert "authors" not in goals_of(line_of(first))
    oracle = line_of(replace(ALONE, name=ORACLE), utilization_percent=60.0, makespan_min=140.0)
    told = goals_of(line_of(first, utilization_percent=40.0, makespan_min=200.0), line_of(proactive), oracle)
    assert "an oracle of memory, activity and speed comes to +50.0% and -30.0%." in told


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
    assert tables.deaths(mean) == told
