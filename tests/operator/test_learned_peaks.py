"""What running jobs take is told as it grows and stands still, and whoever waits is predicted by it anew."""

import pytest
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_predictor.calibration.observe import LOADING_S, STEADY_S
from learning_world import OOM, begun, memory, ran, seen, stack, stood, world, writes


async def test_a_running_job_tells_its_peak_once_it_has_not_moved_for_long_and_its_end_counts_it() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 2000)
    assert writes(of) == 0
    of.clock.advance(LOADING_S / 2)
    await seen(of, 3400)
    of.clock.advance(LOADING_S - 1)
    await of.settle()
    assert writes(of) == 0, "its peak has moved"
    of.clock.advance(1)
    await of.settle()
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3400, False)]
    assert stack(of).seen == 0
    of.clock.advance(STEADY_S)
    await of.settle()
    assert [row.steady for row in stack(of).rows] == [True]
    assert writes(of) == 2
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert (len(stack(of).rows), stack(of).seen) == (1, 1)
    assert stack(of).outcomes == "0", "it took more than its bound"


async def test_a_peak_that_moves_after_it_was_steady_is_told_before_the_end() -> None:
    """Regression: a job that grew late taught nothing of it until it ended, after days perhaps."""
    of = world()
    of.apply()
    await begun(of)
    for peak_mib in (3000, 3500):
        await stood(of, peak_mib, STEADY_S)
        assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(peak_mib, True)]
    assert stack(of).seen == 0


async def test_the_next_of_a_kind_is_predicted_by_what_a_run_took_since_its_first_lesson() -> None:
    """Regression: the first prediction after a run's first lesson was given to all later ones, however it grew."""
    of = world()
    of.apply()
    await begun(of)
    uppers = []
    for number, (peak_mib, wait_s) in enumerate([(2000, LOADING_S), (6000, STEADY_S), (6000, 0.0)]):
        await stood(of, peak_mib, wait_s)
        of.apply(f"y{number}")
        await of.settle()
        uppers.append(memory(of, f"y{number}").upper_mib)
    assert uppers == [pytest.approx(2800, rel=0.02), pytest.approx(6600, abs=1), pytest.approx(6600, abs=1)]


async def test_a_run_that_grows_before_it_stands_still_is_told_of_each_time() -> None:
    """Regression: of a peak that was not steady yet only the first was told, for up to ten minutes."""
    of = world()
    of.apply()
    await begun(of)
    uppers = []
    for number, peak_mib in enumerate((6000, 6010, 9000)):
        await stood(of, peak_mib, LOADING_S)
        of.apply(f"y{number}")
        await of.settle()
        uppers.append(memory(of, f"y{number}").upper_mib)
    assert [row.steady for row in stack(of).rows] == [False]
    assert uppers == [pytest.approx(upper, abs=1) for upper in (6600, 6600, 9900)]
    assert writes(of) == 2, "what grows by less than a step is not told of"


async def test_a_job_that_waits_hears_what_runs_of_its_kind_take_and_die_of() -> None:
    """Regression: it kept the prediction of a run's first lesson, as long as there was no other run."""
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await begun(of, memoryLimitMib=7000)
    await stood(of, 5000, LOADING_S)
    of.apply("y")
    await of.settle()
    uppers = [memory(of, "y").upper_mib]
    await stood(of, 6000, STEADY_S)
    of.operator.queue.add("default/y")
    await of.settle()
    uppers.append(memory(of, "y").upper_mib)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    of.operator.queue.add("default/y")
    await of.settle()
    uppers.append(memory(of, "y").upper_mib)
    assert uppers == [5500, pytest.approx(6600, abs=1), 10_500]


async def test_a_crd_that_keeps_no_gist_makes_nobody_predict_anew_at_each_look() -> None:
    """Regression: Helm leaves CRDs as they are, and what they do not know is not kept."""
    of = world()
    of.apply()
    await begun(of)
    await stood(of, 5000, LOADING_S)
    of.apply("y")
    await of.settle()
    for _ in range(2):
        stored = of.kube.dump(GPU_TRAINING_JOBS, "y", "default")
        for product in stored["status"]["prediction"]["products"]:
            product["memory"].pop("learnedGist", None)
        of.kube.seed(GPU_TRAINING_JOBS, stored)
        before = len(of.kube.calls)
        of.operator.queue.add("default/y")
        await of.settle()
        assert len(of.kube.calls) == before
    await ran(of, 9000, "z")
    of.operator.queue.add("default/y")
    await of.settle()
    assert memory(of, "y").upper_mib == pytest.approx(9900, abs=1), "one more run is heard of all the same"


async def test_a_peak_that_stood_still_stays_so_where_the_operator_begins_anew() -> None:
    """Regression: what was known to be all was taken for a beginning again, which never lowers a bound."""
    of = world()
    of.apply()
    await begun(of)
    await stood(of, 2000, STEADY_S)
    assert [row.steady for row in stack(of).rows] == [True]
    of.start()
    of.clock.advance(LOADING_S)
    await of.settle()
    assert [row.steady for row in stack(of).rows] == [True]
    await stood(of, 3000, LOADING_S)
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3000, False)]
