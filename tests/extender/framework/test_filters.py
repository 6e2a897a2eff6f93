"""Which check fails on a GPU, which mode it gets, and with which limits."""

import msgspec
import numpy as np
import pytest
from carpool_core.resources.prediction import Interval
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode, Tenancy
from carpool_extender.framework.evaluation_cache import CachedEvaluation
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

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
GPU = "GPU-a-0"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}
NO_MPS = [ALONE, TURNS]


def verdict_on(node, slots=8, **changes):
    rules = SchedulerConfig(find_policy("least-slowdown"), slots)
    return CachedEvaluation(pod_request(**changes), rules, cluster(node).snapshot()).evaluation


CASES = [
    pytest.param(gpu_node(), {}, None, MPS, id="an idle GPU takes a known job by MPS"),
    pytest.param(gpu_node(), {"prediction": None}, None, ALONE, id="an unknown job gets the whole GPU"),
    pytest.param(
        gpu_node(),
        {"prediction": prediction(products=[T4])},
        None,
        ALONE,
        id="a job that is unknown on this product gets the whole GPU",
    ),
    pytest.param(
        gpu_node(), {"prediction": None, "memory_limit_mib": 9000}, None, MPS, id="the user's own limit is known"
    ),
    pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, None, TURNS, id="turns where the device cannot do better"),
    pytest.param(gpu_node("a", [device(modes=[ALONE])]), {}, None, ALONE, id="alone where the device can do nothing"),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU])]), {}, None, MPS, id="MPS beside MPS"),
    pytest.param(
        gpu_node("a", 2), {"gpus": 2}, None, TURNS, id="a process of several GPUs reaches only one MPS daemon"
    ),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU])]), {"gpus": 2}, MODE, None, id="nor does it join others by MPS"),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], TURNS)]), {}, None, TURNS, id="turns beside turns"),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], ALONE)]), {}, MODE, None, id="nobody beside an exclusive tenant"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"prediction": None},
        MODE,
        None,
        id="an unknown job beside nobody",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"mode": RequestedMode.TIME_SLICING},
        MODE,
        None,
        id="no turns beside MPS",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"mode": RequestedMode.EXCLUSIVE},
        MODE,
        None,
        id="no exclusive use beside a tenant",
    ),
    pytest.param(gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)]), {}, HEALTH, None, id="an unhealthy GPU"),
    pytest.param(gpu_node(), {"product": "T4"}, SUITABILITY, None, id="the wrong product"),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], namespace="other")]), {}, TENANCY, None, id="another namespace"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {},
        TENANCY,
        None,
        id="the newcomer keeps to its namespace",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other")]),
        {"tenancy": Tenancy.CLUSTER},
        TENANCY,
        None,
        id="the neighbour keeps to its namespace",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {"tenancy": Tenancy.CLUSTER},
        None,
        TURNS,
        id="both are willing",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], MPS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {"tenancy": Tenancy.CLUSTER},
        TENANCY,
        None,
        id="never one MPS server for two namespaces",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant(f"t{i}", [GPU], memory_limit_mib=1) for i in range(8)]),
        {},
        SLOTS,
        None,
        id="all places taken",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], memory_limit_mib=37000)]), {}, MEMORY, None, id="memory is taken"
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], memory_limit_mib=36960)]), {}, None, MPS, id="memory fits exactly"
    ),
    pytest.param(
        gpu_node("a", [device(reserved_mib=1)], [tenant("x", [GPU], memory_limit_mib=36960)]),
        {},
        MEMORY,
        None,
        id="the reserve is nobody's",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, prediction=None)]),
        {"mode": RequestedMode.TIME_SLICING},
        MEMORY,
        None,
        id="a neighbour of unknown memory holds the whole GPU",
    ),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], **BUSY)]), BUSY, SLOWDOWN, None, id="both are too busy"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], **BUSY, max_slowdown=1.1)]),
        {"max_slowdown": 10.0},
        SLOWDOWN,
        None,
        id="the neighbour's own limit counts",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], **BUSY, max_slowdown=10.0)]),
        BUSY | {"max_slowdown": 2.0},
        None,
        MPS,
        id="both accept it",
    ),
]


@pytest.mark.parametrize(("node", "wants", "failed", "mode"), CASES)
def test_checks(node, wants, failed, mode):
    found = verdict_on(node, **wants)
    assert found.ok[0] == (failed is None)
    assert found.results.failed[0] == (PASSED if failed is None else failed.number)
    if failed is not None:
        assert failed.margin(found, np.array([0]))[0] < 0
    else:
        assert all(check.margin(found, np.array([0]))[0] >= -1e-6 for check in CHECKS)
        chosen = place_on_node(CachedEvaluation(found.pod_request, RULES, found.snapshot), "a")
        assert chosen.mode is mode
        assert chosen.gpu_uuids[0] == GPU
        assert len(chosen.gpu_uuids) == wants.get("gpus", 1)


