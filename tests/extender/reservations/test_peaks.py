"""When the measured peak of a running tenant replaces its reserved bound, and how that is written."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES
from carpool_core.kube.errors import Unreachable
from carpool_core.resources.node import LOADING_S, STEADY_S, GpuNodeStatus, Tenant, TenantProfile
from carpool_core.testing.clock import FakeClock
from carpool_core.values import SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.peaks import PeakTracker, StablePeak, measured_tenants, use_measured_peak
from carpool_extender.framework.diagnosis import measured_differences
from carpool_extender.reservations.peaks import CHECK_EVERY_S, PeakUpdater
from carpool_extender.reservations.writer import ATTEMPTS
from carpool_extender.testing import cluster, device, gpu_node, node_of, prediction, seed_job, seed_pod, tenant, until
from extender_world import args, background, filtering, named
from msgspec.structs import replace

POD, GPUS = "pod-x", ["GPU-a-0", "GPU-a-1"]
FIRST, LAST = {POD: 1.5}, {POD: 1.1}
POOR = TenantProfile(provisional=True)


def reserved(profile=POOR, gpus=GPUS[:1], mode=SharingMode.MPS, name="x"):
    return replace(tenant(name, gpus, mode, prediction=None), tenant=profile)


def measured(*peaks, busy=80.0, working=None, memory_mib=None, steps=None, name="x"):
    return [
        Tenant(
            pod_uid=f"pod-{name}",
            gpu_uuid=gpu,
            memory_mib=peak if memory_mib is None else memory_mib,
            peak_memory_mib=peak,
            gpu_util_percent=busy,
            working=working,
            steps=steps,
            settled=True,
        )
        for gpu, peak in zip(GPUS, peaks, strict=False)
    ]


def after(pods, *peaks):
    """The peaks that have earned some pods their margins."""
    return {pod: StablePeak(peaks, by) for pod, by in pods.items()}


def a_node(*held, tenants=(), name="a"):
    devices = [device(index) for index in range(2)]
    status = GpuNodeStatus(devices=devices, tenants=list(tenants))
    return replace(gpu_node(name, devices, held), status=status)


class Agent:
    """An agent whose GpuNode is observed every 25 s."""

    def __init__(self):
        self.clock = FakeClock()
        self.tracker = PeakTracker(self.clock)

    def report(self, held, for_s, *peaks, **changes):
        found = {}
        for _ in range(round(for_s / 25)):
            self.clock.advance(25)
            found = self.observe(held, *peaks, **changes)
        return found

    def observe(self, held, *peaks, **changes):
        node = a_node(held, tenants=measured(*peaks, **changes))
        return {pod: still.margin for pod, still in self.tracker.observe(node).items()}


def phase(for_s, expected, peak=5000, **changes):
    return for_s, expected, () if peak is None else (peak,), changes


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="at once"),
        pytest.param([phase(700, {}, busy=0.2)], id="it only loaded"),
        pytest.param([phase(700, {}, busy=None)], id="its activity is unknown"),
        pytest.param([phase(700, {}, memory_mib=0)], id="its process was gone"),
        pytest.param([phase(700, {}, peak=None)], id="it was not measured"),
        pytest.param([phase(700, {}, steps=19)], id="it reports fewer than twenty steps"),
        pytest.param([phase(600, FIRST, peak=4900)], id="it grew"),
    ],
)
def test_the_longer_a_peak_is_stable_while_its_tenant_works_the_smaller_is_its_margin(before):
    agent = Agent()
    for for_s, expected, peaks, changes in [*before, phase(100, {}), phase(25, FIRST), phase(475, FIRST)]:
        assert agent.report(reserved(), for_s, *peaks, **changes) == expected
    assert agent.report(reserved(), 25, 5000) == LAST
    assert agent.report(reserved(), 25, 5040) == LAST  # below the reporting threshold this is no growth


@pytest.mark.parametrize("pausing", [{"busy": 0.0}, {"busy": 40.0, "working": False}], ids=["by its mean", "reported"])
def test_a_pause_neither_counts_nor_resets_the_time(pausing):
    agent = Agent()
    for for_s, expected, changes in [(75, {}, {}), (300, {}, pausing), (50, {}, {}), (25, FIRST, {})]:
        assert agent.report(reserved(), for_s, 5000, **changes) == expected


def test_all_gpus_of_a_worker_must_be_stable():
    agent, held = Agent(), reserved(gpus=GPUS, mode=SharingMode.TIME_SLICING)
    agent.report(held, 700, 5000)
    assert agent.report(held, 100, 5000, 6000) == {}
    assert agent.report(held, 25, 5000, 6000) == FIRST


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(TenantProfile(), id="alone for another reason"),
        pytest.param(TenantProfile(memory_mib=9000), id="a promise that stays"),
    ],
)
def test_only_provisional_reservations_are_tracked(profile):
    assert Agent().report(reserved(profile), 700, 5000) == {}
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
def test_a_stable_peak_times_its_margin_counts_but_never_more_than_before(promised, peaks, counted):
    held = reserved(replace(POOR, memory_mib=promised), GPUS[: len(peaks)], SharingMode.TIME_SLICING)
    node = a_node(held, tenants=measured(*peaks))
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(LAST, *peaks)).reservations
    assert settled.tenant.measured_mib == counted
    assert settled.memory_limit_mib == held.memory_limit_mib


@pytest.mark.parametrize(("margin", "counted"), [(FIRST, 6000), (LAST, 5500)])
def test_margins_shrink_only(margin, counted):
    node = a_node(reserved(replace(POOR, measured_mib=6000)), tenants=measured(5000))
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(margin, 5000)).reservations
    assert settled.tenant.measured_mib == counted


@pytest.mark.parametrize(
    ("stood", "found", "counted"),
    [
        pytest.param((5000,), (5050,), 5555, id="no more than it was"),
        pytest.param((5000,), (6000,), None, id="it has risen since"),
        pytest.param((5000, 5000), (5000, 6000), None, id="on one GPU"),
    ],
)
def test_a_margin_applies_only_to_the_peaks_that_were_stable(stood, found, counted):
    """Regression: after a conflict it was decided anew with the old margin and the new, larger peak."""
    node = a_node(reserved(gpus=GPUS[: len(found)], mode=SharingMode.TIME_SLICING), tenants=measured(*found))
    [settled] = use_measured_peak(node.spec, measured_tenants(node), after(LAST, *stood)).reservations
    assert settled.tenant.measured_mib == counted


@pytest.mark.parametrize(
    ("promised", "counts", "peaks", "counted"),
    [
        pytest.param(None, 6000, (6001,), None, id="it has the whole GPU again"),
        pytest.param(9000, 6000, (6001,), 9000, id="it has its promise again"),
        pytest.param(9000, None, (9001,), 9000, id="more than was promised"),
        pytest.param(9000, 6000, (0, 6001), 9000, id="on one of its GPUs"),
    ],
)
def test_a_tenant_that_exceeds_what_counts_gets_its_bound_back_for_good(promised, counts, peaks, counted):
    """Regression: that was only read from the agent's peaks, which begin anew with the agent."""
    profile = replace(POOR, memory_mib=promised, measured_mib=counts)
    held = reserved(profile, GPUS[: len(peaks)], SharingMode.TIME_SLICING)
    grown = a_node(held, tenants=measured(*peaks))
    void = use_measured_peak(grown.spec, measured_tenants(grown), {})
    assert void.reservations[0].tenant == TenantProfile(memory_mib=promised)
    assert void.reservations[0].tenant.counted_mib(0) == counted
    agent = Agent()
    assert agent.report(void.reservations[0], 700, *(5000 for _ in peaks)) == {}
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
def test_gpu_table_and_ledger_count_a_measured_tenant_alike(promised, peak, counted):
    held = reserved(replace(POOR, memory_mib=promised, measured_mib=5500))
    node = a_node(held, tenants=measured(peak))
    assert 40960 - cluster(node).snapshot().gpus.free_mib[0] == counted
    newcomer = replace(tenant("n", GPUS[:1]), tenant=TenantProfile(memory_mib=40960 - counted + 1))
    capacity = ledger.capacity_of(node, 8)
    assert isinstance(ledger.reserve(node.spec, newcomer, capacity), ledger.Rejected)
    if counted < 40960:
        fitting = replace(newcomer, tenant=TenantProfile(memory_mib=40960 - counted))
        assert len(ledger.reserve(node.spec, fitting, capacity).reservations) == 2


