"""From counters to measures."""

import math

import pytest
from carpool_core.resources.node import Tenant
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.controller.meter import Meter, Rates, worth_writing
from carpool_deviceplugin.devices.gpu import ProcessUse, Reading
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

GPU, A, B = GpuUuid("GPU-1"), PodUid("uid-a"), PodUid("uid-b")


def process(pod: PodUid = A, name: str = "p1", **more) -> ProcessUse:
    zero = {"busy_s": 0.0, "sm_s": 0.0, "dram_s": 0.0, "energy_j": 0.0, "steps": 0, "steps_s": 0.0}
    return ProcessUse(
        **{"id": name, "pod_uid": pod, "started": 0.0, "memory_mib": 100, "peak_memory_mib": 100, **zero, **more}
    )


def reading(at: float, *processes: ProcessUse) -> Reading:
    return Reading(at, processes, power_w=100.0, idle_power_w=50.0, power_limit_w=400.0, energy_j=0.0)


def test_rates_over_a_window() -> None:
    meter = Meter(GPU)
    meter.sample(reading(10, process(busy_s=5, steps=3, steps_s=1)))
    assert meter.tenants()[0].gpu_util_percent is None, "one sample says nothing about a rate"
    used = process(busy_s=5.8, sm_s=0.4, dram_s=0.2, energy_j=100, steps=5, steps_s=2, peak_memory_mib=700)
    meter.sample(reading(11, used))
    (tenant,) = meter.tenants()
    assert tenant.gpu_util_percent == pytest.approx(80)
    assert tenant.sm_active_ratio == pytest.approx(0.4)
    assert tenant.power_w == pytest.approx(150)
    assert tenant.step_time_seconds == pytest.approx(0.5)
    assert (tenant.memory_mib, tenant.peak_memory_mib) == (100, 700)


def test_processes_of_a_pod_add_up_and_an_ended_one_is_remembered_by_its_peak() -> None:
    meter = Meter(GPU)
    meter.sample(reading(0, process(), process(name="p2", memory_mib=300, peak_memory_mib=300), process(B, "p3")))
    meter.sample(reading(1, process()))
    a, b = meter.tenants()
    assert (a.memory_mib, a.peak_memory_mib) == (100, 400)
    assert (b.memory_mib, b.peak_memory_mib) == (0, 100)
    meter.keep({A})
    assert [t.pod_uid for t in meter.tenants()] == [A]


def test_work_shows_in_full_soon_after_it_begins() -> None:
    """Half of a window before the work and a long average would show a short job at half its utilization."""
    meter = Meter(GPU)
    meter.sample(reading(0, process()))
    meter.sample(reading(1, process()))
    meter.sample(reading(2, process(busy_s=0.1)))
    for second in range(3, 6):
        meter.sample(reading(second, process(busy_s=0.1 + 0.8 * (second - 2))))
        assert meter.tenants()[0].gpu_util_percent == pytest.approx(80)


def test_others_are_admitted_by_a_mean_over_a_minute_and_a_half() -> None:
    """An evaluation or a checkpoint of some seconds is not taken for a GPU that has room."""
    meter = Meter(GPU)
    for second in range(121):
        meter.sample(reading(second, process(busy_s=0.8 * second, sm_s=0.5 * second)))
    for second in range(121, 136):  # nothing for 15 s
        meter.sample(reading(second, process(busy_s=96, sm_s=60)))
    (tenant,) = meter.tenants()
    assert tenant.gpu_util_percent == pytest.approx(80 * math.exp(-15 / 90), rel=0.02)
    assert tenant.sm_active_ratio == pytest.approx(0.5 * math.exp(-15 / 90), rel=0.02)
    rates = meter.uses[A].rates
    assert rates is not None
    assert rates.busy == pytest.approx(0.8 * math.exp(-15 / 5), rel=0.02), "metrics tell at once"


def test_what_was_done_beside_former_neighbours_is_soon_forgotten() -> None:
    meter, worked = Meter(GPU), 0.0
    for second in range(200):
        worked += 0.4 if second < 150 else 0.8
        beside = [process(B, "p2", busy_s=0.4 * second)] if second < 150 else []
        meter.sample(reading(second, process(busy_s=worked), *beside))
    a, _ = meter.tenants()
    assert a.gpu_util_percent == pytest.approx(80, rel=0.06), "and not 56, as 50 s into the exponential average"


def test_a_pause_when_a_neighbour_leaves_is_not_taken_for_idleness() -> None:
    meter = Meter(GPU)
    for second in range(150):
        meter.sample(reading(second, process(busy_s=0.8 * second), process(B, "p2")))
    for second in range(150, 153):
        meter.sample(reading(second, process(busy_s=0.8 * 149)))
    a, _ = meter.tenants()
    assert a.gpu_util_percent is not None
    assert a.gpu_util_percent > 40


def test_a_process_that_ends_and_begins_anew_is_no_new_neighbour_of_itself() -> None:
    """Regression: an evaluation in a process of its own looked like a GPU that has room."""
    meter = Meter(GPU)
    for second in range(121):
        meter.sample(reading(second, process(busy_s=0.8 * second)))
    meter.sample(reading(121))
    for second in range(122, 132):
        meter.sample(reading(second, process(name="p2", started=121.5)))
    (tenant,) = meter.tenants()
    assert tenant.gpu_util_percent == pytest.approx(80 * math.exp(-9.5 / 90), rel=0.02)


