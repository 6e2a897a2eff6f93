"""Compare-and-swap on GpuNodes: batches, conflicts, lost answers, and releases of exactly what was judged."""

import asyncio

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, Overloaded, Unreachable
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import ATTEMPTS, FIRST_PAUSE_S, ReservationWriter
from carpool_extender.testing import gpu_node, seed_node, tenant, until
from msgspec.structs import replace

GATHER_S = 4.0
"""No pause between attempts is as long."""


def adding(*reservations):
    def decide(node):
        return replace(node.spec, reservations=[*node.spec.reservations, *reservations])

    return decide


X, Y, Z = (tenant(name, [f"GPU-a-{index}"]) for index, name in enumerate("xyz"))
UNREADABLE = replace(Y, reason="!" * 5000)


class Setup:
    """A writer, and one node on a server; `read` makes the writer's cache know the node."""

    def __init__(self, *reservations, gather_s=0.0):
        self.clock = FakeClock()
        self.kube = FakeKube(self.clock)
        seed_node(self.kube, gpu_node("a", 3, reservations))
        self.informers = Informers(self.kube, self.clock, ClusterCache())
        self.slept = []
        self.writer = ReservationWriter(self.kube, self.informers, self.sleep, gather_s)

    async def sleep(self, seconds):
        self.slept.append(seconds)
        await (self.clock.sleep(seconds) if seconds == GATHER_S else asyncio.sleep(0))

    async def read(self):
        await self.writer.read("a")
        self.kube.calls.clear()
        return self

    async def patch(self, spec):
        await self.kube.patch(GPU_NODES, "a", {"spec": {"reservations": msgspec.to_builtins(spec)}})
        self.kube.calls.clear()

    @property
    def held(self):
        return [one["podUid"] for one in self.kube.dump(GPU_NODES, "a").get("spec", {}).get("reservations", [])]

    @property
    def verbs(self):
        return [call.verb for call in self.kube.calls]


