"""The check that fails on a GPU, and the mode and limits that a pod gets where all pass."""

import msgspec
import numpy as np
import pytest
from carpool_core.resources.prediction import Interval
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode, Tenancy
from carpool_extender.framework.filters import (
    CHECKS,
    HEALTH,
    MEMORY,
    MODE,
    PASSED,
    SLOTS,
    SLOWDOWN,
    SUITABILITY,
    TENANCY,
)
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import place_on_node
from carpool_extender.testing import T4, cluster, device, gpu_node, pod_request, prediction, tenant
from evaluations import RULES, evaluate

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
GPU = "GPU-a-0"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}
NO_MPS = [ALONE, TURNS]
CLUSTER = {"tenancy": Tenancy.CLUSTER}


def evaluated(node, config=RULES, **wants):
    return evaluate(node, pod_request(**wants), config)


def placed(node, config=RULES, **wants):
    return place_on_node(evaluated(node, config, **wants), "a")


def used(mode=MPS, **has):
    """A node of one GPU with a tenant."""
    return gpu_node("a", 1, [tenant("x", [GPU], mode, **has)])


CASES = [
    pytest.param(gpu_node(), {}, None, MPS, id="idle"),
    pytest.param(gpu_node(), {"prediction": None}, None, ALONE, id="unknown job"),
    pytest.param(gpu_node(), {"prediction": prediction(products=[T4])}, None, ALONE, id="unknown on this product"),
    pytest.param(gpu_node(), {"prediction": None, "memory_limit_mib": 9000}, None, MPS, id="limit of the user"),
    pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, None, TURNS, id="no MPS"),
    pytest.param(used(), {}, None, MPS, id="MPS beside MPS"),
    pytest.param(gpu_node("a", 2), {"gpus": 2}, None, TURNS, id="several GPUs: a process reaches one MPS daemon"),
    pytest.param(used(), {"gpus": 2}, MODE, None, id="several GPUs beside MPS"),
    pytest.param(used(TURNS), {}, None, TURNS, id="time-slicing beside time-slicing"),
    pytest.param(used(ALONE), {}, MODE, None, id="exclusive tenant"),
    pytest.param(used(), {"prediction": None}, MODE, None, id="unknown job beside a tenant"),
    pytest.param(used(), {"mode": RequestedMode.TIME_SLICING}, MODE, None, id="time-slicing beside MPS"),
    pytest.param(used(), {"mode": RequestedMode.EXCLUSIVE}, MODE, None, id="exclusive beside a tenant"),
    pytest.param(gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)]), {}, HEALTH, None, id="an unhealthy GPU"),
    pytest.param(gpu_node(), {"product": "T4"}, SUITABILITY, None, id="the wrong product"),
    pytest.param(used(namespace="other"), {}, TENANCY, None, id="another namespace"),
    pytest.param(used(TURNS, namespace="other", **CLUSTER), {}, TENANCY, None, id="the pod keeps to its namespace"),
    pytest.param(used(TURNS, namespace="other"), CLUSTER, TENANCY, None, id="the tenant keeps to its namespace"),
    pytest.param(
        used(TURNS, namespace="other", **CLUSTER), CLUSTER, None, TURNS, id="both share with other namespaces"
    ),
    pytest.param(
        used(MPS, namespace="other", **CLUSTER), CLUSTER, TENANCY, None, id="one MPS server for two namespaces"
    ),
    pytest.param(used(namespace="other", tenancy_group="g"), {"tenancy_group": "g"}, None, MPS, id="one tenancy group"),
    pytest.param(used(namespace="other", tenancy_group="g"), {}, TENANCY, None, id="only the tenant has a group"),
    pytest.param(used(tenancy_group="g"), {"tenancy_group": "h"}, TENANCY, None, id="another tenancy group"),
    pytest.param(used(namespace="g"), {"tenancy_group": "g"}, TENANCY, None, id="a namespace called like a group"),
    pytest.param(
        gpu_node("a", 1, [tenant(f"t{i}", [GPU], memory_limit_mib=1) for i in range(8)]), {}, SLOTS, None, id="slots"
    ),
    pytest.param(used(memory_limit_mib=37000), {}, MEMORY, None, id="memory is taken"),
    pytest.param(used(memory_limit_mib=36960), {}, None, MPS, id="memory fits exactly"),
    pytest.param(gpu_node("a", [device(reserved_mib=1)], [tenant("x", [GPU], memory_limit_mib=36960)]), {}, MEMORY,
                 None, id="reserved memory"),
    pytest.param(
        used(TURNS, prediction=None), {"mode": RequestedMode.TIME_SLICING}, MEMORY, None, id="tenant of unknown memory"
    ),
    pytest.param(used(**BUSY), BUSY, SLOWDOWN, None, id="both are too busy"),
    pytest.param(used(**BUSY, max_slowdown=1.1), {"max_slowdown": 10.0}, SLOWDOWN, None, id="limit of the tenant"),
    pytest.param(used(**BUSY, max_slowdown=10.0), BUSY | {"max_slowdown": 2.0}, None, MPS, id="both accept it"),
]  # fmt: skip


