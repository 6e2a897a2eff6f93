"""Measured peaks become part of reservations, on a server, across restarts."""

import asyncio

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.errors import Unreachable
from carpool_core.resources.node import GpuNodeStatus, Tenant, TenantProfile
from carpool_core.testing.clock import FakeClock
from carpool_core.values import SharingMode
from carpool_extender.cache.peaks import PeakTracker
from carpool_extender.reservations.peaks import PeakUpdater
from carpool_extender.reservations.writer import ATTEMPTS
from carpool_extender.testing import device, gpu_node, prediction, tenant, until
from extender_world import args, background, filtering, named
from msgspec.structs import replace

GPU = "GPU-a-0"


def a_world(world, **predicted):
    """A job that is alone because nothing was measured, and one that waits, for one GPU."""
    world.add("x", "y", nodes=["a"])
    told = {"prediction": msgspec.to_builtins(prediction(trusted=False, **predicted))}
    world.kube.seed(GPU_TRAINING_JOBS, world.kube.dump(GPU_TRAINING_JOBS, "x", "") | {"status": told})


async def place(world, extender, job="x"):
    async with background(world.agent.serve("a")):
        answer = await extender.service.bind(args(job))
    assert answer.error == ""


async def tell(world, for_s, *, peak_mib=5000, busy=80.0):
    """Let the agent report x twice a minute."""
    for _ in range(round(for_s / 25)):
        world.clock.advance(25)
        tenant = {"podUid": "pod-x", "gpuUuid": GPU, "memoryMib": peak_mib, "peakMemoryMib": peak_mib}
        status = {"tenants": [tenant | {"gpuUtilPercent": busy}], "heartbeatTime": world.clock.now().isoformat()}
        await world.kube.patch(GPU_NODES, "a", {"status": status}, subresource="status")
        for _ in range(20):
            await asyncio.sleep(0)


def counted(world):
    return [reservation["tenant"].get("measuredMib") for reservation in world.reservations("a")]


async def test_a_lone_job_is_joined_once_its_peak_was_measured(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        [lone] = world.reservations("a")
        assert (lone["mode"], lone.get("memoryLimitMib"), lone["tenant"].get("memoryMib")) == ("MPS", None, None)
        assert "counts with the whole GPU until its own peak was measured" in lone["reason"]
        assert named(await extender.service.filter(filtering("y"))) == []
        await tell(world, 100)
        assert counted(world) == [None]
        await tell(world, 25)
        await until(lambda: counted(world) == [7500])
        assert ANNOTATION_CAPACITY_FREED in world.kube.dump(GPU_NODES, "a")["metadata"]["annotations"]
        assert named(await extender.service.filter(filtering("y"))) == ["a"]
        await place(world, extender, "y")
        await tell(world, 500)
        await until(lambda: counted(world) == [5500, None])
    assert world.reservations("a")[0]["generation"] == lone["generation"]  # its agent need not act


async def test_who_grew_has_its_promise_again_although_its_agent_begins_anew(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        await tell(world, 125)
        await until(lambda: counted(world) == [7500])
        await tell(world, 25, peak_mib=8000)
        await until(lambda: counted(world) == [None])
        assert "provisional" not in world.reservations("a")[0]["tenant"]
        await tell(world, 700, peak_mib=5000)
        assert counted(world) == [None]
        assert named(await extender.service.filter(filtering("y"))) == []


async def test_what_counts_outlives_the_extender_and_only_waiting_begins_anew(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        await tell(world, 100)
    async with world.extender() as extender:
        await tell(world, 100)
        assert counted(world) == [None]
        await tell(world, 25)
        await until(lambda: counted(world) == [7500])
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering("y"))) == ["a"]


async def test_what_could_not_be_written_is_written_with_the_agents_next_word(world):
    a_world(world)
    async with world.extender() as extender:
        await place(world, extender)
        await tell(world, 100)
        for _ in range(ATTEMPTS):
            world.kube.fail_next("patch", GPU_NODES, Unreachable("gone"), subresource="")
        await tell(world, 400)
        await until(lambda: counted(world) == [7500])


@pytest.mark.parametrize("outcome", ["GpuOutOfMemory", "ContainerFailed"])
async def test_a_job_that_died_of_memory_stays_alone(world, outcome):
    a_world(world)
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "")
    world.kube.seed(GPU_TRAINING_JOBS, job | {"status": job["status"] | {"attempts": [{"outcome": outcome}]}})
    async with world.extender() as extender:
        await place(world, extender)
    [lone] = world.reservations("a")
    expected = ("Exclusive", False) if outcome == "GpuOutOfMemory" else ("MPS", True)
    assert (lone["mode"], lone["tenant"].get("provisional", False)) == expected


def a_node(name, peak_mib, heartbeat):
    held = replace(tenant("x", [GPU], SharingMode.MPS, prediction=None), tenant=TenantProfile(provisional=True))
    told = Tenant(pod_uid="pod-x", gpu_uuid=GPU, memory_mib=peak_mib, peak_memory_mib=peak_mib, gpu_util_percent=80.0)
    status = GpuNodeStatus(devices=[device(0)], tenants=[told], heartbeat_time=heartbeat)
    return replace(gpu_node(name, [device(0)], [held]), status=status)


class SlowBook:
    """The ledgers of nodes as they are told of; writing `slow` never ends."""

    def __init__(self):
        self.cluster, self.nodes, self.told, self.written = self, {}, [], []
        self.node = self.nodes.get

    def on_node(self, callback):
        self.told.append(callback)

    def tell(self, node):
        name = node.metadata.name
        old, self.nodes[name] = self.nodes.get(name), node
        for callback in self.told:
            callback(old, node)

    async def change(self, name, decide, *, frees=False):
        if name == "slow":
            await asyncio.Event().wait()
        self.written.append((name, decide(self.nodes[name]).reservations[0].tenant.measured_mib))


class Nodes:
    """Nodes each with a lone job, whose agents tell of it."""

    def __init__(self):
        self.clock, self.writer = FakeClock(), SlowBook()
        self.settler = PeakUpdater(self.writer, self.writer, PeakTracker(self.clock))

    def tell(self, for_s, *names, peak_mib=5000):
        for _ in range(round(for_s / 25)):
            self.clock.advance(25)
            for name in names:
                self.writer.tell(a_node(name, peak_mib, self.clock.now().isoformat()))


async def test_a_node_that_is_slow_to_write_holds_up_no_other():
    nodes = Nodes()
    async with background(nodes.settler.run()):
        nodes.tell(125, "slow")
        await asyncio.sleep(0)
        nodes.tell(125, "quick")
        await until(lambda: nodes.writer.written == [("quick", 7500)])


async def test_what_is_no_longer_so_when_its_turn_comes_is_not_written():
    nodes = Nodes()
    nodes.tell(125, "a")
    nodes.tell(25, "a", peak_mib=6000)
    async with background(nodes.settler.run()):
        for _ in range(20):
            await asyncio.sleep(0)
        assert nodes.writer.written == []
        nodes.tell(100, "a", peak_mib=6000)
        await until(lambda: nodes.writer.written == [("a", 9000)])