async def test_an_invalid_change_fails_alone_and_the_others_of_its_batch_are_written():
    """Regression: one reservation that no reader could decode kept every other of its batch from being written."""
    setup = Setup()
    changes = [setup.writer.change("a", adding(one)) for one in (X, UNREADABLE, Z)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert [isinstance(one, Invalid) for one in results] == [False, True, False]
    assert setup.held == ["pod-x", "pod-z"]


@pytest.mark.parametrize(("change", "error"), [(UNREADABLE, Invalid), (X, Forbidden)])
async def test_a_change_that_cannot_be_written_is_tried_once(change, error):
    setup = await Setup().read()
    if error is Forbidden:
        setup.kube.fail_next("patch", GPU_NODES, Forbidden("no right", status=403))
    with pytest.raises(error):
        await setup.writer.change("a", adding(change))
    assert setup.verbs == ([] if error is Invalid else ["patch"])


async def test_of_several_reservations_of_one_pod_only_the_first_counts_and_is_written():
    """Regression: a reservation that was copied by hand counted twice."""
    setup = Setup(X, replace(X, gpu_uuids=["GPU-a-1"]), Z)
    await setup.read()
    assert [one.gpu_uuids for one in setup.informers.cluster.node("a").spec.reservations] == [["GPU-a-0"], ["GPU-a-2"]]
    await setup.writer.release("a", Z)
    written = setup.kube.dump(GPU_NODES, "a")["spec"]["reservations"]
    assert [(one["podUid"], one["gpuUuids"]) for one in written] == [("pod-x", ["GPU-a-0"])]


async def test_a_status_report_is_no_conflict():
    """Regression: each reservation was written at about the time of a report on the one before, and was refused."""
    setup = await Setup().read()
    await setup.kube.patch(GPU_NODES, "a", {"status": {"agentVersion": "1.2"}}, subresource="status")
    setup.kube.calls.clear()
    written = await setup.writer.change("a", adding(X))
    assert written.status.agent_version == "1.2"
    assert setup.verbs == ["patch"]


@pytest.mark.parametrize("is_created_again", [False, True], ids=["written by another extender", "created again"])
async def test_a_change_is_decided_again_on_a_node_that_has_changed(is_created_again):
    setup = await Setup().read()
    if is_created_again:
        created_again = setup.kube.dump(GPU_NODES, "a") | {"metadata": {"name": "a"}}
        await setup.kube.delete(GPU_NODES, "a")
        setup.kube.seed(GPU_NODES, created_again)
        setup.kube.calls.clear()
    else:
        await setup.patch([Y])
    await setup.writer.change("a", adding(X))
    assert setup.held == (["pod-x"] if is_created_again else ["pod-y", "pod-x"])
    assert setup.verbs == ["patch", "get", "patch"]


async def test_a_change_whose_answer_was_lost_is_found_and_not_written_twice():
    setup = await Setup().read()
    setup.kube.fail_next("patch", GPU_NODES, Unreachable("reset"), after=True)

    def decide(node):
        return node.spec if node.spec.reservations else adding(X)(node)

    await setup.writer.change("a", decide)
    assert (setup.held, setup.verbs) == (["pod-x"], ["patch", "get"])


async def test_pauses_double_and_there_is_none_after_the_last_attempt():
    setup = Setup()
    for _ in range(ATTEMPTS):
        setup.kube.fail_next("get", GPU_NODES, Unreachable("reset"))
    with pytest.raises(Unreachable):
        await setup.writer.change("a", adding(X))
    assert [seconds for seconds in setup.slept if seconds] == [FIRST_PAUSE_S * 2**i for i in range(ATTEMPTS - 1)]


async def test_changes_that_come_soon_after_a_write_are_written_together():
    setup = await Setup(gather_s=GATHER_S).read()
    await setup.writer.change("a", adding(X))
    later = [asyncio.create_task(setup.writer.change("a", adding(one))) for one in (Y, Z)]
    await until(lambda: setup.clock.sleeping == [GATHER_S])
    assert setup.verbs == ["patch"]
    setup.clock.advance(GATHER_S)
    await asyncio.gather(*later)
    assert (setup.verbs, setup.held) == (["patch", "patch"], ["pod-x", "pod-y", "pod-z"])


@pytest.mark.parametrize(
    ("now", "left"),
    [
        pytest.param(X, [], id="unchanged"),
        pytest.param(replace(X, deadline="2026-01-31T13:00:00Z"), ["pod-x"], id="prolonged by a later bind"),
        pytest.param(replace(X, generation=7), ["pod-x"], id="another reservation of the same pod"),
        pytest.param(Y, ["pod-y"], id="released before"),
    ],
)
@pytest.mark.parametrize("error", [None, Conflict("changed", status=409), Overloaded("busy", status=429)])
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_release_removes_only_the_reservation_that_was_judged(now, left, error, is_known):
    """Regression: a release went by the pod's UID, and took what another extender had prolonged and bound meanwhile."""
    setup = await Setup(X).read()
    await setup.patch([now])
    if is_known:
        await setup.read()
    if error is not None:
        setup.kube.fail_next("patch", GPU_NODES, error)
    assert await setup.writer.release("a", X) == (left == [])
    assert setup.held == left


async def test_a_reservation_that_is_prolonged_while_its_release_is_written_stays():
    setup = await Setup(X).read()
    patch = setup.kube.patch

    async def prolonged_before(*args, **options):
        setup.kube.patch = patch
        await setup.patch([replace(X, deadline="2026-01-31T13:00:00Z")])
        return await patch(*args, **options)

    setup.kube.patch = prolonged_before
    assert not await setup.writer.release("a", X)
    assert setup.held == ["pod-x"]
    await setup.kube.delete(GPU_NODES, "a")
    assert not await setup.writer.release("a", X)
