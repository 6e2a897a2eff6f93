"""When what a running tenant was measured to take replaces what it was promised."""

import pytest
from carpool_core.resources.node import GpuNodeStatus, Tenant, TenantProfile
from carpool_core.testing.clock import FakeClock
from carpool_core.values import SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.peaks import PeakTracker, StablePeak, measured_tenants, use_measured_peak
from carpool_extender.explain.explain import measured_differences
from carpool_extender.testing import cluster, device, gpu_node, tenant
from msgspec.structs import replace

POD, GPUS = "pod-x", ["GPU-a-0", "GPU-a-1"]
FIRST, LAST = {POD: 1.5}, {POD: 1.1}
POOR = TenantProfile(provisional=True)


def reserved(profile=POOR, gpus=GPUS[:1], mode=SharingMode.MPS, name="x"):
    return replace(tenant(name, gpus, mode, prediction=None), tenant=profile)


def measured(*peaks, busy=80.0, working=None, memory_mib=None, name="x"):
    return [
        Tenant(
            pod_uid=f"pod-{name}",
            gpu_uuid=gpu,
            memory_mib=peak if memory_mib is None else memory_mib,
            peak_memory_mib=peak,
            gpu_util_percent=busy,
            working=working,
        )
        for gpu, peak in zip(GPUS, peaks, strict=False)
    ]


def after(pods, *peaks):
    """The peaks that have earned some pods their margins."""
    return {pod: StablePeak(peaks, by) for pod, by in pods.items()}


def a_node(*held, tenants=(), heartbeat="2026-01-31T12:00:00Z"):
    devices = [device(index) for index in range(2)]
    status = GpuNodeStatus(devices=devices, tenants=list(tenants), heartbeat_time=heartbeat)
    return replace(gpu_node("a", devices, held), status=status)


class Agent:
    """Writes twice a minute."""

    def __init__(self):
        self.clock = FakeClock()
        self.stillness = PeakTracker(self.clock)
        self.beats = 0

    def tell(self, held, for_s, *peaks, **changes):
        found = {}
        for _ in range(round(for_s / 25)):
            self.pass_time(25)
            found = self.look(held, *peaks, **changes)
        return found

    def pass_time(self, seconds):
        self.clock.advance(seconds)

    def look(self, held, *peaks, **changes):
        self.beats += 1
        node = a_node(held, tenants=measured(*peaks, **changes), heartbeat=f"beat {self.beats}")
        return {pod: still.margin for pod, still in self.stillness.look(node).items()}


def test_the_longer_a_peak_has_stood_still_the_smaller_is_its_margin():
    agent = Agent()
    assert agent.tell(reserved(), 100, 5000) == {}
    assert agent.tell(reserved(), 25, 5000) == FIRST
    assert agent.tell(reserved(), 475, 5000) == FIRST
    assert agent.tell(reserved(), 25, 5000) == LAST
    assert agent.tell(reserved(), 25, 5000) == LAST


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        pytest.param((5000,), {"busy": 0.2}, id="it only loaded"),
        pytest.param((5000,), {"busy": None}, id="nobody knows whether it works"),
        pytest.param((5000,), {"memory_mib": 0}, id="its process was gone"),
        pytest.param((), {}, id="it was not measured"),
    ],
)
def test_time_before_does_not_count_where(before, changes):
    agent = Agent()
    assert agent.tell(reserved(), 700, *before, **changes) == {}
    assert agent.tell(reserved(), 100, 5000) == {}
    assert agent.tell(reserved(), 25, 5000) == FIRST


@pytest.mark.parametrize(
    "pausing",
    [
        pytest.param({"busy": 0.0}, id="by its mean"),
        pytest.param({"busy": 40.0, "working": False}, id="whatever its mean still says"),
    ],
)
def test_who_pauses_goes_on_where_it_was(pausing):
    agent = Agent()
    assert agent.tell(reserved(), 75, 5000) == {}
    assert agent.tell(reserved(), 300, 5000, **pausing) == {}
    assert agent.tell(reserved(), 50, 5000) == {}
    assert agent.tell(reserved(), 25, 5000) == FIRST