@pytest.mark.parametrize(
    ("profile", "peak", "expected"),
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
def test_explain_names_the_memory_that_counts(profile, peak, expected):
    [text] = measured_differences(a_node(reserved(profile), tenants=measured(peak))).values()
    assert expected in text


# On a server, across restarts


def a_lone_job(world, **predicted):
    """A job that is alone because nothing was measured, and one that could join it; the extender leads."""
    world.hold("here_1")
    world.add("x", nodes=["a"])
    seed_job(world.kube, "y")
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "")
    status = job["status"] | {"prediction": msgspec.to_builtins(prediction(trusted=False, **predicted))}
    world.kube.seed(GPU_TRAINING_JOBS, job | {"status": status})


async def place(world, extender, job="x"):
    async with background(world.agent.serve("a")):
        answer = await extender.service.bind(args(job))
    assert answer.error == ""


async def report(world):
    """Let the agent report x, and the extender observe it."""
    tenant = {"podUid": "pod-x", "gpuUuid": GPUS[0], "memoryMib": 5000, "peakMemoryMib": 5000, "gpuUtilPercent": 80.0}
    await world.kube.patch(GPU_NODES, "a", {"status": {"tenants": [tenant]}}, subresource="status")
    await passes(world, CHECK_EVERY_S)


async def passes(world, for_s):
    """Let time pass, in which the agent has nothing new to report."""
    for _ in range(round(for_s / CHECK_EVERY_S)):
        world.clock.advance(CHECK_EVERY_S)
        for _ in range(20):
            await asyncio.sleep(0)


