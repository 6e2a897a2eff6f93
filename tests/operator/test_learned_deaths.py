"""Who died of GPU memory gets more at the next try, and then a GPU alone, whatever was known."""

import pytest
from carpool_core import keys
from carpool_core.kube.api import CONFIG_MAPS
from carpool_core.kube.errors import Overloaded
from carpool_operator.conditions import find
from carpool_predictor.calibration.observe import LOADING_S, STEADY_S
from learning_world import OOM, begun, memory, ran, stack, stood, world


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
    assert "because earlier runs of this model (other jobs' too) died of memory there" in predicted.message
    assert placed is not None
    why = "ran out of memory on NVIDIA A100-SXM4-40GB, or took nearly all of it: once one has completed"
    assert "(Exclusive), because earlier runs of this model" in placed.message
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
            await stood(of, 2900, LOADING_S)
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
    await stood(of, 3000, STEADY_S)
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
