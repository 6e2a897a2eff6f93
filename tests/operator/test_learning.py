"""The operator learns from what ran: once from each attempt, whatever dies in between, and uses it for the next."""

import msgspec
import pytest
from carpool_core import keys
from carpool_core.kube.api import CONFIG_MAPS, GPU_TRAINING_JOBS
from carpool_core.kube.errors import Overloaded
from carpool_core.resources.features import ModelFeatures
from carpool_operator.state.conditions import find
from carpool_predictor.calibration.observe import SEEN_S, STEADY_S
from carpool_predictor.features.abstention import Abstention
from learning_world import OOM, begun, memory, ran, seen, stack, world, writes
from operator_fixtures import FEATURES


async def test_what_a_job_took_is_what_the_next_of_its_kind_is_predicted() -> None:
    of = world()
    await ran(of, 3000)
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3000, True)]
    assert (stack(of).seen, stack(of).stack.driver) == (1, "simulated")
    assert of.job().status.attempts[0].learned
    assert of.job().status.attempts[0].peak_memory_mib == 3000
    before = memory(of)
    assert (before.learned_jobs, before.learned_runs) == (0, 0)
    of.apply("y")
    await of.settle()
    after = memory(of, "y")
    assert (after.median_mib, after.upper_mib, after.learned_runs) == (3000, pytest.approx(3300, abs=1), 1)
    told = find(of.job("y").status, keys.CONDITION_PREDICTED)
    assert told is not None
    assert "is calibrated from 1 run of this very one" in told.message
    assert memory(of) == before, "of a job that ran, the prediction stays what it was"


async def test_a_settled_cluster_that_learns_is_quiet() -> None:
    of = world()
    await ran(of, 3000)
    before = len(of.kube.calls)
    for _ in range(3):
        of.operator.queue.add("default/x")
        await of.settle()
    assert len(of.kube.calls) == before


async def test_a_running_job_tells_its_peak_once_it_has_not_moved_for_long_and_its_end_counts_it() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 2000)
    assert writes(of) == 0
    of.clock.advance(SEEN_S / 2)
    await seen(of, 3400)
    of.clock.advance(SEEN_S - 1)
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
        await seen(of, peak_mib)
        of.clock.advance(STEADY_S)
        await of.settle()
        assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(peak_mib, True)]
    assert stack(of).seen == 0


async def test_the_next_of_a_kind_is_predicted_by_what_a_run_took_since_its_first_lesson() -> None:
    """Regression: the first prediction after a run's first lesson was given to all later ones, however it grew."""
    of = world()
    of.apply()
    await begun(of)
    uppers = []
    for number, (peak_mib, wait_s) in enumerate([(2000, SEEN_S), (6000, STEADY_S), (6000, 0.0)]):
        await seen(of, peak_mib)
        of.clock.advance(wait_s)
        await of.settle()
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
        await seen(of, peak_mib)
        of.clock.advance(SEEN_S)
        await of.settle()
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
    await seen(of, 5000)
    of.clock.advance(SEEN_S)
    await of.settle()
    of.apply("y")
    await of.settle()
    uppers = [memory(of, "y").upper_mib]
    await seen(of, 6000)
    of.clock.advance(STEADY_S)
    await of.settle()
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
    await seen(of, 5000)
    of.clock.advance(SEEN_S)
    await of.settle()
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
    await seen(of, 2000)
    of.clock.advance(STEADY_S)
    await of.settle()
    assert [row.steady for row in stack(of).rows] == [True]
    of.start()
    of.clock.advance(SEEN_S)
    await of.settle()
    assert [row.steady for row in stack(of).rows] == [True]
    await seen(of, 3000)
    of.clock.advance(SEEN_S)
    await of.settle()
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3000, False)]


async def test_an_operator_that_was_restarted_tells_what_runs_again_and_counts_it_once() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 3000)
    of.clock.advance(SEEN_S)
    await of.settle()
    of.start()
    of.clock.advance(STEADY_S)
    await of.settle()
    of.clock.advance(STEADY_S)
    await of.settle()
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert (len(stack(of).rows), stack(of).seen) == (1, 1)


