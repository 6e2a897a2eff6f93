"""What the fake can do beyond the real server: lose answers, forget, be looked into."""

import asyncio
from typing import Any

import pytest
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS, Selector
from carpool_core.kube.errors import Conflict, Gone, Invalid, NotFound, Overloaded, Unreachable
from carpool_core.kube.events import EventRecorder
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import GpuNode, GpuNodeStatus
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube, PatchError, apply, merge, selects
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs


@pytest.fixture
def api() -> FakeKube:
    return FakeKube()


async def test_seeding_takes_types_with_their_status(api: FakeKube) -> None:
    api.seed(GPU_NODES, GpuNode(metadata=ObjectMeta(name="n1"), status=GpuNodeStatus(simulated=True)))
    stored = api.dump(GPU_NODES, "n1")
    assert stored["status"] == {"simulated": True}
    assert stored["kind"] == "GpuNode"
    assert (await api.get(GPU_NODES, "n1", GpuNode)).status.simulated


async def test_seeding_again_replaces_and_is_told_as_a_change(api: FakeKube) -> None:
    api.seed(PODS, {"metadata": {"name": "a"}})
    watch = api.watch(PODS, Selector(), "0")
    api.seed(PODS, {"metadata": {"name": "a", "labels": {"x": "y"}}})
    assert [(await anext(watch)).type for _ in range(2)] == ["ADDED", "MODIFIED"]


async def test_what_is_read_is_a_copy(api: FakeKube) -> None:
    api.seed(PODS, {"metadata": {"name": "a"}})
    api.dump(PODS, "a")["metadata"]["name"] = "changed"
    api.dump_all(PODS)[0]["metadata"]["name"] = "changed"
    assert api.dump(PODS, "a")["metadata"]["name"] == "a"


async def test_a_failure_comes_once_and_before_the_write(api: FakeKube) -> None:
    api.fail_next("create", PODS, Overloaded("busy"))
    with pytest.raises(Overloaded, match="busy"):
        await api.create(PODS, {"metadata": {"name": "a"}}, namespace="d")
    with pytest.raises(NotFound):
        api.dump(PODS, "a", "d")
    await api.create(PODS, {"metadata": {"name": "a"}}, namespace="d")


async def test_an_answer_that_got_lost(api: FakeKube) -> None:
    api.fail_next("create", PODS, Unreachable("reset"), after=True)
    with pytest.raises(Unreachable):
        await api.create(PODS, {"metadata": {"name": "a"}}, namespace="d")
    assert api.dump(PODS, "a", "d")


async def test_a_failure_of_a_subresource_leaves_the_object_alone(api: FakeKube) -> None:
    api.seed(PODS, {"metadata": {"name": "a", "namespace": "d"}})
    api.fail_next("create", PODS, Unreachable("cut"), subresource="binding")
    await api.create(PODS, {"metadata": {"name": "b"}}, namespace="d")
    with pytest.raises(Unreachable):
        await api.create(PODS, {"target": {"name": "n"}}, namespace="d", name="a", subresource="binding")


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


async def test_what_a_job_owns_goes_with_it(api: FakeKube) -> None:
    spec = {"template": {"spec": {}}}
    job = await api.create(GPU_TRAINING_JOBS, {"metadata": {"name": "j"}, "spec": spec}, namespace="d")
    owner = {"kind": "GpuTrainingJob", "name": "j", "uid": job["metadata"]["uid"], "controller": True}
    for name, owners in (("mine", [owner]), ("shared", [owner, {"uid": "other"}]), ("free", [])):
        await api.create(PODS, {"metadata": {"name": name, "ownerReferences": owners}}, namespace="d")
    await api.delete(GPU_TRAINING_JOBS, "j", namespace="d")
    assert [pod["metadata"]["name"] for pod in api.dump_all(PODS)] == ["free", "shared"]


async def test_generated_names(api: FakeKube) -> None:
    made = await api.create(PODS, {"metadata": {"generateName": "p-"}}, namespace="d")
    assert made["metadata"]["name"].startswith("p-")
    with pytest.raises(Invalid, match="name or generateName is required"):
        await api.create(PODS, {"metadata": {}}, namespace="d")


async def test_no_such_endpoint(api: FakeKube) -> None:
    api.seed(PODS, {"metadata": {"name": "a", "namespace": "d"}})
    with pytest.raises(NotFound):
        await api.create(PODS, {}, namespace="d", name="a", subresource="ephemeralcontainers")
    with pytest.raises(NotFound):
        await api.patch(EVENTS, "a", {}, namespace="d", subresource="status")


