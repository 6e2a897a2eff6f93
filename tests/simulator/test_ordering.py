"""What the order hangs on: its control on whole GPUs, steps that jobs do not say, or say wrong."""

from dataclasses import replace
from itertools import pairwise

import pytest
from carpool_core.durations import duration_bucket, duration_s
from carpool_extender.queue.order import QueueOrder
from carpool_research.experiments.hotcloud import hotcloud
from carpool_simulator.information import Knower
from carpool_simulator.progress import Provenance
from carpool_simulator.reports import document, doubts, goals, ordering, otherwise, results, tables
from carpool_simulator.sweep import (
    ARRIVAL,
    DEFAULT,
    EXPERIMENTS,
    LONGEST_FIRST,
    SMALL,
    attributed,
    contest,
    ours,
    policed,
    shipped,
    varied,
    wrong,
)
from results_world import THEN, line_of, minutes
from simulated_world import CARPOOL, job, workload

BY_TURNS = replace(CARPOOL, order=QueueOrder.ALTERNATE)
HOTCLOUD = EXPERIMENTS["hotcloud"]
CONTROL = ordering.hanging(HOTCLOUD)[0]


def rungs(strategy, jobs, seed=0):
    knower = Knower(strategy, 8000, seed)
    return [knower.ticket(one, 0, number, is_decreasing=False).rung for number, one in enumerate(jobs)]


def test_lengths_go_by_the_predicted_time_of_a_step(published):
    """Regression: each step of a job counted as a second, so that the queue was sorted by the number of steps."""
    jobs = hotcloud(published, 0).jobs
    by_name = {one.name: one for one in (*ours(HOTCLOUD.mode), CONTROL)}
    told = [duration_bucket(duration_s(one.steps, one.prediction, lambda _: True)) for one in jobs]
    assert rungs(by_name[LONGEST_FIRST], jobs) == rungs(by_name[CONTROL.name], jobs) == told
    assert len(set(told)) > 5


def test_predictions_that_are_off_have_wrong_step_times_too():
    jobs = [job(f"j{i}", steps=3600) for i in range(200)]
    assert set(rungs(BY_TURNS, jobs)) == {duration_bucket(3600.0)}
    found = {error: rungs(replace(BY_TURNS, error=error), jobs) for error in (0.1, 0.5)}
    small, large = (sum(abs(one - duration_bucket(3600.0)) for one in found[error]) for error in (0.1, 0.5))
    assert 0 < small < large


def test_a_share_of_the_jobs_says_no_steps_and_counts_as_an_hour():
    jobs = [job(f"j{i}", steps=60) for i in range(400)]
    found = rungs(replace(BY_TURNS, silent_share=0.5), jobs)
    assert set(found) == {duration_bucket(60.0), duration_bucket(None)}
    assert 160 < found.count(duration_bucket(None)) < 240
    assert found == rungs(replace(BY_TURNS, silent_share=0.5), jobs)
    assert found != rungs(replace(BY_TURNS, silent_share=0.5), jobs, seed=1)
    assert set(rungs(replace(BY_TURNS, silent_share=1.0), jobs)) == {duration_bucket(None)}


def test_steps_that_jobs_say_are_off_by_factors_around_one():
    jobs = [job(f"j{i}", steps=3600) for i in range(400)]
    off = replace(BY_TURNS, steps_error=ordering.STEPS_ERROR)
    found = sorted(rungs(off, jobs))
    assert found == sorted(rungs(off, jobs)) != sorted(rungs(off, jobs, seed=1))
    assert found[200] == pytest.approx(duration_bucket(3600.0), abs=1)
    assert found[64] <= duration_bucket(3600.0) - 1 <= duration_bucket(3600.0) + 1 <= found[-64], (
        "one in six is off by a factor of two"
    )
    assert rungs(off, [job("no steps")]) == [duration_bucket(None)]
    assert rungs(off, [job("one step", steps=1)]) == [duration_bucket(1.0)], "never none at all"


@pytest.mark.parametrize("name", SMALL)
def test_the_control_differs_from_the_first_line_in_its_order_alone(name, published):
    experiment = EXPERIMENTS[name]
    control = ordering.hanging(experiment)[0]
    in_order = replace(control, order=QueueOrder.ARRIVAL)
    lines = contest(
        lambda seed: experiment.draw(published, seed),
        [experiment.published[0], in_order, control],
        1,
        published,
        lambda _: None,
    )
    assert lines[0].runs == lines[1].runs != lines[2].runs


def test_what_is_tried_differs_from_the_default_in_one_thing():
    base = shipped(HOTCLOUD)
    _, *others = ordering.hanging(HOTCLOUD)
    changed = [{key for key in base.__slots__ if getattr(one, key) != getattr(base, key)} - {"name"} for one in others]
    assert changed == [{"silent_share"}, {"steps_error"}, {"error"}, {"error"}, {"error"}]
    assert all(a.error < b.error for a, b in pairwise(others[2:]))
    assert len({one.name for one in others}) == len(others)


