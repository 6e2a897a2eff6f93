"""The operator learns from what ran: once from each attempt, whatever dies in between, and uses it for the next."""

import msgspec
import pytest
from carpool_core import keys
from carpool_core.resources.features import ModelFeatures
from carpool_operator.conditions import find
from carpool_predictor.calibration.observe import LOADING_S, STEADY_S
from carpool_predictor.features import Abstention
from learning_world import OOM, begun, memory, ran, seen, stack, stood, world, writes
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


async def test_an_operator_that_was_restarted_tells_what_runs_again_and_counts_it_once() -> None:
    of = world()
    of.apply()
    await begun(of)
    await stood(of, 3000, LOADING_S)
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
    of.clock.advance(LOADING_S)
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
    of.clock.advance(LOADING_S)
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
