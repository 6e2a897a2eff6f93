"""Answers and the watch report the same GpuNodes, in any order."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.resources.node import GpuNode
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.informers import Informers
from carpool_extender.testing import device, gpu_node, seed_node, tenant, until
from structlog.testing import capture_logs


@pytest.fixture
async def world():
    kube = FakeKube(FakeClock())
    seed_node(kube, gpu_node("a"))
    informers = Informers(kube, FakeClock(), ClusterCache())
    task = asyncio.create_task(informers.run())
    await informers.wait_synced()
    yield kube, informers
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def again(name="a", devices=2):
    """A GpuNode of the same name, created after the other was deleted."""
    node = gpu_node(name, devices)
    return msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, uid=f"second-uid-of-{name}"))


async def answer(kube):
    """An answer that is still on its way: the GpuNode as it was when the server wrote it."""
    return await kube.get(GPU_NODES, "a", GpuNode)


async def test_an_answer_after_the_deletion_revives_nothing(world):
    kube, informers = world
    late = await answer(kube)
    await kube.delete(GPU_NODES, "a")
    await until(lambda: informers.cluster.node("a") is None)
    informers.take(late)
    assert informers.cluster.node("a") is None
    assert not informers.cluster.snapshot().gpus.alive.any()


@pytest.mark.parametrize("relisted", [False, True])
async def test_an_answer_about_the_node_before_does_not_replace_the_one_now(world, relisted):
    kube, informers = world
    late = msgspec.structs.replace(await answer(kube), spec=gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]).spec)
    if relisted:
        kube.compact()  # the watch sees neither the end nor the beginning, only another object in its next list
    await kube.delete(GPU_NODES, "a")
    kube.seed(GPU_NODES, again())
    await until(
        lambda: informers.cluster.node("a") is not None and len(informers.cluster.node("a").status.devices) == 2
    )
    informers.take(late)
    assert informers.cluster.node("a").metadata.uid == "second-uid-of-a"
    assert informers.cluster.nodes_holding("pod-x") == []


async def test_the_next_node_is_kept_when_the_end_of_the_one_before_comes_late(world):
    (kube, informers), ends = world, []
    informers.on_node(lambda old, new: ends.append(old.metadata.uid) if new is None else None)
    await kube.delete(GPU_NODES, "a")
    informers.take(again())
    await until(lambda: ends == ["uid-of-a"])
    assert informers.cluster.node("a").metadata.uid == "second-uid-of-a"


async def test_a_node_with_impossible_numbers_counts_as_without_gpus(world):
    """Regression: an index beyond the column's integers ended the extender, and after a restart again."""
    (_, informers), node = world, gpu_node("odd", [device(2**40, "odd")], [tenant("x", [f"GPU-odd-{2**40}"])])
    with capture_logs() as logs:
        informers.take(node)
        informers.take(msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, uid="other")))
    assert [entry["event"] for entry in logs] == ["GPUs of a node left out"]
    assert informers.cluster.node("odd").status.devices == []
    assert informers.cluster.nodes_holding("pod-x") == ["odd"]
    assert informers.cluster.snapshot().gpus.alive.sum() == 1
    informers.take(gpu_node("odd", 2))
    assert informers.cluster.snapshot().gpus.alive.sum() == 3


async def test_what_has_changed_is_taken_from_the_new_state(world):
    kube, informers = world
    before = informers.cluster.node("a")
    held = gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]).spec
    await kube.patch(GPU_NODES, "a", {"spec": msgspec.to_builtins(held)})
    await until(lambda: informers.cluster.node("a").spec.reservations)
    assert informers.cluster.node("a").spec == held
    assert informers.cluster.node("a").status.devices is before.status.devices
    sick = msgspec.to_builtins(gpu_node("a").status.devices[:1])
    await kube.patch(GPU_NODES, "a", {"status": {"devices": sick}}, subresource="status")
    await until(lambda: len(informers.cluster.node("a").status.devices) == 1)
    assert informers.cluster.snapshot().gpus.alive.sum() == 1
