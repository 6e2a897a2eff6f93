"""The sharing mode of a GPU, and the memory that counts in it for first runs and where no bound is enforced."""

from dataclasses import replace

import numpy as np
import pytest
from carpool_core.values import RequestedMode, SharingMode, Tenancy
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.diagnosis import explain_gpu, summary
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import place_on_node
from carpool_extender.testing import cluster, demand, device, gpu_node, prediction, tenant
from carpool_simulator.information import InformationModel, Stage
from carpool_simulator.strategy import Knowledge, Strategy
from evaluations import RULES, evaluate
from msgspec import structs
from simulated_world import job

MPS, TURNS, ALONE, MIG = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE, SharingMode.MIG
UNMEASURED, LOST = prediction(trusted=False), prediction(trusted=False, learned_runs=2)
FIRST_RUN = prediction(memory_mib=4080, unenforced_mib=5200)
WIDE = prediction(memory_mib=39000, unenforced_mib=50000)
NO_MPS = [device(modes=[ALONE, TURNS])]
"""One A100 without MPS, of 40,960 MiB."""
MIG_NODE = gpu_node("a", [device(modes=[ALONE, TURNS, MPS, MIG], mig_profiles=["1g.5gb", "7g.40gb"])])
CLUSTER = {"tenancy": Tenancy.CLUSTER}


def evaluated(*nodes, config=RULES, peaks=True, user=None, **wants):
    request = PodRequest(demand(**wants), may_use_measured_peak=peaks, user=user)
    return evaluate(cluster(*nodes), request, config)


def placed(node, **wants):
    """The placement, or the refusal."""
    return place_on_node(evaluated(node, **wants), "a")


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {"prediction": None}, (MPS, True), id="nothing is known"),
        pytest.param(gpu_node(), {"prediction": UNMEASURED}, (MPS, True), id="nothing was measured"),
        pytest.param(gpu_node(), {"prediction": LOST}, (ALONE, False), id="it died of memory before"),
        pytest.param(gpu_node(), {}, (MPS, True), id="first run"),
        pytest.param(gpu_node(), {"prediction": prediction(learned_runs=1)}, (MPS, False), id="second run"),
        pytest.param(gpu_node(), {"memory_limit_mib": 9000}, (MPS, False), id="limit of the user"),
        pytest.param(gpu_node(), {"mode": RequestedMode.EXCLUSIVE, "prediction": None}, (ALONE, False), id="Exclusive"),
        pytest.param(
            gpu_node(), {"mode": RequestedMode.TIME_SLICING, "prediction": None}, (TURNS, True), id="TimeSlicing"
        ),
        pytest.param(gpu_node("a", 2), {"gpus": 2, "prediction": None}, (TURNS, True), id="several GPUs"),
        pytest.param(gpu_node("a", NO_MPS), {"prediction": None}, (TURNS, True), id="no MPS"),
        pytest.param(gpu_node("a", [device(modes=[ALONE])]), {"prediction": None}, (ALONE, False), id="no sharing"),
        pytest.param(MIG_NODE, CLUSTER | {"prediction": UNMEASURED}, (MPS, True), id="other namespaces, unmeasured"),
        pytest.param(MIG_NODE, CLUSTER | {"prediction": prediction(sm=0.1)}, (MIG, False), id="other namespaces"),
        pytest.param(gpu_node(), {"prediction": None, "peaks": False}, (ALONE, False), id="the site counts no peaks"),
        pytest.param(
            gpu_node(),
            {"prediction": None, "config": SchedulerConfig(find_policy("exclusive"), slots=8)},
            (ALONE, False),
            id="policy exclusive",
        ),
    ],
)
def test_job_whose_bound_may_be_replaced_gets_a_mode_that_others_can_join(node, wants, expected):
    found = placed(node, **wants)
    assert (found.mode, found.tenant.provisional) == expected


def test_job_without_a_bound_has_no_limit():
    found = placed(gpu_node(), prediction=UNMEASURED)
    assert (found.memory_limit_mib, found.thread_percentage, found.tenant.memory_mib) == (None, 100, None)
    assert "MPS so that others can join it later: too little was measured on such GPUs" in found.reason


def provisional(measured_mib=None, **has):
    """A tenant that counts with the whole GPU until its peak was measured."""
    found = tenant("x", ["GPU-a-0"], MPS, prediction=None, **has)
    return structs.replace(found, tenant=structs.replace(found.tenant, provisional=True, measured_mib=measured_mib))