def counted(world):
    return [reservation["tenant"].get("measuredMib") for reservation in world.reservations("a")]


async def test_a_lone_job_is_joined_once_its_peak_was_measured(world):
    a_lone_job(world)
    async with world.extender() as extender:
        await place(world, extender)
        [lone] = world.reservations("a")
        assert (lone["mode"], lone.get("memoryLimitMib"), lone["tenant"].get("memoryMib")) == ("MPS", None, None)
        assert "counts with the whole GPU until its own peak was measured" in lone["reason"]
        assert named(await extender.service.filter(filtering("y"))) == []
        await report(world)
        await passes(world, LOADING_S - CHECK_EVERY_S)
        assert counted(world) == [None]
        await passes(world, CHECK_EVERY_S)
        await until(lambda: counted(world) == [7500])
        assert named(await extender.service.filter(filtering("y"))) == ["a"]
        seed_pod(world.kube, "y")
        await place(world, extender, "y")
        await passes(world, STEADY_S - LOADING_S)
        await until(lambda: counted(world) == [5500, None])
    assert world.reservations("a")[0]["generation"] == lone["generation"]  # its agent need not act


async def test_only_the_leader_writes_peaks_and_a_new_leader_has_measured_them(world):
    """Regression: a standby wrote them, too."""
    a_lone_job(world)
    world.hold("elsewhere_1")
    async with world.extender() as extender:
        await place(world, extender)
        await report(world)
        await passes(world, LOADING_S + CHECK_EVERY_S)
        assert counted(world) == [None]
        world.hold("here_2")
        await passes(world, CHECK_EVERY_S)
        await until(lambda: counted(world) == [7500])


async def test_a_dead_agent_resets_the_time(world):
    """A peak may be missed, and the next agent begins with its own."""
    a_lone_job(world)
    async with world.extender() as extender:
        await place(world, extender)
        await report(world)
        await passes(world, LOADING_S - CHECK_EVERY_S)
        for slots in (0, 8):
            world.kube.seed(NODES, node_of("a", slots=slots))
            await passes(world, CHECK_EVERY_S)
        await passes(world, LOADING_S - CHECK_EVERY_S)
        assert counted(world) == [None]
        await passes(world, CHECK_EVERY_S)
        await until(lambda: counted(world) == [7500])


async def test_a_failed_write_is_repeated_at_the_next_observation(world):
    a_lone_job(world)
    async with world.extender() as extender:
        await place(world, extender)
        await report(world)
        await passes(world, LOADING_S - CHECK_EVERY_S)
        for _ in range(ATTEMPTS):
            world.kube.fail_next("patch", GPU_NODES, Unreachable("gone"), subresource="")
        await passes(world, 20 * CHECK_EVERY_S)
        await until(lambda: counted(world) == [7500])


@pytest.mark.parametrize("outcome", ["GpuOutOfMemory", "ContainerFailed"])
async def test_a_job_that_died_of_memory_stays_alone(world, outcome):
    a_lone_job(world)
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "")
    world.kube.seed(
        GPU_TRAINING_JOBS, job | {"status": job["status"] | {"attempts": [{"outcome": outcome, "podUids": ["pod-x"]}]}}
    )
    async with world.extender() as extender:
        await place(world, extender)
    [lone] = world.reservations("a")
    expected = ("Exclusive", False) if outcome == "GpuOutOfMemory" else ("MPS", True)
    assert (lone["mode"], lone["tenant"].get("provisional", False)) == expected


class SlowWriter:
    """A writer that never finishes the node `slow`."""

    def __init__(self):
        self.begun, self.written = [], []

    async def change(self, name, decide):
        self.begun.append(name)
        if name == "slow":
            await asyncio.Event().wait()
        self.written.append(name)


async def test_a_node_that_is_slow_to_write_delays_no_other_and_is_not_written_twice():
    clock, writer = FakeClock(), SlowWriter()
    names = ("slow", "quick")
    nodes = cluster(*(a_node(reserved(), tenants=measured(5000), name=name) for name in names))
    async with background(PeakUpdater(nodes, writer, PeakTracker(clock), lambda: True, clock.sleep).run()):
        for _ in range(round(LOADING_S / CHECK_EVERY_S) + 1):
            await until(lambda: CHECK_EVERY_S in clock.sleeping)
            clock.advance(CHECK_EVERY_S)
        await until(lambda: writer.begun.count("quick") == 2)  # its reservation stays as it was here
    assert (writer.begun.count("slow"), set(writer.written)) == (1, {"quick"})
