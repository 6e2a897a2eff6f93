"""Measurements of agents replace predictions; promised memory is never taken back."""

import msgspec
import pytest
from carpool_core.resources.node import Tenant
from carpool_core.values import GpuUuid, PodUid, SharingMode, Tenancy
from carpool_extender.cache.gpu_table import usage_of
from carpool_extender.testing import cluster, gpu_node, prediction, tenant

GPU = "GPU-a-0"


def seen(name, **measures):
    return Tenant(**({"pod_uid": PodUid(f"pod-{name}"), "gpu_uuid": GpuUuid(GPU), "settled": True} | measures))


def node(*reservations, tenants=()):
    made = gpu_node("a", 1, reservations)
    return msgspec.structs.replace(made, status=msgspec.structs.replace(made.status, tenants=list(tenants)))


def columns(*nodes):
    found = cluster(*nodes).snapshot().gpus
    return float(found.util[0, 0]), float(found.sm[0, 0]), int(found.memory_mib[0, 0])


PREDICTED = {"prediction": prediction(memory_mib=4000, util=90, sm=0.8)}


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        pytest.param({"gpu_util_percent": 30.0, "sm_active_ratio": 0.2}, (0.3, 0.2, 4000), id="activity"),
        pytest.param({"gpu_util_percent": -1e308, "sm_active_ratio": -3.0}, (0, 0, 4000), id="negative activity"),
        pytest.param({"gpu_util_percent": 1e308, "sm_active_ratio": 3.0}, (1, 1, 4000), id="activity above one"),
        pytest.param({"memory_mib": 100, "peak_memory_mib": 200}, (0.9, 0.8, 4000), id="less memory than promised"),
        pytest.param({"peak_memory_mib": 6000}, (0.9, 0.8, 6000), id="more memory than promised"),
        pytest.param({"sm_active_ratio": 0.1, "settled": False}, (0.9, 0.8, 4000), id="activity of a young tenant"),
        pytest.param({"peak_memory_mib": 39_000, "settled": False}, (0.9, 0.8, 39_000), id="memory of a young tenant"),
        pytest.param({"sm_active_ratio": 0.1, "name": "other"}, (0.9, 0.8, 4000), id="of no reservation"),
    ],
)
def test_a_measure_beats_the_prediction(measure, expected):
    reported = node(tenant("x", [GPU], **PREDICTED), tenants=[seen(**{"name": "x", **measure})])
    assert columns(reported) == pytest.approx(expected)


def test_capacity_is_freed_when_a_measurement_settles():
    mine, young = tenant("x", [GPU], **PREDICTED), seen("x", sm_active_ratio=0.1, settled=False)
    gpus = cluster(node(mine, tenants=[young]))
    before = gpus.freed_at
    gpus.apply(node(mine, tenants=[seen("x", sm_active_ratio=0.1)]))
    assert gpus.freed_at > before


def test_a_measure_beside_neighbours_is_stretched_to_what_it_would_be_alone():
    busy = prediction(util=100, sm=1.0)
    both = [tenant(name, [GPU], SharingMode.TIME_SLICING, prediction=busy) for name in "xy"]
    found = usage_of(both, [seen("x", gpu_util_percent=50.0, sm_active_ratio=0.5), None])
    assert found[0].util == found[0].sm == pytest.approx(1.0)
    assert found[1].util == 1.0


@pytest.mark.parametrize(
    ("mode", "seen_util", "seen_sm", "lowers"),
    [
        pytest.param(SharingMode.TIME_SLICING, 40.0, 0.1, False, id="of its time, no tenant accepts less"),
        pytest.param(SharingMode.MPS, 10.0, 0.4, False, id="of its SMs, likewise"),
        pytest.param(SharingMode.TIME_SLICING, 39.0, 0.1, True, id="there is time left: as measured"),
    ],
)
def test_where_a_gpu_is_used_up_a_measure_lowers_nothing(mode, seen_util, seen_sm, lowers):
    both = [tenant(name, [GPU], mode, **PREDICTED) for name in "xy"]
    measured = [seen(name, gpu_util_percent=seen_util, sm_active_ratio=seen_sm) for name in "xy"]
    for one in usage_of(both, measured):
        assert (one.util < 0.9) is lowers
        assert (one.sm < 0.8) is lowers


@pytest.mark.parametrize(
    ("tenancy", "solo_s", "util"),
    [
        pytest.param(Tenancy.NAMESPACE, 0.1, 0.75, id="its own slowdown, not the predicted one"),
        pytest.param(Tenancy.NAMESPACE, 0.2, 0.5, id="steps shorter than alone are no speed-up"),
        pytest.param(Tenancy.NAMESPACE, None, 0.9, id="never alone: as predicted"),
        pytest.param(Tenancy.CLUSTER, 0.1, 0.9, id="among namespaces a report lowers nothing"),
        pytest.param(Tenancy.CLUSTER, 0.05, 1.0, id="among namespaces it raises"),
    ],
)
def test_a_measured_slowdown_gives_the_activity_alone(tenancy, solo_s, util):
    both = [tenant(name, [GPU], SharingMode.TIME_SLICING, tenancy=tenancy, **PREDICTED) for name in "xy"]
    steps = {"step_time_seconds": 0.15, "solo_step_time_seconds": solo_s}
    measured = [seen("x", gpu_util_percent=50.0, **steps), seen("y", gpu_util_percent=50.0)]
    assert usage_of(both, measured)[0].util == pytest.approx(util)


def test_among_namespaces_a_report_lowers_no_co_tenant():
    both = [tenant(name, [GPU], tenancy=Tenancy.CLUSTER, **PREDICTED) for name in "xy"]
    slow = {"step_time_seconds": 0.3, "solo_step_time_seconds": 0.1}
    found = usage_of(both, [seen("x", gpu_util_percent=50.0, **slow), seen("y", gpu_util_percent=50.0)])
    assert found[1].util == pytest.approx(0.9)


@pytest.mark.parametrize("mode", [SharingMode.TIME_SLICING, SharingMode.MPS])
def test_a_neighbour_that_is_not_measured_yet_leaves_measures_as_they_are(mode):
    """It counts with what is left of its promise beside the others: with the whole of it the GPU would seem used up."""
    busy = prediction(memory_mib=4000, util=60, sm=0.6)
    both = [tenant("x", [GPU], mode, **PREDICTED), tenant("y", [GPU], mode, prediction=busy)]
    measured = [seen("x", gpu_util_percent=30.0, sm_active_ratio=0.25), None]
    known = usage_of(both, measured)[0]
    assert known.util < 0.6
    assert known.sm < 0.6


def test_where_a_gpu_is_used_up_a_measure_still_raises():
    idle = prediction(util=20, sm=0.1)
    both = [tenant(name, [GPU], SharingMode.TIME_SLICING, prediction=idle) for name in "xy"]
    measured = [seen(name, gpu_util_percent=50.0, sm_active_ratio=0.3) for name in "xy"]
    for one in usage_of(both, measured):
        assert one.util >= 0.5
        assert one.sm >= 0.3