@pytest.mark.parametrize(
    ("held", "wants", "refused"),
    [
        pytest.param(
            provisional(), {}, "needs 4,000 MiB; freest NVIDIA A100-SXM4-40GB has 0 MiB free", id="unmeasured"
        ),
        pytest.param(provisional(30000), {}, None, id="measured"),
        pytest.param(
            provisional(30000), {"prediction": prediction(memory_mib=11000)}, "has 10,960 MiB free", id="large"
        ),
        pytest.param(provisional(30000), {"prediction": None}, "in use, and the job must be alone", id="unknown"),
        pytest.param(
            provisional(30000, namespace="other"), CLUSTER, "server belongs to namespace other", id="namespace"
        ),
        pytest.param(provisional(30000, user=1), {"user": 2}, "serves user 1", id="another user"),
    ],
)
def test_measured_peak_lets_others_join(held, wants, refused):
    found = placed(gpu_node("a", 1, [held]), **wants)
    if refused is None:
        assert (found.mode, found.memory_limit_mib) == (MPS, 4000)
    else:
        assert refused in found


BY_TURNS = gpu_node("a", 1, [tenant("x", ["GPU-a-0"], TURNS)])


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {}, 4080, id="MPS"),
        pytest.param(gpu_node("a", NO_MPS), {}, 5200, id="no MPS"),
        pytest.param(gpu_node(), {"mode": RequestedMode.TIME_SLICING}, 5200, id="TimeSlicing"),
        pytest.param(BY_TURNS, {}, 5200, id="tenants by time-slicing"),
        pytest.param(gpu_node("a", 1, [tenant("x", ["GPU-a-0"], MPS)]), {}, 4080, id="tenants with limits"),
        pytest.param(gpu_node("a", 2), {"gpus": 2}, 5200, id="several GPUs share by time-slicing only"),
        pytest.param(gpu_node(), {"mode": RequestedMode.EXCLUSIVE}, 4080, id="Exclusive"),
        pytest.param(gpu_node("a", NO_MPS), {"memory_limit_mib": 4500}, 4500, id="limit of the user"),
        pytest.param(gpu_node("a", NO_MPS), {"prediction": prediction()}, 4000, id="it ran before"),
        pytest.param(gpu_node("a", NO_MPS), {"prediction": WIDE}, 40960, id="no more than the GPU has"),
        pytest.param(
            gpu_node("a", [device(i, "a", reserved_mib=mib) for i, mib in enumerate((500, 900))]),
            {"gpus": 2, "prediction": prediction(memory_mib=38000, unenforced_mib=49400)},
            40060,
            id="of GPUs of different size the smallest counts: one reservation has one number",
        ),
    ],
)
def test_first_run_counts_with_more_memory_by_time_slicing(node, wants, expected):
    assert placed(node, **({"prediction": FIRST_RUN} | wants)).tenant.memory_mib == expected


def test_limit_is_the_bound_and_not_the_larger_amount():
    found = placed(gpu_node(), prediction=FIRST_RUN)
    assert (found.mode, found.memory_limit_mib) == (MPS, 4080)


def test_larger_amount_of_a_first_run_is_checked_and_named():
    held = tenant("x", ["GPU-a-0"], TURNS, prediction=prediction(memory_mib=36000))
    node = gpu_node("a", 1, [held])
    refusal = placed(node, prediction=FIRST_RUN, max_slowdown=9)
    assert "needs 5,200 MiB; freest NVIDIA A100-SXM4-40GB has 4,960 MiB free" in refusal
    assert "needs 40,960 MiB" in placed(gpu_node("a", NO_MPS, [held]), prediction=WIDE)
    exact = placed(node, prediction=prediction(memory_mib=3900, unenforced_mib=4960), max_slowdown=9)
    assert exact.tenant.memory_mib == 4960
    why = "its first run counts with 5,200 MiB, because time-slicing enforces no limit"
    assert why in placed(gpu_node("a", NO_MPS), prediction=FIRST_RUN).reason
    assert "time-slicing" not in placed(gpu_node(), prediction=FIRST_RUN).reason


def test_explanation_names_the_first_run_and_the_refusal_the_gpu_that_lacks_least():
    by_turns = gpu_node("a", NO_MPS, [tenant("x", ["GPU-a-0"], TURNS, prediction=prediction(memory_mib=36000))])
    limited = gpu_node("b", 1, [tenant("y", ["GPU-b-0"], MPS, prediction=prediction(memory_mib=36881))])
    evaluation = evaluated(by_turns, limited, prediction=FIRST_RUN, max_slowdown=9).evaluation
    first, second = (explain_gpu(evaluation, row) for row in (0, 1))
    assert "needs 5,200 MiB for a first run by time-slicing, has 4,960 MiB free (240 MiB short)" in first
    assert "needs 4,080 MiB, has 4,079 MiB free (1 MiB short)" in second
    message = summary(evaluation, np.array([0, 1]))
    assert "needs 4,080 MiB; another NVIDIA A100-SXM4-40GB has 4,079 MiB free" in message


def test_simulated_predictions_keep_the_bounds_of_a_first_run():
    strategy = Strategy("x", "least-slowdown", Knowledge.PREDICTED, TURNS)
    information = InformationModel(strategy, usable_mib=40960)
    memory = (
        information.pod_request(replace(job("a"), prediction=FIRST_RUN), Stage()).demand.prediction.products[0].memory
    )
    assert (memory.upper_mib, memory.upper_unenforced_mib) == (4080, 5200)
