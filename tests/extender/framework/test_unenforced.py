"""What counts where nothing enforces a bound: by turns a first run counts with more than behind MPS."""

from dataclasses import replace

import numpy as np
import pytest
from carpool_core.values import RequestedMode, SharingMode
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import explain_gpu, summary
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import Placement, place_on_node
from carpool_extender.testing import cluster, demand, device, gpu_node, prediction, tenant
from carpool_simulator.information import Knower, Stage
from carpool_simulator.strategy import Knowledge, Strategy
from simulated_world import job

RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
MPS, TURNS = SharingMode.MPS, SharingMode.TIME_SLICING
FIRST_RUN = prediction(memory_mib=4080, unenforced_mib=5200)
ONLY_TURNS = device(modes=[SharingMode.EXCLUSIVE, TURNS])
"""One A100 without MPS, of 40,960 MiB."""


def placed(node, **wants) -> Placement | str:
    return place_on_node(
        CachedEvaluation(PodRequest(demand(**wants), may_use_measured_peak=True), RULES, cluster(node).snapshot()), "a"
    )


def counted(node, **wants) -> int | None:
    found = placed(node, **wants)
    assert isinstance(found, Placement)
    return found.tenant.memory_mib


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {}, 4080, id="behind MPS"),
        pytest.param(gpu_node("a", [ONLY_TURNS]), {}, 5200, id="no MPS there"),
        pytest.param(gpu_node(), {"mode": RequestedMode.TIME_SLICING}, 5200, id="it wants turns"),
        pytest.param(gpu_node("a", 1, [tenant("x", ["GPU-a-0"], TURNS)]), {}, 5200, id="its neighbours take turns"),
        pytest.param(gpu_node("a", 1, [tenant("x", ["GPU-a-0"], MPS)]), {}, 4080, id="its neighbours have limits"),
        pytest.param(gpu_node("a", 2), {"gpus": 2}, 4080, id="several GPUs: nothing is learned from such"),
        pytest.param(gpu_node(), {"mode": RequestedMode.EXCLUSIVE}, 4080, id="alone"),
        pytest.param(
            gpu_node("a", [ONLY_TURNS]), {"memory_limit_mib": 4500}, 4500, id="the user's own number is a promise"
        ),
        pytest.param(gpu_node("a", [ONLY_TURNS]), {"prediction": prediction()}, 4000, id="it ran before"),
        pytest.param(
            gpu_node("a", [ONLY_TURNS]),
            {"prediction": prediction(memory_mib=39000, unenforced_mib=50000)},
            40960,
            id="no more than the GPU has",
        ),
    ],
)
def test_what_counts_for_a_first_run_hangs_on_the_mode(node, wants, expected):
    assert counted(node, **({"prediction": FIRST_RUN} | wants)) == expected


def test_no_limit_follows_from_it():
    found = placed(gpu_node(), prediction=FIRST_RUN)
    assert isinstance(found, Placement)
    assert (found.mode, found.memory_limit_mib) == (MPS, 4080)


def test_the_check_and_its_refusal_count_with_it():
    held = tenant("x", ["GPU-a-0"], TURNS, prediction=prediction(memory_mib=36000))
    node = gpu_node("a", 1, [held])
    assert "needs 5,200 MiB; freest NVIDIA A100-SXM4-40GB has 4,960 MiB free" in str(
        placed(node, prediction=FIRST_RUN, max_slowdown=9)
    )
    small = prediction(memory_mib=3900, unenforced_mib=4960)
    assert counted(node, prediction=small, max_slowdown=9) == 4960


def test_one_that_may_take_all_by_turns_finds_no_place_beside_others():
    wide = prediction(memory_mib=39000, unenforced_mib=50000)
    node = gpu_node("a", [ONLY_TURNS], [tenant("x", ["GPU-a-0"], TURNS, prediction=prediction(memory_mib=1000))])
    assert "needs 40,960 MiB" in str(placed(node, prediction=wide))


def test_of_gpus_of_unlike_size_a_worker_counts_alike():
    """One reservation holds one number for all of a worker's GPUs, and the ledger must find room for it on each."""
    large, small = (device(i, "a", reserved_mib=reserved) for i, reserved in enumerate((500, 900)))
    wide = prediction(memory_mib=38000, unenforced_mib=49400)
    found = placed(gpu_node("a", [large, small]), prediction=wide, gpus=2)
    assert isinstance(found, Placement)
    assert (found.mode, found.tenant.memory_mib) == (TURNS, 38000)


def test_the_reason_says_why_so_much_is_counted():
    found = placed(gpu_node("a", [ONLY_TURNS]), prediction=FIRST_RUN)
    assert isinstance(found, Placement)
    assert "its first run counts with 5,200 MiB, because time-slicing enforces no limit" in found.reason
    other = placed(gpu_node(), prediction=FIRST_RUN)
    assert isinstance(other, Placement)
    assert "time-slicing" not in other.reason


def test_explain_says_for_what_it_needs_more_and_a_refusal_names_who_lacks_least():
    by_turns = gpu_node("a", [ONLY_TURNS], [tenant("x", ["GPU-a-0"], TURNS, prediction=prediction(memory_mib=36000))])
    limited = gpu_node("b", 1, [tenant("y", ["GPU-b-0"], MPS, prediction=prediction(memory_mib=36881))])
    newcomer = PodRequest(demand(prediction=FIRST_RUN, max_slowdown=9), may_use_measured_peak=True)
    cached_evaluation = CachedEvaluation(newcomer, RULES, cluster(by_turns, limited).snapshot())
    told = [explain_gpu(cached_evaluation.evaluation, row) for row in (0, 1)]
    assert "needs 5,200 MiB for a first run by time-slicing, has 4,960 MiB free (240 MiB short)" in told[0]
    assert "needs 4,080 MiB, has 4,079 MiB free (1 MiB short)" in told[1]
    told = summary(cached_evaluation.evaluation, np.array([0, 1]))
    assert "needs 4,080 MiB; another NVIDIA A100-SXM4-40GB has 4,079 MiB free" in told


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_simulated_predictions_keep_it_also_where_they_are_off(error):
    strategy = Strategy("x", "least-slowdown", Knowledge.PREDICTED, TURNS, error=error)
    told = Knower(strategy, usable_mib=40960, seed=1).pod_request(replace(job("a"), prediction=FIRST_RUN), Stage())
    memory = told.demand.prediction.products[0].memory
    assert (memory.upper_mib == 4080) is not bool(error)
    assert memory.upper_unenforced_mib == pytest.approx(memory.upper_mib * 5200 / 4080, rel=0.001)
