"""One battery over every backend of `KubeApi`: the fake behaves as the real API server does."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from carpool_core.clock import SystemClock
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS, Selector
from carpool_core.kube.errors import PATCH_DOES_NOT_APPLY, Conflict, Invalid, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from kube_backends import CONTAINERS, Backend, refused, reservation


async def test_created_object_can_be_read(backend: Backend) -> None:
    created = await backend.pod("a")
    pod = await backend.api.get(PODS, backend.name("a"), Pod, namespace="default")
    assert pod.metadata.uid == created["metadata"]["uid"] != ""
    assert pod.metadata.resource_version == created["metadata"]["resourceVersion"]
    assert (pod.metadata.namespace, pod.status.phase) == ("default", "Pending")
    assert pod.metadata.creation_timestamp


async def test_taken_name_conflicts(backend: Backend) -> None:
    await backend.pod("a")
    await refused(Conflict, backend.pod("a"), "already exists")


async def test_missing_object_is_not_found(backend: Backend) -> None:
    api, name = backend.api, backend.name("none")
    await refused(NotFound, api.get(GPU_NODES, name, GpuNode), f'"{name}" not found')
    await refused(NotFound, api.patch(GPU_NODES, name, {}), "not found")
    await refused(NotFound, api.delete(PODS, name, namespace="default"), "not found")


async def test_malformed_object_is_invalid(backend: Backend) -> None:
    """Regression: the fake raised what the client never does, so error handling was not tested."""

    class Odd(msgspec.Struct):
        kind: int

    await backend.node()
    name = backend.name("n")
    await refused(Invalid, backend.api.get(GPU_NODES, name, Odd), f"GET gpunodes {name}: unexpected object: ", "kind")


async def test_merge_patch_of_an_old_version_conflicts(backend: Backend) -> None:
    node = await backend.node()
    old = {"resourceVersion": node["metadata"]["resourceVersion"]}
    name = backend.name("n")
    new = await backend.api.patch(GPU_NODES, name, {"metadata": old, "spec": {"reservations": [reservation("a")]}})
    assert new["metadata"]["generation"] == 2
    late = backend.api.patch(GPU_NODES, name, {"metadata": old, "spec": {"reservations": [reservation("b")]}})
    await refused(Conflict, late, "the object has been modified")
    stored = await backend.api.get(GPU_NODES, name, GpuNode)
    assert [r.pod_uid for r in stored.spec.reservations] == ["a"]


async def test_dry_run_stores_nothing(backend: Backend) -> None:
    body = {"metadata": {"name": backend.name("dry")}, "spec": {"containers": CONTAINERS}}
    answer = await backend.api.create(PODS, body, namespace="default", is_dry_run=True)
    assert answer["metadata"]["name"] == backend.name("dry")
    with pytest.raises(NotFound):
        await backend.api.get(PODS, backend.name("dry"), Pod, namespace="default")


async def test_patch_without_change_keeps_the_version(backend: Backend) -> None:
    node = await backend.node()
    again = await backend.api.patch(GPU_NODES, backend.name("n"), {"spec": {}})
    assert again["metadata"]["resourceVersion"] == node["metadata"]["resourceVersion"]


async def test_null_in_a_merge_patch_removes_the_key(backend: Backend) -> None:
    await backend.pod("a", annotations={"x": "1", "y": "2"})
    new = await backend.api.patch(
        PODS, backend.name("a"), {"metadata": {"annotations": {"x": None, "z": "3"}}}, namespace="default"
    )
    assert new["metadata"]["annotations"] == {"y": "2", "z": "3"}


async def test_json_patch_is_atomic(backend: Backend) -> None:
    await backend.pod("a", annotations={"x": "1"})
    name = backend.name("a")

    def patch(expected: str) -> Any:
        add = {"op": "add", "path": "/metadata/annotations/new~1key", "value": "2"}
        test = {"op": "test", "path": "/metadata/annotations/x", "value": expected}
        return backend.api.patch(PODS, name, [add, test], namespace="default")

    await refused(Invalid, patch("other"), PATCH_DOES_NOT_APPLY)
    assert "new/key" not in (await backend.api.get(PODS, name, Pod, namespace="default")).metadata.annotations
    assert (await patch("1"))["metadata"]["annotations"] == {"x": "1", "new/key": "2"}


async def test_write_can_return_metadata_only(backend: Backend) -> None:
    name = backend.name("n")
    made = await backend.api.create(GPU_NODES, {"metadata": {"name": name}, "spec": {}}, wants_object=False)
    patch = {"status": {"agentVersion": "1"}}
    written = await backend.api.patch(GPU_NODES, name, patch, subresource="status", wants_object=False)
    for answer in (made, written):
        assert {*answer} == {"apiVersion", "kind", "metadata"}
    assert made["metadata"]["uid"] == written["metadata"]["uid"]
    found = await backend.api.get(GPU_NODES, name, GpuNode)
    assert found.metadata.resource_version == written["metadata"]["resourceVersion"]
    assert found.status.agent_version == "1"


async def test_status_is_replaced_as_a_whole(backend: Backend) -> None:
    name = backend.name("j")
    spec = {"template": {"spec": {"containers": CONTAINERS}}, "memory": {"limit": "1Gi"}}
    body = {"metadata": {"name": name, "labels": {"a": "b"}, "finalizers": ["carpool.dev/test"]}, "spec": spec}
    made = (await backend.api.create(GPU_TRAINING_JOBS, body, namespace="default"))["metadata"]

    def replace(status: dict[str, Any], version: str) -> Any:
        return backend.api.replace_status(
            GPU_TRAINING_JOBS, name, status, namespace="default", resource_version=version
        )

    first = await replace(
        {"state": "Queued", "restarts": 1, "startTime": "2026-01-31T12:00:00Z"}, made["resourceVersion"]
    )
    assert {*first} == {"apiVersion", "kind", "metadata"}
    await refused(Conflict, replace({"state": "Failed"}, made["resourceVersion"]))
    await replace({"state": "Running"}, first["metadata"]["resourceVersion"])
    found = await backend.api.get(GPU_TRAINING_JOBS, name, dict[str, Any], namespace="default")
    assert found["status"] == {"state": "Running"}
    assert found["spec"]["memory"] == {"limit": "1Gi"}
    assert found["metadata"]["labels"] == {"a": "b"}
    assert found["metadata"]["finalizers"] == ["carpool.dev/test"]
    assert found["metadata"]["generation"] == made["generation"]
    await refused(
        NotFound, backend.api.replace_status(GPU_TRAINING_JOBS, "none", {}, namespace="default", resource_version="1")
    )
    await backend.api.patch(GPU_TRAINING_JOBS, name, {"metadata": {"finalizers": None}}, namespace="default")


async def test_status_and_spec_are_separate_endpoints(backend: Backend) -> None:
    await backend.node()
    name = backend.name("n")
    both = {"spec": {"reservations": [reservation("a")]}, "status": {"agentVersion": "1"}}
    after_main = await backend.api.patch(GPU_NODES, name, both)
    assert "agentVersion" not in after_main.get("status", {})
    after_status = await backend.api.patch(
        GPU_NODES, name, {"spec": {"reservations": []}, "status": {"agentVersion": "2"}}, subresource="status"
    )
    assert after_status["status"]["agentVersion"] == "2"
    assert len(after_status["spec"]["reservations"]) == 1
    assert after_status["metadata"]["generation"] == after_main["metadata"]["generation"]


async def test_status_is_ignored_at_creation(backend: Backend) -> None:
    spec = {"template": {"spec": {"containers": CONTAINERS}}}
    body = {"metadata": {"name": backend.name("j")}, "spec": spec, "status": {"state": "Running"}}
    await backend.api.create(GPU_TRAINING_JOBS, body, namespace="default")
    job = await backend.api.get(GPU_TRAINING_JOBS, backend.name("j"), GpuTrainingJob, namespace="default")
    assert job.status.state == "Predicting"
    assert job.spec.sharing.max_slowdown == 1.5


@pytest.mark.parametrize(("precondition", "other"), [("uid", "other"), ("resource_version", "123456789")])
async def test_delete_checks_its_preconditions(backend: Backend, precondition: str, other: str) -> None:
    meta = (await backend.pod("a"))["metadata"]
    name, found = backend.name("a"), {"uid": meta["uid"], "resource_version": meta["resourceVersion"]}
    await refused(
        Conflict, backend.api.delete(PODS, name, namespace="default", **(found | {precondition: other})), other
    )
    await backend.api.delete(PODS, name, namespace="default", **found)
    await refused(NotFound, backend.api.get(PODS, name, Pod, namespace="default"))


async def test_finalizer_delays_deletion(backend: Backend) -> None:
    await backend.pod("a", finalizers=["carpool.dev/test"])
    name = backend.name("a")
    await backend.api.delete(PODS, name, namespace="default")
    assert (await backend.api.get(PODS, name, Pod, namespace="default")).metadata.deletion_timestamp
    await backend.api.patch(PODS, name, {"metadata": {"finalizers": None}}, namespace="default")
    await refused(NotFound, backend.api.get(PODS, name, Pod, namespace="default"))


async def test_binding_sets_node_and_annotations_once(backend: Backend) -> None:
    pod = await backend.pod("a", annotations={"mine": "1"})
    name = backend.name("a")

    def bind(node: str, uid: str) -> Any:
        body = {"metadata": {"name": name, "uid": uid, "annotations": {"carpool.dev/mode": "MPS"}},
                "target": {"kind": "Node", "name": node}}  # fmt: skip
        return backend.api.create(PODS, body, namespace="default", name=name, subresource="binding")

    await refused(Conflict, bind("n1", "another-uid"), "another-uid")
    await bind("n1", pod["metadata"]["uid"])
    bound = await backend.api.get(PODS, name, Pod, namespace="default")
    assert bound.spec.node_name == "n1"
    assert bound.metadata.annotations == {"mine": "1", "carpool.dev/mode": "MPS"}
    assert [(c.type, c.status) for c in bound.status.conditions] == [("PodScheduled", "True")]
    await refused(Conflict, bind("n2", pod["metadata"]["uid"]), 'already assigned to node "n1"')


async def test_binding_of_a_missing_pod_is_not_found(backend: Backend) -> None:
    name = backend.name("none")
    body = {"metadata": {"name": name}, "target": {"name": "n1"}}
    await refused(NotFound, backend.api.create(PODS, body, namespace="default", name=name, subresource="binding"))


async def test_binding_must_name_its_pod(backend: Backend) -> None:
    await backend.pod("a")
    for metadata in ({}, {"name": "other"}):
        body = {"metadata": metadata, "target": {"name": "n1"}}
        call = backend.api.create(PODS, body, namespace="default", name=backend.name("a"), subresource="binding")
        await refused(Invalid, call, "does not match name in Binding object")


async def test_events_of_one_reason_are_counted(backend: Backend) -> None:
    pod = await backend.pod("a")

    async def record(recorder: EventRecorder, message: str, reason: str = "NoGpuFits") -> None:
        await recorder.record(
            kind=PODS, namespace="default", name=backend.name("a"), uid=pod["metadata"]["uid"], type="Warning",
            reason=reason, message=message,
        )  # fmt: skip

    first = EventRecorder(backend.api, SystemClock(), "carpool-test")
    await record(first, "needs 1 MiB")
    await record(first, "needs 2 MiB")
    restarted = EventRecorder(backend.api, SystemClock(), "carpool-test")
    await record(restarted, "needs 3 MiB")
    await record(restarted, "other", reason="Released")
    uid = pod["metadata"]["uid"]
    page = await backend.api.list_page(EVENTS, Selector("default", fields=f"involvedObject.uid={uid}"))
    events = {e["reason"]: e for e in (msgspec.json.decode(raw) for raw in page.items)}
    assert (events["NoGpuFits"]["count"], events["NoGpuFits"]["message"]) == (3, "needs 3 MiB")
    assert events["NoGpuFits"]["source"]["component"] == "carpool-test"
    assert (events["Released"]["count"], len(events)) == (1, 2)


async def test_events_of_cluster_scoped_objects_go_to_default(backend: Backend) -> None:
    node = await backend.node()
    recorder = EventRecorder(backend.api, SystemClock(), "carpool-test")
    await recorder.record(
        kind=GPU_NODES, namespace="", name=backend.name("n"), uid=node["metadata"]["uid"], type="Normal",
        reason="Reserved", message="x" * 2000,
    )  # fmt: skip
    uid = node["metadata"]["uid"]
    page = await backend.api.list_page(EVENTS, Selector("default", fields=f"involvedObject.uid={uid}"))
    (event,) = (msgspec.json.decode(raw) for raw in page.items)
    assert len(event["message"]) == 1024
    assert event["involvedObject"]["apiVersion"] == "carpool.dev/v1alpha1"


async def test_list_has_pages(backend: Backend) -> None:
    for i in range(5):
        await backend.pod(f"p{i}")
    names, token = [], ""
    for _ in range(3):
        page = await backend.api.list_page(PODS, backend.selector, limit=2, continue_token=token)
        names += [msgspec.json.decode(raw, type=Pod).metadata.name for raw in page.items]
        token = page.continue_token
    assert names == [backend.name(f"p{i}") for i in range(5)]
    assert token == ""


@pytest.mark.parametrize(
    ("labels", "fields", "found"),
    [
        ("tag={tag},worker=1", "", ["b"]),
        ("tag={tag},worker!=1", "", ["a", "c"]),
        ("tag={tag},worker", "", ["b", "c"]),
        ("tag={tag}", "spec.nodeName=n1", ["c"]),
        ("tag={tag}", "spec.nodeName!=n1,spec.schedulerName=other", ["a", "b"]),
        ("tag={tag}", "status.phase=Pending,metadata.name=a-{tag}", ["a"]),
    ],
)
async def test_selectors_select(backend: Backend, labels: str, fields: str, found: list[str]) -> None:
    for text, worker, node in (("a", None, ""), ("b", "1", ""), ("c", "2", "n1")):
        own = {"tag": backend.tag} | ({"worker": worker} if worker else {})
        pod = await backend.pod(text, labels=own)
        if node:
            body = {"metadata": {"name": backend.name(text), "uid": pod["metadata"]["uid"]}, "target": {"name": node}}
            await backend.api.create(PODS, body, namespace="default", name=backend.name(text), subresource="binding")
    selector = Selector("default", labels.format(tag=backend.tag), fields.format(tag=backend.tag))
    page = await backend.api.list_page(PODS, selector)
    names = [msgspec.json.decode(raw, type=Pod).metadata.name for raw in page.items]
    assert names == [backend.name(text) for text in found]


async def test_watch_reports_entering_and_leaving_objects(backend: Backend) -> None:
    page = await backend.api.list_page(PODS, backend.selector)
    pod = await backend.pod("a")
    name = backend.name("a")
    events = backend.api.watch(PODS, Selector("default", f"tag={backend.tag}", "spec.nodeName="), page.resource_version)
    events_seen: list[tuple[str, str]] = []

    async def follow(count: int) -> None:
        while len(events_seen) < count:
            event = await anext(events)
            if event.type != "BOOKMARK":
                events_seen.append((event.type, msgspec.json.decode(event.object, type=Pod).metadata.name))

    await asyncio.wait_for(follow(1), 60)
    await backend.api.patch(PODS, name, {"metadata": {"annotations": {"a": "b"}}}, namespace="default")
    body = {"metadata": {"name": name, "uid": pod["metadata"]["uid"]}, "target": {"name": "n1"}}
    await backend.api.create(PODS, body, namespace="default", name=name, subresource="binding")
    await asyncio.wait_for(follow(3), 60)
    assert events_seen == [("ADDED", name), ("MODIFIED", name), ("DELETED", name)]
    await events.aclose()  # type: ignore[attr-defined]


async def test_reflector_follows_a_server(backend: Backend) -> None:
    changed = asyncio.Event()
    reflector = Reflector(
        backend.api, PODS, Pod, selector=backend.selector, clock=SystemClock(), on_change=lambda *_: changed.set()
    )
    task = asyncio.create_task(reflector.run())

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            changed.clear()
            await changed.wait()

    await asyncio.wait_for(reflector.wait_synced(), 60)
    await backend.pod("a")
    await asyncio.wait_for(until(lambda: len(reflector.store.items) == 1), 60)
    await backend.api.delete(PODS, backend.name("a"), namespace="default")
    await asyncio.wait_for(until(lambda: not reflector.store.items), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