def test_who_grows_is_looked_at_anew():
    agent = Agent()
    assert agent.tell(reserved(), 600, 4900) == FIRST
    assert agent.tell(reserved(), 100, 5000) == {}
    assert agent.tell(reserved(), 500, 5000) == FIRST
    assert agent.tell(reserved(), 25, 5000) == LAST


def test_what_agents_do_not_tell_of_moves_nothing():
    agent = Agent()
    agent.tell(reserved(), 300, 5000)
    assert agent.tell(reserved(), 325, 5040) == LAST


def test_all_gpus_of_a_worker_have_to_stand_still():
    agent, held = Agent(), reserved(gpus=GPUS, mode=SharingMode.TIME_SLICING)
    agent.tell(held, 700, 5000)
    assert agent.tell(held, 100, 5000, 6000) == {}
    assert agent.tell(held, 25, 5000, 6000) == FIRST


def test_an_agents_silence_begins_it_anew():
    agent = Agent()
    agent.tell(reserved(), 500, 5000)
    agent.pass_time(100)
    assert agent.look(reserved(), 5000) == {}
    assert agent.tell(reserved(), 75, 5000) == {}
    assert agent.tell(reserved(), 25, 5000) == FIRST


def test_a_word_of_others_is_none_of_the_agents():
    agent = Agent()
    agent.tell(reserved(), 100, 5000)
    for _ in range(4):  # another pod's reservation is written meanwhile, and the agent says nothing
        agent.pass_time(25)
        agent.beats -= 1
        found = agent.look(reserved(), 5000)
    assert found == {}


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(TenantProfile(), id="alone for another reason"),
        pytest.param(TenantProfile(memory_mib=9000), id="a promise that stays"),
    ],
)
def test_others_are_not_looked_at(profile):
    assert Agent().tell(reserved(profile), 700, 5000) == {}
    spec = a_node(reserved(profile)).spec
    assert use_measured_peak(spec, measured_tenants(a_node(tenants=measured(4000))), after(LAST, 4000)) is spec


@pytest.mark.parametrize(
    ("promised", "peaks", "counted"),
    [
        pytest.param(None, (5000,), 5500, id="the whole GPU before"),
        pytest.param(9000, (5000,), 5500, id="a larger bound before"),
        pytest.param(5400, (5000,), None, id="it would be more"),
        pytest.param(9000, (9500,), None, id="it takes more than promised"),
        pytest.param(None, (5000, 7000), 7701, id="the largest of its GPUs"),
        pytest.param(None, (0, 7000), None, id="one is not measured"),
    ],
)
def test_it_counts_with_so_many_times_its_peak_and_never_with_more_than_before(promised, peaks, counted):
    held = reserved(replace(POOR, memory_mib=promised), GPUS[: len(peaks)], SharingMode.TIME_SLICING)
    node = a_node(held, tenants=measured(*peaks))
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(LAST, *peaks)).reservations
    assert settled.tenant.measured_mib == counted
    assert settled.memory_limit_mib == held.memory_limit_mib


@pytest.mark.parametrize(
    ("stood", "found", "counted"),
    [
        pytest.param((5000,), (5050,), 5555, id="no more than it was"),
        pytest.param((5000,), (6000,), None, id="it has risen since"),
        pytest.param((5000, 5000), (5000, 6000), None, id="on one GPU"),
    ],
)
def test_a_margin_is_earned_by_the_peaks_that_stood_still_and_no_larger_ones(stood, found, counted):
    """Regression: after a conflict it was decided anew with the old margin and the new, larger peak."""
    node = a_node(reserved(gpus=GPUS[: len(found)], mode=SharingMode.TIME_SLICING), tenants=measured(*found))
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(LAST, *stood)).reservations
    assert settled.tenant.measured_mib == counted


