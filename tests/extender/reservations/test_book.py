"""What is written together, and what a server says of it."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Invalid, Unreachable
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import ATTEMPTS, FIRST_PAUSE_S, MOST_GATHERED_S, ReservationWriter
from carpool_extender.testing import gpu_node, seed_node, tenant, until


def adding(reservation):
    def decide(node):
        return msgspec.structs.replace(node.spec, reservations=[*node.spec.reservations, reservation])

    return decide


async def test_what_can_never_be_written_takes_nothing_with_it():
    """Regression: one reservation that nobody would read kept every other of its batch from being written."""
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a", 3))
    informers = Informers(kube, clock, ClusterCache())
    writer = ReservationWriter(kube, informers, clock, clock.sleep, gather_s=0)
    wanted = [tenant(name, [f"GPU-a-{i}"]) for i, name in enumerate("xyz")]
    wanted[1] = msgspec.structs.replace(wanted[1], reason="!" * 5000)
    told = await asyncio.gather(*(writer.change("a", adding(one)) for one in wanted), return_exceptions=True)
    assert [isinstance(one, Invalid) for one in told] == [False, True, False]
    assert informers.cluster.nodes_holding("pod-x") == informers.cluster.nodes_holding("pod-z") == ["a"]
    assert informers.cluster.nodes_holding("pod-y") == []


async def test_of_several_reservations_of_one_pod_the_first_holds_and_is_written():
    """Regression: one that was copied by hand counted twice."""
    kube = FakeKube(FakeClock())
    held = [tenant("x", ["GPU-a-0"]), tenant("x", ["GPU-a-1"]), tenant("y", ["GPU-a-2"])]
    body = msgspec.to_builtins(gpu_node("a", 3))
    kube.seed(GPU_NODES, body | {"spec": {"reservations": msgspec.to_builtins(held)}})
    writer, informers = await seen_before(kube, FakeClock())
    assert [one.gpu_uuids for one in informers.cluster.node("a").spec.reservations] == [["GPU-a-0"], ["GPU-a-2"]]
    await writer.release("a", "pod-y")
    written = kube.dump(GPU_NODES, "a")["spec"]["reservations"]
    assert [(one["podUid"], one["gpuUuids"]) for one in written] == [("pod-x", ["GPU-a-0"])]


async def test_one_that_can_never_be_written_is_tried_once():
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a"))
    writer = ReservationWriter(kube, Informers(kube, clock, ClusterCache()), clock, clock.sleep, gather_s=0)
    with pytest.raises(Invalid):
        await writer.change("a", adding(msgspec.structs.replace(tenant("x", ["GPU-a-0"]), reason="!" * 5000)))
    assert [call.verb for call in kube.calls] == ["get"]


async def seen_before(kube, clock):
    """A book that knows a node as it is now."""
    informers = Informers(kube, clock, ClusterCache())
    writer = ReservationWriter(kube, informers, clock, clock.sleep, gather_s=0)
    await writer.read("a")
    return writer, informers


async def test_a_report_of_the_agent_makes_nobody_decide_again():
    """Regression: each reservation was written at about the time of a report on the one before, and was refused."""
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a", 2))
    writer, _ = await seen_before(kube, clock)
    await kube.patch(GPU_NODES, "a", {"status": {"heartbeatTime": "2026-01-31T12:00:00Z"}}, subresource="status")
    before = len(kube.calls)
    written = await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    assert written.status.heartbeat_time == "2026-01-31T12:00:00Z"
    assert [call.verb for call in kube.calls[before:]] == ["patch"]


async def test_a_reservation_that_others_wrote_meanwhile_is_kept():
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a", 2))
    writer, informers = await seen_before(kube, clock)
    another = msgspec.to_builtins(tenant("y", ["GPU-a-1"]))
    await kube.patch(GPU_NODES, "a", {"spec": {"reservations": [another]}})
    await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    assert informers.cluster.nodes_holding("pod-x") == informers.cluster.nodes_holding("pod-y") == ["a"]


async def test_a_node_that_was_made_again_is_another():
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a", 2))
    writer, _ = await seen_before(kube, clock)
    made_again = kube.dump(GPU_NODES, "a")
    await kube.delete(GPU_NODES, "a")
    made_again["metadata"] = {"name": "a"}
    kube.seed(GPU_NODES, made_again)
    before = len(kube.calls)
    await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    assert [call.verb for call in kube.calls[before:]] == ["patch", "get", "patch"]


async def test_nobody_waits_once_the_last_try_has_failed():
    clock, slept = FakeClock(), []
    kube = FakeKube(clock)

    async def sleep(seconds):
        slept.append(seconds)

    for _ in range(ATTEMPTS):
        kube.fail_next("get", GPU_NODES, Unreachable("reset"))
    writer = ReservationWriter(kube, Informers(kube, clock, ClusterCache()), clock, sleep, gather_s=0)
    with pytest.raises(Unreachable):
        await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    assert [seconds for seconds in slept if seconds] == [FIRST_PAUSE_S * 2**i for i in range(ATTEMPTS - 1)]


async def test_what_comes_soon_after_a_write_is_gathered():
    clock = FakeClock()
    kube = FakeKube(clock)
    seed_node(kube, gpu_node("a", 3))
    informers = Informers(kube, clock, ClusterCache())
    writer = ReservationWriter(kube, informers, clock, clock.sleep, gather_s=0.1)
    await writer.read("a")
    await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    more = [asyncio.create_task(writer.change("a", adding(tenant(n, [f"GPU-a-{i}"])))) for i, n in ((1, "y"), (2, "z"))]
    await until(lambda: len(clock.sleeping) == 1)
    assert [call.verb for call in kube.calls] == ["get", "patch"]
    clock.advance(0.1)
    await asyncio.gather(*more)
    assert [call.verb for call in kube.calls] == ["get", "patch", "patch"]
    assert all(informers.cluster.nodes_holding(f"pod-{name}") == ["a"] for name in "xyz")


class Slow(FakeKube):
    """A server that takes its time over every write."""

    takes_s = 0.2

    async def patch(self, *args, **options):
        self.clock.advance(self.takes_s)
        return await super().patch(*args, **options)


async def slow(takes_s=0.2):
    """A book that knows a node of a slow server, and gathers."""
    clock = FakeClock()
    kube = Slow(clock)
    kube.clock, kube.takes_s = clock, takes_s
    seed_node(kube, gpu_node("a", 2, [tenant("old", ["GPU-a-1"])]))
    writer = ReservationWriter(kube, Informers(kube, clock, ClusterCache()), clock, clock.sleep, gather_s=0.1)
    await writer.read("a")
    return writer, kube, clock


@pytest.mark.parametrize(("takes_s", "gathers_s"), [(0.01, 0.1), (0.2, 0.8), (30.0, MOST_GATHERED_S)])
async def test_a_busy_server_is_written_to_less_often(takes_s, gathers_s):
    writer, _, clock = await slow(takes_s)
    await asyncio.gather(*(writer.change("a", adding(tenant(name, ["GPU-a-0"]))) for name in "xy"))
    await until(lambda: clock.sleeping != [])
    assert clock.sleeping == [pytest.approx(gathers_s)]


async def test_what_follows_a_single_slow_write_waits_for_no_longer():
    """Regression: the workers of a gang, one after the other, waited four times as long as their writes took."""
    writer, _, clock = await slow()
    await writer.change("a", adding(tenant("x", ["GPU-a-0"])))
    await until(lambda: clock.sleeping != [])
    assert clock.sleeping == [pytest.approx(0.1)]


async def test_what_was_freed_slowly_is_given_away_soon():
    """Regression: after a slow release the job that waited for it waited up to a second more."""
    writer, _, clock = await slow()
    await asyncio.gather(writer.change("a", adding(tenant("x", ["GPU-a-0"]))), writer.release("a", "pod-old"))
    await until(lambda: clock.sleeping != [])
    assert clock.sleeping == [pytest.approx(0.1)]


async def test_the_pauses_between_tries_make_no_server_slow():
    writer, kube, clock = await slow(takes_s=0.0)
    kube.fail_next("patch", GPU_NODES, Unreachable("reset"))
    both = [asyncio.create_task(writer.change("a", adding(tenant(name, ["GPU-a-0"])))) for name in "xy"]
    await until(lambda: clock.sleeping != [])
    clock.advance(FIRST_PAUSE_S)
    await asyncio.gather(*both)
    await until(lambda: clock.sleeping != [])
    assert clock.sleeping == [pytest.approx(0.1)]