@pytest.mark.parametrize(("node", "wants", "failed", "mode"), CASES)
def test_first_failing_check_or_the_mode(node, wants, failed, mode):
    found = evaluated(node, **wants).evaluation
    assert found.ok[0] == (failed is None)
    assert found.results.failed[0] == (PASSED if failed is None else failed.number)
    if failed is not None:
        assert failed.margin(found, np.array([0]))[0] < 0
    else:
        assert all(check.margin(found, np.array([0]))[0] >= -1e-6 for check in CHECKS)
        chosen = placed(node, **wants)
        assert chosen.mode is mode
        assert chosen.gpu_uuids[0] == GPU
        assert len(chosen.gpu_uuids) == wants.get("gpus", 1)


def test_first_mps_tenant_gets_all_threads_and_later_ones_their_share():
    first, later = placed(gpu_node()), placed(used())
    assert (first.memory_limit_mib, first.thread_percentage) == (4000, 100)
    assert (later.memory_limit_mib, later.thread_percentage) == (4000, 60)  # 0.3 of the SMs in half of the time


@pytest.mark.parametrize(
    ("util", "sm", "expected"), [(100, 0.3, 30), (100, 0.301, 35), (50, 0.3, 60), (10, 0.3, 100), (100, 0.0, 5)]
)
def test_thread_percentage_is_never_below_the_prediction(util, sm, expected):
    facts = pod_request(prediction=prediction(util=util, sm=sm)).requirements(cluster(gpu_node()).snapshot().classes[0])
    assert facts.thread_percentage == expected


def test_thread_percentage_uses_the_upper_bound():
    found = prediction(util=100, sm=0.3)
    wide = msgspec.structs.replace(
        found.products[0].activity,
        sm_active_ratio=Interval(median=0.3, lower=0.2, upper=0.45),
        gpu_util_percent=Interval(median=100, lower=90, upper=100),
    )
    one = msgspec.structs.replace(found.products[0], activity=wide)
    facts = pod_request(prediction=msgspec.structs.replace(found, products=[one])).requirements(
        cluster(gpu_node()).snapshot().classes[0]
    )
    assert facts.thread_percentage == 50


@pytest.mark.parametrize("mode", [RequestedMode.TIME_SLICING, RequestedMode.EXCLUSIVE])
def test_modes_that_enforce_no_limits_get_none(mode):
    chosen = placed(gpu_node(), mode=mode)
    assert (chosen.memory_limit_mib, chosen.thread_percentage) == (None, None)


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {}, "MPS as memory is limited and kernels run side by side", id="MPS"),
        pytest.param(gpu_node(), {"mode": RequestedMode.TIME_SLICING}, "TimeSlicing as the job asks", id="asked for"),
        pytest.param(gpu_node(), {"config": SchedulerConfig(find_policy("exclusive"), slots=8)},
                     "Exclusive as the policy gives every job a GPU of its own", id="policy"),
        pytest.param(used(TURNS), {}, "TimeSlicing as its tenants have it", id="tenants"),
        pytest.param(gpu_node(), {"prediction": None},
                     "Exclusive as nothing is known of its memory, so it counts with the whole GPU", id="unknown"),
        pytest.param(
            gpu_node(),
            {"prediction": prediction(trusted=False), "mode": RequestedMode.TIME_SLICING},
            "too little was measured on such GPUs to rely on its prediction, so it counts with the whole GPU",
            id="untrusted, and the mode is asked for",
        ),
        pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, "TimeSlicing as the device has no MPS", id="no MPS"),
        pytest.param(
            gpu_node("a", [device(modes=[ALONE])]), {}, "Exclusive as the device supports no sharing", id="no sharing"
        ),
        pytest.param(gpu_node("a", 2), {"gpus": 2},
                     "TimeSlicing as a process of several GPUs reaches only one MPS daemon", id="several GPUs"),
    ],
)  # fmt: skip
def test_reason_names_the_cause_of_the_mode(node, wants, expected):
    assert expected in placed(node, **wants).reason.split("; ")


def test_idle_gpu_that_is_in_the_mode_already_comes_first():
    node = gpu_node("a", [device(0, mode=TURNS), device(1, mode=MPS), device(2, mode=TURNS)])
    assert placed(node).gpu_uuids == ["GPU-a-1"]
    assert placed(node, mode=RequestedMode.TIME_SLICING, gpus=2).gpu_uuids == ["GPU-a-0", "GPU-a-2"]
