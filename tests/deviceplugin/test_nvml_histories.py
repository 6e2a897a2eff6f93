"""Random histories of one real GPU, with faults and sudden deaths of the agent in any call.

They end as wanted, or with a named refusal; as wanted where an agent to which nothing ever happened would say so.
`CARPOOL_HISTORIES=10000 pytest tests/deviceplugin/test_nvml_histories.py`
runs ten thousand.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from carpool_core.values import PartitionState, PodUid
from carpool_deviceplugin.testing.nvml_node import uid
from nvml_history import MPS, READY, History
from structlog.testing import capture_logs

HISTORIES, EVENTS, PARTS = int(os.environ.get("CARPOOL_HISTORIES", "450")), 12, 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with capture_logs():
        yield


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_history_ends_well(tmp_path: Path, part: int) -> None:
    for number in range(len(range(part, HISTORIES, PARTS))):
        seed = 1_000_000 * part + number
        history = History(seed, tmp_path / str(number))
        for _ in range(EVENTS):
            history.event()
            history.dangerous()
            await history.look()
            history.safe()
            history.check()
        await history.settle()
        for pod, outcome in history.worker.outcomes.items():
            assert outcome.state is READY or outcome.message, (seed, pod)
        for pod in list(history.running):
            history.end(pod)
        if history.takes_reset:
            history.restart_driver()
        is_possible = await history.is_ready_afresh(tmp_path / f"{number}-fresh")
        await history.settle()
        for pod in history.wanted:
            outcome = history.worker.outcomes[PodUid(uid(pod))]
            assert outcome.state in (READY, PartitionState.FAILED), (seed, pod, "nobody is waited for any more")
            assert outcome.state is READY or not is_possible, (seed, pod, outcome.message)
            if outcome.state is READY and history.wanted[pod].mode is MPS:
                assert not any(d.is_wedged for d in history.mps.daemons.values()), (seed, pod, "cannot connect")
                assert history.mps.daemons, (seed, pod, "cannot connect")
        history.wanted.clear()
        for _ in range(2):
            await history.look()
        actual = history.devices.actual(history.devices.uuids[0])
        assert (actual.mode, actual.mps_daemon, actual.limits, actual.problem) == (None, False, {}, ""), seed
        left = [i for i in history.mig.instances.values() if i is not history.foreign]
        assert left == [], (seed, "instances of nobody")
        assert not any(history.mps.servers_of.values()), (seed, "servers of no daemon")