def test_an_mps_newcomer_is_held_to_what_it_fills_and_the_first_is_not():
    first = place_on_node(CachedEvaluation(pod_request(), RULES, cluster(gpu_node()).snapshot()), "a")
    later = place_on_node(
        CachedEvaluation(pod_request(), RULES, cluster(gpu_node("a", 1, [tenant("x", [GPU])])).snapshot()), "a"
    )
    assert (first.memory_limit_mib, first.thread_percentage) == (4000, 100)
    assert (later.memory_limit_mib, later.thread_percentage) == (4000, 60)  # 0.3 of the SMs in half of the time


@pytest.mark.parametrize(
    ("util", "sm", "expected"), [(100, 0.3, 30), (100, 0.301, 35), (50, 0.3, 60), (10, 0.3, 100), (100, 0.0, 5)]
)
def test_thread_percentage_is_never_below_the_prediction(util, sm, expected):
    facts = pod_request(prediction=prediction(util=util, sm=sm)).requirements(cluster(gpu_node()).snapshot().classes[0])
    assert facts.thread_percentage == expected


def test_thread_percentage_counts_with_what_is_hardly_exceeded():
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
def test_no_limits_where_nothing_enforces_them(mode):
    chosen = place_on_node(CachedEvaluation(pod_request(mode=mode), RULES, cluster(gpu_node()).snapshot()), "a")
    assert (chosen.memory_limit_mib, chosen.thread_percentage) == (None, None)


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {}, "MPS as memory is limited and kernels run side by side", id="MPS"),
        pytest.param(gpu_node(), {"mode": RequestedMode.TIME_SLICING}, "TimeSlicing as the job asks", id="asked for"),
        pytest.param(
            gpu_node("a", 1, [tenant("x", [GPU], TURNS)]), {}, "TimeSlicing as its tenants have it", id="there"
        ),
        pytest.param(
            gpu_node(),
            {"prediction": None},
            "Exclusive as nothing is known of its memory, so it counts with the whole GPU",
            id="unknown",
        ),
        pytest.param(
            gpu_node(),
            {"prediction": prediction(trusted=False)},
            "Exclusive as too little was measured on such GPUs to rely on its prediction, so it counts with the whole "
            "GPU",
            id="not relied on",
        ),
        pytest.param(
            gpu_node(),
            {"prediction": prediction(trusted=False), "mode": RequestedMode.TIME_SLICING},
            "too little was measured on such GPUs to rely on its prediction, so it counts with the whole GPU",
            id="not relied on, and the mode is asked for",
        ),
        pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, "TimeSlicing as the device has no MPS", id="no MPS"),
        pytest.param(
            gpu_node("a", [device(modes=[ALONE])]), {}, "Exclusive as the device supports no sharing", id="nothing else"
        ),
        pytest.param(
            gpu_node("a", 2),
            {"gpus": 2},
            "TimeSlicing as a process of several GPUs reaches only one MPS daemon",
            id="several GPUs",
        ),
    ],
)
def test_the_reason_says_why_this_mode(node, wants, expected):
    assert expected in place_on_node(
        CachedEvaluation(pod_request(**wants), RULES, cluster(node).snapshot()), "a"
    ).reason.split("; ")


def test_the_reason_says_that_the_policy_wants_every_job_alone():
    chosen = place_on_node(
        CachedEvaluation(
            pod_request(), SchedulerConfig(find_policy("exclusive"), slots=8), cluster(gpu_node()).snapshot()
        ),
        "a",
    )
    assert "Exclusive as the policy gives every job a GPU of its own" in chosen.reason


def test_an_idle_gpu_that_is_in_the_mode_already_is_taken_before_one_that_has_to_change():
    node = gpu_node("a", [device(0, mode=TURNS), device(1, mode=MPS), device(2, mode=TURNS)])
    known = cluster(node)
    assert place_on_node(CachedEvaluation(pod_request(), RULES, known.snapshot()), "a").gpu_uuids == ["GPU-a-1"]
    slicing = pod_request(mode=RequestedMode.TIME_SLICING, gpus=2)
    assert place_on_node(CachedEvaluation(slicing, RULES, known.snapshot()), "a").gpu_uuids == ["GPU-a-0", "GPU-a-2"]