def test_margins_shrink_only():
    held = reserved(replace(POOR, measured_mib=6000))
    node = a_node(held, tenants=measured(5000))
    assert use_measured_peak(node.spec, measured_tenants(node), after(FIRST, 5000)) is node.spec
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(LAST, 5000)).reservations
    assert settled.tenant.measured_mib == 5500


@pytest.mark.parametrize(
    ("promised", "counts", "peaks", "counted"),
    [
        pytest.param(None, 6000, (6001,), None, id="it has the whole GPU again"),
        pytest.param(9000, 6000, (6001,), 9000, id="it has its promise again"),
        pytest.param(9000, None, (9001,), 9000, id="more than was promised"),
        pytest.param(9000, 6000, (0, 6001), 9000, id="on one of its GPUs"),
    ],
)
def test_who_takes_more_than_counts_has_its_promise_again_and_an_agent_that_forgot_changes_nothing(
    promised, counts, peaks, counted
):
    """Regression: that was only read from the agent's peaks, which begin anew with the agent."""
    profile = replace(POOR, memory_mib=promised, measured_mib=counts)
    held = reserved(profile, GPUS[: len(peaks)], SharingMode.TIME_SLICING)
    grown = a_node(held, tenants=measured(*peaks))
    void = use_measured_peak(grown.spec, measured_tenants(grown), {})
    assert void.reservations[0].tenant == TenantProfile(memory_mib=promised)
    assert void.reservations[0].tenant.counted_mib(0) == counted
    agent = Agent()
    assert agent.tell(void.reservations[0], 700, *(5000 for _ in peaks)) == {}
    after_restart = a_node(void.reservations[0], tenants=measured(*(5000 for _ in peaks)))
    assert use_measured_peak(void, measured_tenants(after_restart), after(LAST, *(5000 for _ in peaks))) is void


@pytest.mark.parametrize(
    ("promised", "peak", "counted"),
    [
        pytest.param(None, 5000, 5500, id="as measured"),
        pytest.param(None, 5500, 5500, id="up to the margin"),
        pytest.param(None, 5501, 40960, id="beyond it has the whole GPU again"),
        pytest.param(8000, 5501, 8000, id="beyond it has its promise again"),
        pytest.param(8000, 8500, 8500, id="beyond that counts what it takes"),
    ],
)
def test_who_takes_more_after_all_counts_as_before_for_arrays_and_ledger(promised, peak, counted):
    held = replace(reserved(replace(POOR, memory_mib=promised, measured_mib=5500)), reserved_at="2026-01-31T11:00:00Z")
    node = a_node(held, tenants=measured(peak))
    assert 40960 - cluster(node).snapshot().gpus.free_mib[0] == counted
    newcomer = replace(tenant("n", GPUS[:1]), tenant=TenantProfile(memory_mib=40960 - counted + 1))
    capacity = ledger.capacity_of(node, 8)
    assert isinstance(ledger.reserve(node.spec, newcomer, capacity), ledger.Rejected)
    if counted < 40960:
        fitting = replace(newcomer, tenant=TenantProfile(memory_mib=40960 - counted))
        assert len(ledger.reserve(node.spec, fitting, capacity).reservations) == 2


@pytest.mark.parametrize(
    ("profile", "peak", "said"),
    [
        pytest.param(
            POOR, 5000, "until its measured peak is stable: default/x counts as a whole GPU",
            id="not yet",
        ),
        pytest.param(
            replace(POOR, measured_mib=5500), 5000, "counts as measured: default/x (5,500 MiB, whole GPU expected; ",
            id="as measured",
        ),
        pytest.param(
            replace(POOR, measured_mib=5500), 6000, "default/x (more than the 5,500 MiB measured before; ",
            id="more after all",
        ),
    ],
)  # fmt: skip
def test_an_asker_is_told_what_counts(profile, peak, said):
    held = replace(reserved(profile), reserved_at="2026-01-31T11:00:00Z")
    [told] = measured_differences(a_node(held, tenants=measured(peak))).values()
    assert said in told