def written(folder, hanging, made=THEN):
    first, base = HOTCLOUD.published[0], shipped(HOTCLOUD)
    lines = [
        line_of(first, *minutes(200.0, 400.0, 600.0)),
        line_of(next(one for one in HOTCLOUD.published if one.name == goals.PROACTIVE), *minutes(140.0, 280.0, 420.0)),
        line_of(base, *minutes(120.0, 240.0, 360.0), slowed_percent=2.0),
        line_of(replace(base, name=ARRIVAL), *minutes(140.0, 280.0, 420.0)),
        line_of(replace(base, name=LONGEST_FIRST), *minutes(90.0, 180.0, 270.0)),
    ]
    results.write(folder, "hotcloud", workload(job("a")), lines, THEN)
    if hanging:
        results.write(folder, "hotcloud" + results.ORDER, workload(job("a")), hanging, made)
    document.write(folder, folder / "experiments.md")
    return (folder / "experiments.md").read_text()


def test_the_document_tells_what_the_order_alone_gains_and_what_is_left_without_steps(tmp_path):
    control, silent, *_ = ordering.hanging(HOTCLOUD)
    hanging = [
        line_of(control, *minutes(160.0, 322.0, 478.0)),
        line_of(silent, *minutes(100.0, 200.0, 300.0), oom=0.25),
    ]
    told = written(tmp_path, hanging)
    assert '"slot-based" itself, whole GPUs, comes to +0.0% and -20.00 ± 0.29% in that order' in told
    assert "([what the order hangs on](#what-the-order-hangs-on))" in told
    assert f"ten minutes ([{otherwise.TITLE.lower()}]({otherwise.place()}))" in told
    _, section = told.split(f"## {ordering.TITLE}\n")
    head, _, *rows = section.split("\n\n")[2].splitlines()
    cells = [[one.strip() for one in row.strip("| ").split("|")] for row in rows]
    assert head.count("to the control's") == 2
    assert [row[0] for row in cells] == [control.name, DEFAULT, ARRIVAL, LONGEST_FIRST, silent.name]
    assert cells[0][1:6] == ["-20.00 ± 0.29%", "+0.0%", "+0.0%", "", ""]
    assert [row[1] for row in cells[1:4]] == ["-40.0%", "-30.0%", "-55.0%"]
    assert cells[4][1] == "-50.0%"
    assert cells[4][4].startswith("-37.5")
    assert [cells[1][6], cells[4][7]] == ["2.0", "0.2"]
    assert '3 seeds: changes against "slot-based" ± standard error' in section


def test_a_document_of_older_results_has_no_such_table_and_of_another_version_says_so(tmp_path):
    told = written(tmp_path, [])
    assert ordering.TITLE not in told
    assert "whole GPUs, comes to" not in told
    other = Provenance(when=THEN.when, version="1.1, commit abd")
    told = written(tmp_path, [line_of(CONTROL, *minutes(160.0, 322.0, 478.0))], other)
    assert f"**hotcloud**: {ordering.UNLIKE}." in told
    assert "whole GPUs, comes to" not in told


def test_goals_and_doubts_say_alike_that_few_are_slowed_where_jobs_are_learned(tmp_path):
    told = written(tmp_path, [])
    assert told.count(doubts.OWN_TRACES) == told.count(doubts.FAR_MORE) == 2
    assert told.index("the default slowed more than that 2.0%") < told.index(doubts.OWN_TRACES)


def test_the_goals_tell_of_the_default_and_of_the_order_of_arrival(tmp_path):
    told = written(tmp_path, [])
    assert "| HotCloud, makespan | -33.6% | -40.0% | -40.0% | yes | -30.0% | **no** |" in told


def test_tables_say_in_which_order_carpools_lines_take_jobs_where_there_are_some():
    lines = [line_of(one, *minutes(1.0, 2.0)) for one in (HOTCLOUD.published[0], shipped(HOTCLOUD))]
    assert "the longest and the shortest take turns" in "".join(tables.section("", (), lines))
    assert "take turns" not in "".join(tables.section("", (), lines[:1]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_carpool_takes_turns_by_default_and_what_was_published_comes_in_order_of_arrival(name):
    experiment = EXPERIMENTS[name]
    own = [one for one in experiment.published if one.name.startswith("Carpool")]
    assert {one.order for one in experiment.published if one not in own} == {QueueOrder.ARRIVAL}
    own += [one for of in (ours, wrong, attributed, varied) for one in of(experiment.mode)]
    others = {one.name: one.order for one in own if one.order is not QueueOrder.ALTERNATE}
    assert others == {ARRIVAL: QueueOrder.ARRIVAL, LONGEST_FIRST: QueueOrder.LONGEST_FIRST}
    assert {one.order for one in policed(experiment)} == {QueueOrder.ALTERNATE}
