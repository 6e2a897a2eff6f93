"""One of several processes leads: it renews a Lease, and another takes over when the Lease expires."""

import asyncio

import pytest
from carpool_core.kube.api import LEASES
from carpool_core.kube.errors import Conflict, Overloaded
from carpool_core.kube.leader import LEASE_S, RENEW_DEADLINE_S, TRY_S, LeaderElector, LeadershipLostError
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube


async def turns(number):
    for _ in range(number):
        await asyncio.sleep(0)


class World:
    """Processes on one API server; each pause lets the time pass."""

    def __init__(self):
        self.clock = FakeClock()
        self.kube = FakeKube(self.clock)

    async def sleep(self, seconds):
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def elector(self, identity):
        return LeaderElector(
            self.kube, self.clock, namespace="carpool", name="operator", identity=identity, sleep=self.sleep
        )

    @property
    def spec(self):
        return self.kube.dump(LEASES, "operator", "carpool")["spec"]


async def test_a_standby_leads_when_the_lease_was_not_renewed_in_time():
    world = World()
    await world.elector("a").acquire()
    assert (world.spec["holderIdentity"], world.spec["leaseDurationSeconds"]) == ("a", LEASE_S)
    began = world.clock.monotonic()
    await world.elector("b").acquire()
    assert LEASE_S <= world.clock.monotonic() - began <= LEASE_S + 2
    assert (world.spec["holderIdentity"], world.spec["leaseTransitions"]) == ("b", 2)


async def test_a_renewed_lease_is_not_taken_whatever_the_clock_of_its_holder():
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    renewing = asyncio.create_task(holder.renew())
    waiting = asyncio.create_task(world.elector("b").acquire())
    began = world.clock.monotonic()
    await turns(500)
    assert world.clock.monotonic() - began > 10 * LEASE_S
    assert not renewing.done()
    assert not waiting.done()
    assert world.spec["holderIdentity"] == "a"
    renewing.cancel()
    await waiting
    assert world.spec["holderIdentity"] == "b"


@pytest.mark.parametrize("identity", ["a", "b"])
async def test_a_restarted_process_and_one_after_a_release_lead_at_once(identity):
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    if identity == "b":
        await holder.release()
    now = world.clock.monotonic()
    await world.elector(identity).acquire()
    assert world.clock.monotonic() == now
    assert world.spec["holderIdentity"] == identity


async def test_a_holder_without_an_answer_stops_before_another_may_lead():
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    for _ in range(10):
        world.kube.fail_next("get", LEASES, Overloaded("busy", status=429))
    began = world.clock.monotonic()
    with pytest.raises(LeadershipLostError, match="carpool/operator was not renewed for 7 s"):
        await holder.renew()
    assert RENEW_DEADLINE_S <= world.clock.monotonic() - began < LEASE_S


async def test_a_holder_stops_when_another_leads_and_a_conflict_alone_ends_nothing():
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    world.kube.fail_next("patch", LEASES, Conflict("changed", status=409))
    renewing = asyncio.create_task(holder.renew())
    await turns(50)
    assert not renewing.done()
    await world.kube.patch(LEASES, "operator", {"spec": {"holderIdentity": "b"}}, namespace="carpool")
    with pytest.raises(LeadershipLostError, match="b leads now"):
        await renewing


async def test_one_failed_renewal_after_a_takeover_ends_nothing():
    """Regression: the previous holder counted as the present one until the first renewal."""
    world = World()
    await world.elector("a").acquire()
    holder = world.elector("b")
    await holder.acquire()
    world.kube.fail_next("get", LEASES, Overloaded("busy", status=429))
    renewing = asyncio.create_task(holder.renew())
    await turns(50)
    assert not renewing.done()
    assert world.spec["holderIdentity"] == "b"
    renewing.cancel()


async def test_a_holder_whose_answers_are_slow_stops_before_another_may_lead(monkeypatch):
    """Regression: the deadline counted from the answer to a renewal, others count from its arrival."""
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    write, arrived = world.kube.patch, []

    async def fail_late(*_, **__):
        world.clock.advance(TRY_S - 0.1)
        raise Overloaded("busy", status=429)

    async def write_and_answer_late(*args, **options):
        answer = await write(*args, **options)
        arrived.append(world.clock.monotonic())
        world.clock.advance(TRY_S)
        monkeypatch.setattr(world.kube, "get", fail_late)
        return answer

    monkeypatch.setattr(world.kube, "patch", write_and_answer_late)
    with pytest.raises(LeadershipLostError):
        await holder.renew()
    assert world.clock.monotonic() - arrived[-1] < LEASE_S


async def test_a_late_release_leaves_the_lease_of_another_holder():
    world = World()
    holder = world.elector("a")
    await holder.acquire()
    await world.elector("b").acquire()
    await holder.release()
    assert world.spec["holderIdentity"] == "b"
