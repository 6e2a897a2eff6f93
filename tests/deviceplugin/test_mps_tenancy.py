"""No MPS daemon, nor anything of its, is handed on from one tenancy to another; none serves more than fits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from agent_world import World
from carpool_core.resources.node import Reservation, TenantProfile
from carpool_core.values import SharingMode
from carpool_deviceplugin.mps.daemons import Mps
from carpool_deviceplugin.testing.agents import running, until
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml_node import uid
from mps_world import GPU


@contextmanager
def mounted(directory: Path) -> Iterator[int]:
    """A container's view of a directory, which stays whatever becomes of its name."""
    view = os.open(directory, os.O_RDONLY)
    yield view
    os.close(view)


@pytest.mark.parametrize("is_wedged", [True, False])
def test_a_container_that_is_still_ending_does_not_meet_the_next_daemon(
    commands: FakeMpsCommands, mps: Mps, is_wedged: bool
) -> None:
    """Its pod may have been deleted by force: its reservation is gone, and it is not."""
    mps.start(GPU)
    with mounted(mps.pipe(GPU)) as theirs:
        assert os.listdir(theirs) == ["control"]
        commands.daemons[str(mps.pipe(GPU))].is_wedged = is_wedged
        mps.stop(GPU)
        mps.start(GPU)
        assert os.listdir(theirs) == []
    assert os.listdir(mps.pipe(GPU)) == ["control"]


async def test_a_daemon_goes_with_its_namespace(tmp_path: Path, reserve) -> None:
    """Regression: one update put another namespace's pod in the last one's place, and the daemon went on for it."""
    world = World(tmp_path)

    def of(pod: str, namespace: str) -> Reservation:
        return reserve(pod, world.gpu, mode=SharingMode.MPS, pod_namespace=namespace)

    async with running(world.agent):
        await world.hold(of("a", "one"))
        shm = world.devices.access(world.gpu).mps_shm.host_path
        with mounted(world.pipe) as pipe, mounted(Path(shm)) as memory:
            os.close(os.open("segment", os.O_CREAT, dir_fd=memory))
            await world.hold(of("b", "another"))
            assert (world.node.mps.starts, os.listdir(pipe), os.listdir(memory)) == (2, [], [])
        theirs = world.devices.access(world.gpu).mps_shm.host_path
        assert (theirs != shm, os.listdir(theirs)) == (True, [])
        await world.hold(of("b", "another"), of("c", "another"))
        await world.hold(of("c", "another"), of("d", "another"))
        assert world.node.mps.starts == 2, "as long as one of those that it serves stays, it does"


@pytest.mark.parametrize(("takes_mib", "state"), [(9_000, "Ready"), (11_000, "Failed")])
async def test_what_is_measured_decides_who_comes_in(tmp_path: Path, reserve, takes_mib: int, state: str) -> None:
    """A was told to be no larger than 10,000 MiB, and may take 60,000; B's 60,000 fit beside the former only."""
    world = World(tmp_path)
    tenant = TenantProfile(memory_mib=60_000, measured_mib=10_000)
    first = reserve("a", world.gpu, mode=SharingMode.MPS, memory_limit_mib=60_000, tenant=tenant)
    wanted = [first, reserve("b", world.gpu, mode=SharingMode.MPS, memory_limit_mib=60_000)]
    wanted = [msgspec.structs.replace(r, pod_uid=uid(r.pod_name)) for r in wanted]
    async with running(world.agent):
        await world.hold(wanted[0])
        world.node.start(0, 42, "a", takes_mib)
        world.node.mps.connect(str(world.pipe), 42)
        await until(lambda: [t.peak_memory_mib for t in world.status.tenants] == [takes_mib])
        await world.hold(*wanted, b=state)
        if state == "Failed":
            assert "MiB that are not promised, found a limit of 60,000 MiB" in world.status.partitions[1].message
