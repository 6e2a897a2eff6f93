"""Behaviour of the fake API server that a real one does not offer, and of the recorder of Events on it."""

import asyncio

import pytest
from carpool_core.kube.api import EVENTS, GPU_TRAINING_JOBS, PODS, Selector
from carpool_core.kube.errors import Gone, Overloaded, Unreachable
from carpool_core.kube.events import BURST, EVENTS_PER_SECOND, EventRecorder
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from structlog.testing import capture_logs


@pytest.fixture
def api() -> FakeKube:
    return FakeKube()


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
async def test_failure_happens_once_for_the_call_that_it_names(api: FakeKube, after: bool) -> None:
    api.fail_next("create", PODS, Unreachable("cut"), after=after, subresource="binding")
    await api.create(PODS, {"metadata": {"name": "a"}}, namespace="d")
    binding = {"metadata": {"name": "a"}, "target": {"name": "n"}}
    with pytest.raises(Unreachable, match="cut"):
        await api.create(PODS, binding, namespace="d", name="a", subresource="binding")
    assert ("nodeName" in api.dump(PODS, "a", "d").get("spec", {})) is after
    if not after:
        await api.create(PODS, binding, namespace="d", name="a", subresource="binding")


async def test_compaction_ends_watches_lists_and_old_versions(api: FakeKube) -> None:
    for name in "abc":
        api.seed(PODS, {"metadata": {"name": name}})
    page = await api.list_page(PODS, Selector(), limit=1)
    watch = api.watch(PODS, Selector(), page.resource_version)
    follow = asyncio.create_task(anext(watch))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    api.compact()
    with pytest.raises(Gone):
        await follow
    with pytest.raises(Gone):
        await api.list_page(PODS, Selector(), continue_token=page.continue_token)
    with pytest.raises(Gone, match="too old resource version"):
        await anext(api.watch(PODS, Selector(), page.resource_version))
    assert api.open_watches == 0


async def test_deleted_owner_takes_its_dependents_along(api: FakeKube) -> None:
    spec = {"template": {"spec": {}}}
    job = await api.create(GPU_TRAINING_JOBS, {"metadata": {"name": "j"}, "spec": spec}, namespace="d")
    owner = {"kind": "GpuTrainingJob", "name": "j", "uid": job["metadata"]["uid"], "controller": True}
    for name, owners in (("mine", [owner]), ("shared", [owner, {"uid": "other"}]), ("free", [])):
        await api.create(PODS, {"metadata": {"name": name, "ownerReferences": owners}}, namespace="d")
    await api.delete(GPU_TRAINING_JOBS, "j", namespace="d")
    assert [pod["metadata"]["name"] for pod in api.dump_all(PODS)] == ["free", "shared"]


# Events


async def _record(recorder: EventRecorder, number: int = 0, type_: str = "Normal") -> None:
    await recorder.record(
        kind=PODS, namespace="default", name=f"p{number}", uid=f"uid-{number}", type=type_,  # type: ignore[arg-type]
        reason="Placed", message="placed",
    )  # fmt: skip


async def test_events_are_counted_also_at_once_after_a_failure_and_after_they_expired(api: FakeKube) -> None:
    recorder = EventRecorder(api, FakeClock(), "test")
    api.fail_next("create", EVENTS, Overloaded("busy"))
    with capture_logs() as logs:
        await _record(recorder)
    assert [log["event"] for log in logs] == ["event not recorded"]
    await asyncio.gather(*(_record(recorder) for _ in range(5)))
    (event,) = api.dump_all(EVENTS)
    assert event["count"] == 5
    await api.delete(EVENTS, event["metadata"]["name"], namespace="default")
    await _record(recorder)
    assert [event["count"] for event in api.dump_all(EVENTS)] == [1]


@pytest.mark.parametrize(
    ("type_", "pause_s", "written"),
    [
        pytest.param("Normal", 0, BURST, id="normal events are limited to the burst"),
        pytest.param("Normal", 3600, BURST, id="a pause before saves nothing up"),
        pytest.param("Warning", 0, 3 * BURST, id="warnings are never dropped"),
    ],
)
async def test_flood_of_events_is_limited(api: FakeKube, type_: str, pause_s: float, written: float) -> None:
    clock = FakeClock()
    recorder = EventRecorder(api, clock, "test")
    clock.advance(pause_s)
    for number in range(3 * int(BURST)):
        await _record(recorder, number, type_)
    assert len(api.dump_all(EVENTS)) == written


async def test_flood_is_logged_when_it_begins_and_ends(api: FakeKube) -> None:
    clock = FakeClock()
    recorder = EventRecorder(api, clock, "test")
    with capture_logs() as logs:
        for number in range(int(BURST) + 5):
            await _record(recorder, number)
        clock.advance(1)
        for number in range(1000, 1000 + int(EVENTS_PER_SECOND) + 2):
            await _record(recorder, number)
        assert [log["event"] for log in logs] == ["dropping events"]
        assert len(api.dump_all(EVENTS)) == BURST + EVENTS_PER_SECOND
        clock.advance(3600)
        for _ in range(2):
            await _record(recorder)
        assert [(log["event"], log.get("number")) for log in logs[1:]] == [("events dropped", 7)]
