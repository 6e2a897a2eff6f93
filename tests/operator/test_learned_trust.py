"""Where too little was measured jobs run alone, until enough was: on simulated GPUs for simulated ones only."""

from typing import Any

import pytest
from carpool_core import keys
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_operator.conditions import find
from carpool_predictor.calibration.document import MIN_JOBS
from learning_world import NAME, NAMESPACE, memory, model, on_t4, ran, world
from operator_world import World


async def test_where_nothing_was_measured_jobs_run_alone_until_enough_was() -> None:
    of = world()
    on_t4(of)
    for number in range(MIN_JOBS):
        name = f"x{number}"
        await ran(of, 2000 + 500 * number, name, model=model(number + 1))
        assert not memory(of, name).trusted
    of.apply("y", model=model(9))
    await of.settle()
    assert memory(of, "y").trusted
    assert memory(of, "y").learned_jobs == MIN_JOBS
    told = find(of.job("x0").status, keys.CONDITION_PREDICTED)
    assert told is not None
    assert told.reason == "Uncalibrated"
    assert "runs alone on Tesla T4 until enough like it was measured there" in told.message


async def test_what_simulated_gpus_taught_makes_no_hardware_trusted() -> None:
    """Regression: three jobs on simulated GPUs were enough to share real ones of that product."""
    of = world()
    on_t4(of)
    for number in range(MIN_JOBS):
        await ran(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    home = of.kube.dump(GPU_NODES, "n1")
    for device in home["status"]["devices"][:1]:
        device["product"] = "Tesla T4"
    of.kube.seed(GPU_NODES, home)
    of.apply("y", model=model(9))
    await of.settle()
    assert not memory(of, "y").trusted
    assert memory(of, "y").learned_jobs == 0
    of.apply("z", model=model(1))
    await of.settle()
    assert memory(of, "z").learned_runs == 0


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_job_that_waits_hears_that_its_stack_was_calibrated(restarted: bool) -> None:
    of = world()
    on_t4(of)
    of.apply("waits", model=model(9))
    await of.settle()
    assert not memory(of, "waits").trusted
    for number in range(MIN_JOBS):
        await ran(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    if restarted:  # it knows no job's size yet, and no list of news
        untrusted = of.kube.dump(GPU_TRAINING_JOBS, "waits", "default")["status"]["prediction"]
        assert not untrusted["products"][0]["memory"]["trusted"]
        of.start()
    of.operator.queue.add("default/waits")
    await of.settle()
    assert memory(of, "waits").trusted
    before = len(of.kube.calls)
    of.operator.queue.add("default/waits")
    await of.settle()
    assert len(of.kube.calls) == before


@pytest.mark.parametrize("settings", [{"share_unmeasured": True}, {"calibration": ""}])
async def test_unmeasured_jobs_share_where_the_site_says_so_or_nothing_is_learned(settings: dict[str, Any]) -> None:
    of = World(**({"calibration": f"{NAMESPACE}/{NAME}"} | settings))
    on_t4(of)
    of.apply()
    await of.settle()
    assert memory(of).trusted
