"""Asking all GPUs of a node in as few threads as will do."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.rounds import Rounds
from carpool_deviceplugin.devices.threads import Threads

GPUS = [GpuUuid(f"GPU-{at}") for at in range(8)]


class Gpus:
    """GPUs that answer with the thread that asked them; some hang until `release` is set."""

    def __init__(self) -> None:
        self.hanging: set[GpuUuid] = set()
        self.release = threading.Event()
        self.asked: list[GpuUuid] = []

    def ask(self, uuid: GpuUuid) -> threading.Thread:
        self.asked.append(uuid)
        if uuid in self.hanging:
            self.release.wait(60)
        return threading.current_thread()


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    made = Gpus()
    yield made
    made.release.set()


async def test_well_gpus_are_asked_by_the_same_thread_round_after_round(gpus: Gpus) -> None:
    """A new thread for each call cost more than the calls."""
    rounds = Rounds(gpus.ask, 30, Threads())
    found = []
    for _ in range(20):
        found.append(await rounds.ask(GPUS))
        await asyncio.sleep(0.005)  # the thread that gave the last answer may still have to lie down
    assert [list(answers) for answers in found] == [GPUS] * 20
    assert all(len(set(answers.values())) == 1 for answers in found)
    used = {thread for answers in found for thread in answers.values()}
    assert len(used) <= len(found) / 2, "on a busy machine some may not have lain down in time"
    assert await rounds.ask([]) == {}


async def test_those_that_hang_hold_up_none_and_are_asked_no_more_until_they_answer(gpus: Gpus) -> None:
    gpus.hanging = {GPUS[0], GPUS[3], GPUS[7]}
    rounds = Rounds(gpus.ask, 1, Threads())
    found = await rounds.ask(GPUS)
    assert {uuid for uuid, answer in found.items() if isinstance(answer, DeviceError)} == gpus.hanging
    assert "GPU GPU-3: expected an answer within 1 s, found none" in str(found[GPUS[3]])
    gpus.asked.clear()
    again = await rounds.ask(GPUS)
    assert set(gpus.asked) == set(GPUS) - gpus.hanging
    assert "an earlier call has not come back yet" in str(again[GPUS[0]])
    hung, gpus.hanging = gpus.hanging, set()
    gpus.release.set()
    for _ in range(1000):
        well = await rounds.ask(sorted(hung))
        if not any(isinstance(answer, DeviceError) for answer in well.values()):
            break
        await asyncio.sleep(0.001)
    assert not any(isinstance(answer, DeviceError) for answer in well.values())


async def test_errors_are_that_gpus_alone_and_mistakes_are_raised(gpus: Gpus) -> None:
    def ask(uuid: GpuUuid) -> int:
        if uuid == GPUS[1]:
            raise DeviceError("GPU-1 is lost")
        if uuid == GPUS[5]:
            raise ZeroDivisionError
        return 1

    rounds = Rounds(ask, 30, Threads())
    found = await rounds.ask(GPUS[:3])
    assert (found[GPUS[0]], str(found[GPUS[1]]), found[GPUS[2]]) == (1, "GPU-1 is lost", 1)
    with pytest.raises(ZeroDivisionError):
        await rounds.ask(GPUS)


def test_thread_without_work_ends_and_work_given_meanwhile_is_done() -> None:
    """Each time the thread may just be ending: nothing that was given to it may be lost."""
    threads, done = Threads(idle_s=0.0005), threading.Semaphore(0)
    before = threading.active_count()
    for number in range(300):
        threads.run(done.release)
        assert done.acquire(timeout=10)
        threading.Event().wait(0.0001 * (number % 10))  # lets some threads end, and others not
    for _ in range(1000):
        if threading.active_count() <= before:
            break
        threading.Event().wait(0.005)
    assert threading.active_count() <= before
