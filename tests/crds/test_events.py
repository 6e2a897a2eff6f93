"""Events are for people, and are not to cost more than what they tell of."""

from carpool_core.kube.api import EVENTS, PODS
from carpool_core.kube.events import BURST, EVENTS_PER_SECOND, EventRecorder
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from structlog.testing import capture_logs


async def record(recorder, number, type_="Normal"):
    name = f"p{number}"
    await recorder.record(
        kind=PODS, namespace="default", name=name, uid=f"uid-{name}", type=type_, reason="Placed", message="placed"
    )


async def test_a_flood_of_normal_events_is_cut_and_goes_on_at_its_rate():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    for number in range(3 * int(BURST)):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST
    clock.advance(1)
    for number in range(1000, 1100):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST + EVENTS_PER_SECOND


async def test_after_a_pause_there_is_room_for_no_more_than_at_the_start():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    clock.advance(3600)
    for number in range(2 * int(BURST)):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST


async def test_warnings_are_never_left_out():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    for number in range(2 * int(BURST)):
        await record(recorder, number, "Warning")
    assert len(kube.dump_all(EVENTS)) == 2 * BURST


async def test_a_flood_is_told_of_when_it_begins_and_how_large_it_was_when_it_is_over():
    clock = FakeClock()
    recorder = EventRecorder(FakeKube(), clock, "test")
    with capture_logs() as logs:
        for number in range(int(BURST) + 5):
            await record(recorder, number)
        assert [log["event"] for log in logs] == ["dropping events"]
        clock.advance(1)
        for number in range(int(EVENTS_PER_SECOND) + 2):
            await record(recorder, number)
        assert len(logs) == 1, "once, while it lasts"
        clock.advance(3600)
        await record(recorder, 0)
        assert [(log["event"], log.get("number")) for log in logs[1:]] == [("events dropped", 7)]
        await record(recorder, 0)
        assert len(logs) == 2
