"""Which answers to binds are held, so that kube-scheduler can go on with the connections that it keeps."""

import asyncio

from carpool_core.testing.clock import FakeClock
from carpool_extender.connections import HELD_S, KEPT, Connections
from carpool_extender.testing import until
from extender_world import args, background


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_as_many_answers_go_out_at_once_as_connections_are_kept():
    clock = FakeClock()
    connections = Connections(clock.sleep)
    for _ in range(7):
        connections.taken()
    answers = [asyncio.create_task(connections.free()) for _ in range(7)]
    await turns()
    assert [answer.done() for answer in answers] == [True] * KEPT + [False] * (7 - KEPT)
    connections.taken()
    await turns()
    assert sum(answer.done() for answer in answers) == KEPT + 1
    clock.advance(HELD_S)
    await asyncio.gather(*answers)


async def test_a_single_bind_is_answered_at_once():
    clock = FakeClock()
    connections = Connections(clock.sleep)
    for _ in range(5):
        connections.taken()
        await connections.free()
    assert clock.sleeping == []


async def test_answers_whose_time_is_over_take_no_connection():
    clock = FakeClock()
    connections = Connections(clock.sleep)
    answers = [asyncio.create_task(connections.free()) for _ in range(KEPT + 3)]
    await turns()
    clock.advance(HELD_S)
    await asyncio.gather(*answers)
    connections.taken()
    await asyncio.wait_for(connections.free(), 1)
    held = asyncio.create_task(connections.free())
    await turns()
    assert not held.done()
    connections.taken()
    await held


async def test_pods_that_were_bound_together_are_not_answered_together_and_bad_news_do_not_wait(world):
    world.add("x", "y", "z", gpus=4)
    async with world.extender(held_s=HELD_S) as extender, background(world.agent.serve("a")):
        binds = [asyncio.create_task(extender.service.bind(args(name))) for name in "xyz"]
        await until(lambda: all(map(world.bound_to, "xyz")) and HELD_S in world.clock.sleeping)
        await turns()
        assert sum(bind.done() for bind in binds) == KEPT
        refused = asyncio.create_task(extender.service.bind(args("nobody")))
        await until(lambda: refused.done() and all(bind.done() for bind in binds))
        assert "no longer exists" in (await refused).error
        assert not any(bind.result().error for bind in binds)
