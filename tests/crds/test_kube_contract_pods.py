"""The same battery: pods are bound, told of by events, and tried again."""

from typing import Any

import msgspec
from carpool_core.clock import SystemClock
from carpool_core.kube.api import EVENTS, GPU_NODES, NODES, PODS, Selector
from carpool_core.kube.errors import Conflict, Invalid, NotFound
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from kube_backends import Backend, refused


async def test_binding_sets_the_node_and_the_annotations_once(backend: Backend) -> None:
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


async def test_binding_a_pod_that_is_not_there(backend: Backend) -> None:
    name = backend.name("none")
    body = {"metadata": {"name": name}, "target": {"name": "n1"}}
    await refused(NotFound, backend.api.create(PODS, body, namespace="default", name=name, subresource="binding"))


async def test_a_binding_names_its_pod(backend: Backend) -> None:
    await backend.pod("a")
    for metadata in ({}, {"name": "other"}):
        body = {"metadata": metadata, "target": {"name": "n1"}}
        call = backend.api.create(PODS, body, namespace="default", name=backend.name("a"), subresource="binding")
        await refused(Invalid, call, "does not match name in Binding object")


async def test_events_of_one_reason_are_one_event_with_a_count(backend: Backend) -> None:
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


async def test_events_of_cluster_scoped_objects_stand_in_default(backend: Backend) -> None:
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


async def test_a_node_can_be_touched(backend: Backend) -> None:
    await backend.api.create(NODES, {"metadata": {"name": backend.name("n")}})
    patch = {"metadata": {"annotations": {"carpool.dev/capacity-freed-at": "now"}}}
    node = await backend.api.patch(NODES, backend.name("n"), patch)
    assert node["metadata"]["annotations"]["carpool.dev/capacity-freed-at"] == "now"
    await backend.api.delete(NODES, backend.name("n"))