async def test_activity_is_learned_as_it_is_without_neighbours() -> None:
    of = world()
    for name in ("x", "y"):
        of.apply(name)
        await begun(of, name)
    for name in ("x", "y"):
        await seen(of, 3000, name, gpuUtilPercent=45.0, smActiveRatio=0.35)
    of.clock.advance(SEEN_S)
    await of.settle()
    for row in stack(of).rows:
        assert row.sm_active is not None
        assert 0.35 < row.sm_active < 2 * 0.35  # less than twice: two never slow each other down by more
    of.apply("z")
    await of.settle()
    prediction = of.job("z").status.prediction
    assert prediction is not None
    assert prediction.products[0].activity.sm_active_ratio.median == pytest.approx(
        sum(row.sm_active or 0 for row in stack(of).rows) / 2
    )


async def test_a_gpu_that_is_used_up_never_tells_that_a_job_does_less() -> None:
    """Regression: what jobs left to each other was learned as all that each would do, and more of them came."""
    of, calm = world(), {"dramActiveRatio": 0.1}
    of.apply()
    await begun(of, tenant=calm)
    await seen(of, 3000, gpuUtilPercent=90.0, smActiveRatio=0.85)
    of.clock.advance(SEEN_S)
    await of.settle()
    alone = [(row.util, row.sm_active) for row in stack(of).rows]
    assert alone == [(0.9, 0.85)]
    of.apply("y")
    await begun(of, "y", tenant=calm)
    for name in ("x", "y"):
        await seen(of, 3000, name, gpuUtilPercent=45.0, smActiveRatio=0.42)
    of.clock.advance(STEADY_S)
    await of.settle()
    # What one showed alone before stays; of the other one, a run of the same job, nothing is told but memory.
    assert {(row.util, row.sm_active) for row in stack(of).rows} == {(0.9, 0.85), (None, None)}
    assert [row.value_mib for row in stack(of).rows] == [3000, 3000]


async def test_who_died_of_memory_gets_more_and_then_a_gpu_alone() -> None:
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await begun(of, memoryLimitMib=3000)
    uppers = [memory(of).upper_mib]
    for attempt in (1, 2):
        of.end_pod(f"x-worker-0-{attempt}", exit_code=1, message=OOM)
        await of.settle()
        assert of.job().status.attempts[-1].learned
        of.clock.advance(60)
        await of.settle()
        assert of.living() == [f"x-worker-0-{attempt + 1}"]
        uppers.append(memory(of).upper_mib)
        if attempt == 1:
            assert memory(of).trusted
        alone = {} if memory(of).trusted else {"mode": "Exclusive"}
        await begun(of, memoryLimitMib=uppers[-1], **alone)
    assert uppers[1] == 4500
    assert not memory(of).trusted
    predicted, placed = (find(of.job().status, kind) for kind in (keys.CONDITION_PREDICTED, keys.CONDITION_PLACED))
    assert predicted is not None
    assert "because earlier runs of it died of memory there" in predicted.message
    assert placed is not None
    why = "(Exclusive), because earlier runs of it died of memory on NVIDIA A100-SXM4-40GB, or took nearly all of it"
    assert why in placed.message
    assert stack(of).seen == 2


@pytest.mark.parametrize("is_seen", [False, True], ids=["died at once", "was seen before it died"])
@pytest.mark.parametrize("earlier", range(4))
async def test_whatever_was_known_who_died_gets_more_each_time_and_then_a_gpu_alone(
    earlier: int, is_seen: bool
) -> None:
    """Regression: where earlier runs were known, or its own beginning, it got what it had died with, or less."""
    of = world(backoff_s=10.0)
    for number in range(earlier):
        await ran(of, 3000, f"k{number}")
    of.apply(runPolicy={"backoffLimit": 5})
    await of.settle()
    had = [memory(of).upper_mib]
    for attempt in (1, 2):
        await begun(of, memoryLimitMib=had[-1])
        if is_seen:
            await seen(of, 2900)
            of.clock.advance(SEEN_S)
            await of.settle()
        of.end_pod(f"x-worker-0-{attempt}", exit_code=1, message=OOM)
        await of.settle()
        of.clock.advance(400)
        await of.settle()
        had.append(memory(of).upper_mib)
        assert memory(of).trusted is (attempt == 1)
    assert had[1] == pytest.approx(1.5 * had[0], abs=1)
    assert had[2] > had[1]


