"""The queue by predicted lengths: the longest first, by the steps that jobs say they have."""

from dataclasses import replace

import pytest
from carpool_extender.simulation.engine import Simulation
from carpool_extender.simulation.hotcloud import hotcloud, step_times
from carpool_extender.simulation.radrm import radrm, steps_of
from simulated_world import CARPOOL, NoSlowdown, job, truth, workload

FULL = truth(6000)
"""Two of them do not fit on one GPU."""
LONGEST_FIRST = replace(CARPOOL, longest_first=True)


def order(*jobs, strategy=LONGEST_FIRST):
    outcome = Simulation(workload(*jobs), strategy, NoSlowdown()).run()
    return [one.job.name for one in outcome.finished]


def test_of_those_that_wait_the_one_of_the_most_steps_starts_first_whatever_it_truly_takes():
    jobs = [
        job("running", 50.0, of=FULL, steps=1),
        job("short", 500.0, of=FULL, steps=1_000),
        job("long", 5.0, of=FULL, steps=1_000_000),
        job("middling", 50.0, of=FULL, steps=30_000),
    ]
    assert order(*jobs) == ["long", "middling", "short", "running"]
    assert order(*jobs, strategy=CARPOOL) == ["running", "short", "long", "middling"]


def test_jobs_of_about_the_same_length_keep_the_order_of_their_arrival():
    jobs = [
        job("first", of=FULL, steps=10_000),
        job("second", of=FULL, steps=10_100),
        job("third", of=FULL, steps=9990),
    ]
    assert order(*jobs) == ["first", "second", "third"]


def test_who_does_not_say_how_many_steps_there_are_counts_as_an_hour():
    jobs = [job("minutes", of=FULL, steps=300), job("unknown", of=FULL), job("day", of=FULL, steps=86_400)]
    assert order(*jobs) == ["day", "unknown", "minutes"]


def test_steps_come_from_measured_step_times_and_lengths_from_predicted_ones(published):
    measured_s = step_times(published)
    jobs = hotcloud(published, 0).jobs
    assert [one.steps * measured_s[one.truth.kind] for one in jobs] == pytest.approx(
        [one.work_s for one in jobs], rel=0.02
    )
    told = {one.truth.kind: one.prediction.products[0].step_time_seconds.median for one in jobs if one.prediction}
    assert len(told) == len(measured_s) == 18
    assert all(2 < measured_s[kind] / step_s < 8 for kind, step_s in told.items())


@pytest.mark.parametrize(
    ("kind", "epochs", "steps"),
    [
        pytest.param("radrm/resnet50/ImageNet/128", 1, 10_010, id="the last batch is not full"),
        pytest.param("radrm/resnet18/cifar100/32", 20, 31_260, id="several epochs"),
        pytest.param("radrm/BERT_base/Wiki/32", 1, None, id="the size of the text is not published"),
    ],
)
def test_steps_of_rad_rm_come_from_the_sizes_of_datasets(kind, epochs, steps):
    assert steps_of(kind, epochs) == steps


def test_tasks_on_images_say_how_many_steps_they_have(published):
    jobs = radrm(published, 0, 60).jobs
    assert {one.steps is None for one in jobs if "/Wiki/" in one.truth.kind} == {True}
    assert {one.steps is None for one in jobs if "/Wiki/" not in one.truth.kind} == {False}