async def test_identity_cannot_be_patched(api: FakeKube) -> None:
    api.seed(PODS, {"metadata": {"name": "a", "namespace": "d"}})
    with pytest.raises(Invalid, match="the name of the object does not match"):
        await api.patch(PODS, "a", {"metadata": {"name": "b"}}, namespace="d")
    with pytest.raises(Conflict):
        await api.patch(PODS, "a", {"metadata": {"uid": "b"}}, namespace="d")


def test_a_selector_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="cannot read the selector"):
        selects(Selector(labels="a=b c"), {})


async def test_a_lost_event_is_logged_and_nothing_else(api: FakeKube) -> None:
    api.fail_next("create", EVENTS, Overloaded("busy"))
    recorder = EventRecorder(api, FakeClock(), "test")
    with capture_logs() as logs:
        await recorder.record(
            kind=PODS, namespace="d", name="a", uid="u", type="Normal", reason="Bound", message="to n1"
        )
    assert [log["event"] for log in logs] == ["event not recorded"]
    await recorder.record(kind=PODS, namespace="d", name="a", uid="u", type="Normal", reason="Bound", message="to n1")
    assert [event["count"] for event in api.dump_all(EVENTS)] == [1]


async def test_an_event_that_the_server_has_dropped_begins_anew(api: FakeKube) -> None:
    recorder = EventRecorder(api, FakeClock(), "test")
    for _ in range(2):
        await recorder.record(kind=PODS, namespace="d", name="a", uid="u", type="Normal", reason="R", message="m")
    (event,) = api.dump_all(EVENTS)
    await api.delete(EVENTS, event["metadata"]["name"], namespace="d")
    await recorder.record(kind=PODS, namespace="d", name="a", uid="u", type="Normal", reason="R", message="m")
    assert [event["count"] for event in api.dump_all(EVENTS)] == [1]


async def test_events_at_the_same_moment_are_all_counted(api: FakeKube) -> None:
    recorder = EventRecorder(api, FakeClock(), "test")
    await asyncio.gather(
        *(
            recorder.record(kind=PODS, namespace="d", name="a", uid="u", type="Normal", reason="R", message=f"{i}")
            for i in range(5)
        )
    )
    assert [event["count"] for event in api.dump_all(EVENTS)] == [5]


async def test_sleepers_wake_when_their_time_has_come() -> None:
    clock = FakeClock()
    tasks = [asyncio.create_task(clock.sleep(seconds)) for seconds in (5, 1, 0)]
    await asyncio.sleep(0)
    assert clock.sleeping == [1, 5]
    clock.advance(2)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, True, True]
    clock.advance(3)
    await asyncio.gather(*tasks)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(max_size=3), JSON, max_size=4)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


@given(OBJECT, OBJECT)
def test_merging_twice_is_merging_once(target: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge(target, patch)
    assert merge(once, patch) == once


@given(OBJECT)
def test_merging_into_nothing_keeps_all_but_nulls(patch: dict[str, Any]) -> None:
    assert merge({}, patch) == _without_nulls(patch)


@given(OBJECT)
def test_an_empty_patch_changes_nothing(target: dict[str, Any]) -> None:
    assert merge(target, {}) == target
    assert apply(target, []) == target


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "add", "path": "/b", "value": 2}, {"a": [1, 2], "b": 2}),
        ({"op": "add", "path": "/a/1", "value": 9}, {"a": [1, 9, 2]}),
        ({"op": "add", "path": "/a/-", "value": 9}, {"a": [1, 2, 9]}),
        ({"op": "replace", "path": "/a/0", "value": 9}, {"a": [9, 2]}),
        ({"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"op": "remove", "path": "/a"}, {}),
        ({"op": "copy", "from": "/a/0", "path": "/a~1b"}, {"a": [1, 2], "a/b": 1}),
        ({"op": "move", "from": "/a/0", "path": "/c"}, {"a": [2], "c": 1}),
        ({"op": "replace", "path": "", "value": {"x": 1}}, {"x": 1}),
        ({"op": "test", "path": "/a/1", "value": 2}, {"a": [1, 2]}),
    ],
    ids=lambda value: str(value.get("op", "")) + str(value.get("path", "")),
)
def test_operations(operation: dict[str, Any], expected: dict[str, Any]) -> None:
    before = {"a": [1, 2]}
    assert apply(before, [operation]) == expected
    assert before == {"a": [1, 2]}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a/0", "value": 7},
        {"op": "test", "path": "/missing", "value": None},
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "add", "path": "/missing/deep", "value": 1},
        {"op": "add", "path": "/a/7", "value": 1},
        {"op": "replace", "path": "/a/2", "value": 1},
        {"op": "add", "path": "/a/0/deep", "value": 1},
        {"op": "add", "path": "a", "value": 1},
        {"op": "shake", "path": "/a"},
    ],
)
def test_what_does_not_apply(operation: dict[str, Any]) -> None:
    with pytest.raises(PatchError):
        apply({"a": [1, 2]}, [operation])