async def test_who_died_with_its_very_peak_gets_more() -> None:
    """Regression: that it was not enough made no difference to what was kept of predictions."""
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await begun(of, memoryLimitMib=3000)
    await seen(of, 3000)
    of.clock.advance(STEADY_S)
    await of.settle()
    of.apply("y")
    await of.settle()
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    of.apply("z")
    await of.settle()
    assert (memory(of, "y").upper_mib, memory(of, "z").upper_mib) == (pytest.approx(3300, abs=1), 4500)


async def test_who_died_with_all_of_a_gpu_is_given_no_other_one_like_it() -> None:
    """Regression: it ran alone on such a GPU again, until `backoffLimit`."""
    of = world(backoff_s=10.0)
    of.apply()
    await begun(of, mode="Exclusive", memoryLimitMib=None)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    of.clock.advance(60)
    await of.settle()
    assert of.living() == []
    placed = find(of.job().status, keys.CONDITION_PLACED)
    assert placed is not None
    assert (placed.status, placed.reason) == ("False", "ExceedsEveryGpu")
    assert "too small: needs" in placed.message


async def test_the_next_attempt_waits_until_its_predecessors_end_is_learned_but_not_for_ever() -> None:
    of = world(backoff_s=0.0)
    of.apply()
    await begun(of, memoryLimitMib=3000)
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    assert of.living() == []
    of.clock.advance(31)
    await of.settle()
    assert of.living() == ["x-worker-0-2"]


async def test_a_job_whose_memory_was_never_promised_judges_no_bound() -> None:
    of = world()
    of.apply(model=None)
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert writes(of) == 0, "nothing was predicted, so nothing is compared"
    assert not of.job().status.attempts[0].learned


async def test_a_worker_of_several_gpus_teaches_nothing() -> None:
    of = world()
    await ran(of, 3000, gpusPerWorker=2)
    assert writes(of) == 0


@pytest.mark.parametrize("happens", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("write", range(1, 9))
async def test_killed_at_each_write_nothing_counts_twice_and_nothing_is_lost(write: int, happens: bool) -> None:
    of = world(backoff_s=1.0)
    of.apply()
    await begun(of, memoryLimitMib=3000)
    await seen(of, 2500)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.survive(write, happens=happens)
    await of.settle()
    of.clock.advance(60)
    await of.settle()
    await begun(of, memoryLimitMib=6000)
    await seen(of, 4000)
    of.end_pod("x-worker-0-2")
    await of.survive(write, happens=happens)
    await of.settle()
    rows = sorted((row.value_mib, row.censored) for row in stack(of).rows)
    assert rows == [(3000, True), (4000, False)]
    assert stack(of).seen == 2
    assert [attempt.learned for attempt in of.job().status.attempts] == [True, True]


async def test_what_can_no_longer_be_compared_is_not_said_to_be_learned() -> None:
    of = world()
    of.apply(model={"catalog": {"name": "timm/resnet50"}})
    await begun(of)
    await seen(of, 3000)
    of.tracer.answer = Abstention(reason="TorchMissing", message="no torch here")
    of.start()
    await of.settle()
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert of.job().status.state == "Complete"
    assert not of.job().status.attempts[0].learned
    assert writes(of) == 0
    # What lies in the moment is tried again, though not all the time.
    of.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    await of.settle()
    assert writes(of) == 0
    of.clock.advance(600)
    await of.settle()
    await of.settle()
    assert stack(of).seen == 1
    assert of.job().status.attempts[0].learned