@pytest.mark.parametrize("step_s", [1, 5])
def test_who_pauses_is_told_not_to_work_long_before_the_mean_says_so(step_s: int) -> None:
    """Regression: a peak of loading stood still while nothing ran, and others were admitted by it."""
    meter = Meter(GPU)
    for second in range(0, 61, step_s):
        meter.sample(reading(second, process(busy_s=0.8 * second)))
    assert [one.working for one in meter.tenants()] == [True]
    for second in range(60 + step_s, 91, step_s):
        meter.sample(reading(second, process(busy_s=0.8 * 60)))
    (tenant,) = meter.tenants()
    assert tenant.working is False
    assert tenant.gpu_util_percent is not None
    assert tenant.gpu_util_percent > 40
    told = replace(tenant, working=True)
    assert worth_writing([told], [tenant]) == [tenant], "a change that is written at once"


def test_process_that_began_between_two_samples_is_measured_since_it_began() -> None:
    meter = Meter(GPU)
    meter.sample(reading(10))
    meter.sample(reading(11, process(started=10.5, busy_s=0.4)))
    assert meter.tenants()[0].gpu_util_percent == pytest.approx(80)


def test_measures_of_an_ended_process_stay_and_count_no_more() -> None:
    meter = Meter(GPU)
    meter.sample(reading(0, process()))
    meter.sample(reading(1, process(busy_s=0.8)))
    meter.sample(reading(2))
    (tenant,) = meter.tenants()
    assert (tenant.memory_mib, tenant.gpu_util_percent) == (0, pytest.approx(80))
    assert meter.total(is_concurrent=True).busy == 0


def test_pod_with_a_process_is_never_forgotten() -> None:
    meter = Meter(GPU)
    meter.sample(reading(0, process()))
    meter.keep(set())
    assert [t.pod_uid for t in meter.tenants()] == [A]


def test_pod_without_its_reservation_any_more_is_told_only_if_it_is_seen_again() -> None:
    """Regression: what had ended stood in the status until the next sample, and kept the next job off the GPU."""
    meter = Meter(GPU)
    meter.sample(reading(0, process(A), process(B, "p2")))
    meter.doubt({A})
    assert [t.pod_uid for t in meter.tenants()] == [B]
    meter.sample(reading(1, process(A), process(B, "p2")))
    assert [t.pod_uid for t in meter.tenants()] == [A, B]


def test_counters_that_fall_count_as_standing_still() -> None:
    """Processes write their own counters; utilization and power below zero have no meaning."""
    meter = Meter(GPU)
    meter.sample(reading(0, process(busy_s=5, energy_j=100, steps=5, steps_s=5)))
    meter.sample(reading(1, process()))
    assert meter.tenants()[0].step_time_seconds is None
    assert (meter.uses[A].energy_j, meter.uses[A].rates) == (0, Rates())


def test_total_is_not_additive() -> None:
    meter = Meter(GPU)
    meter.sample(reading(0, process(A), process(B, "p2")))
    meter.sample(reading(1, process(A, busy_s=0.6, sm_s=0.3), process(B, "p2", busy_s=0.5, sm_s=0.3)))
    assert meter.total(is_concurrent=True).busy == pytest.approx(0.8)
    assert meter.total(is_concurrent=False).busy == 1.0
    assert meter.total(is_concurrent=True).sm == pytest.approx(0.6)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 10)), max_size=20))
def test_rates_stay_ratios(samples) -> None:
    meter, now, busy = Meter(GPU), 0.0, 0.0
    for elapsed, worked in samples:
        now, busy = now + elapsed, busy + worked
        meter.sample(reading(now, process(busy_s=busy, sm_s=busy)))
        for tenant in meter.tenants():
            assert tenant.gpu_util_percent is None or 0 <= tenant.gpu_util_percent <= 100


WRITTEN = Tenant(
    pod_uid=A,
    gpu_uuid=GPU,
    memory_mib=10_000,
    peak_memory_mib=10_000,
    gpu_util_percent=50.0,
    step_time_seconds=0.1,
)


@pytest.mark.parametrize(
    ("change", "is_written"),
    [
        ({"memory_mib": 10_900}, False),
        ({"memory_mib": 11_100}, True),
        ({"peak_memory_mib": 10_090}, False),
        ({"peak_memory_mib": 10_110}, True),
        ({"gpu_util_percent": 54.9}, False),
        ({"gpu_util_percent": 55.1}, True),
        ({"gpu_util_percent": None}, True),
        ({"step_time_seconds": 0.109}, False),
        ({"step_time_seconds": 0.111}, True),
        ({"power_w": 5.0}, True),
    ],
)
def test_only_what_moved_by_a_tenth_is_written(change, is_written) -> None:

    measured = replace(WRITTEN, **change)
    assert (worth_writing([WRITTEN], [measured]) == [measured]) is is_written


def test_who_came_is_written_and_who_left_is_not_kept() -> None:
    other = Tenant(pod_uid=B, gpu_uuid=GPU)
    assert worth_writing([WRITTEN], [other]) == [other]
