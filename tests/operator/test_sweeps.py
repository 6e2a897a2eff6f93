"""When all jobs are listed again."""

import asyncio

from carpool_core.kube.errors import Overloaded
from carpool_core.testing.clock import FakeClock
from carpool_operator.informers import Resync


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sweep_that_fails_is_repeated_after_growing_pauses() -> None:
    """Regression: it was repeated each second for as long as the API server could not answer."""
    clock, troubles = FakeClock(), 8

    async def sweep() -> None:
        nonlocal troubles
        troubles -= 1
        if troubles >= 0:
            raise Overloaded("etcd has no leader")

    sweeps = Resync(sweep, clock.sleep)
    running = asyncio.create_task(sweeps.run())
    sweeps.request()
    pauses = []
    while troubles >= 0:
        await turn()
        (pause_s,) = clock.sleeping
        pauses.append(pause_s)
        clock.advance(pause_s)
        await turn()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not sweeps.is_requested
    sweeps.request()
    await turn()
    assert clock.sleeping == [1], "after one that succeeded the pause is short again"
    running.cancel()
    await asyncio.wait([running])
