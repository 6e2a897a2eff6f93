"""One battery over every backend of `KubeApi`: what the fake does, the real API server does. Objects are written."""

from typing import Any

import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import PATCH_DOES_NOT_APPLY, Conflict, Invalid, NotFound
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from kube_backends import CONTAINERS, Backend, refused, reservation


async def test_what_is_created_can_be_read(backend: Backend) -> None:
    created = await backend.pod("a")
    pod = await backend.api.get(PODS, backend.name("a"), Pod, namespace="default")
    assert pod.metadata.uid == created["metadata"]["uid"] != ""
    assert pod.metadata.resource_version == created["metadata"]["resourceVersion"]
    assert (pod.metadata.namespace, pod.status.phase) == ("default", "Pending")
    assert pod.metadata.creation_timestamp


async def test_a_name_is_taken_once(backend: Backend) -> None:
    await backend.pod("a")
    await refused(Conflict, backend.pod("a"), "already exists")


async def test_what_is_not_there(backend: Backend) -> None:
    api, name = backend.api, backend.name("none")
    await refused(NotFound, api.get(GPU_NODES, name, GpuNode), f'"{name}" not found')
    await refused(NotFound, api.patch(GPU_NODES, name, {}), "not found")
    await refused(NotFound, api.delete(PODS, name, namespace="default"), "not found")


async def test_what_is_not_as_its_type_says(backend: Backend) -> None:
    """Regression: the fake raised what the client never does, and nobody saw what becomes of it."""

    class Odd(msgspec.Struct):
        kind: int

    await backend.node()
    name = backend.name("n")
    await refused(Invalid, backend.api.get(GPU_NODES, name, Odd), f"GET gpunodes {name}: unexpected object: ", "kind")


async def test_a_merge_patch_with_an_old_version_isrefused(backend: Backend) -> None:
    node = await backend.node()
    old = {"resourceVersion": node["metadata"]["resourceVersion"]}
    name = backend.name("n")
    new = await backend.api.patch(GPU_NODES, name, {"metadata": old, "spec": {"reservations": [reservation("a")]}})
    assert new["metadata"]["generation"] == 2
    late = backend.api.patch(GPU_NODES, name, {"metadata": old, "spec": {"reservations": [reservation("b")]}})
    await refused(Conflict, late, "the object has been modified")
    stored = await backend.api.get(GPU_NODES, name, GpuNode)
    assert [r.pod_uid for r in stored.spec.reservations] == ["a"]


async def test_a_dry_run_leaves_nothing_behind(backend: Backend) -> None:
    body = {"metadata": {"name": backend.name("dry")}, "spec": {"containers": CONTAINERS}}
    answer = await backend.api.create(PODS, body, namespace="default", is_dry_run=True)
    assert answer["metadata"]["name"] == backend.name("dry")
    with pytest.raises(NotFound):
        await backend.api.get(PODS, backend.name("dry"), Pod, namespace="default")


async def test_a_patch_that_changes_nothing_is_no_new_version(backend: Backend) -> None:
    node = await backend.node()
    again = await backend.api.patch(GPU_NODES, backend.name("n"), {"spec": {}})
    assert again["metadata"]["resourceVersion"] == node["metadata"]["resourceVersion"]


async def test_null_in_a_merge_patch_removes(backend: Backend) -> None:
    await backend.pod("a", annotations={"x": "1", "y": "2"})
    new = await backend.api.patch(
        PODS, backend.name("a"), {"metadata": {"annotations": {"x": None, "z": "3"}}}, namespace="default"
    )
    assert new["metadata"]["annotations"] == {"y": "2", "z": "3"}


async def test_a_json_patch_applies_wholly_or_not(backend: Backend) -> None:
    await backend.pod("a", annotations={"x": "1"})
    name = backend.name("a")

    def patch(expected: str) -> Any:
        return backend.api.patch(
            PODS,
            name,
            [
                {"op": "add", "path": "/metadata/annotations/new~1key", "value": "2"},
                {"op": "test", "path": "/metadata/annotations/x", "value": expected},
            ],
            namespace="default",
        )

    await refused(Invalid, patch("other"), PATCH_DOES_NOT_APPLY)
    assert "new/key" not in (await backend.api.get(PODS, name, Pod, namespace="default")).metadata.annotations
    assert (await patch("1"))["metadata"]["annotations"] == {"x": "1", "new/key": "2"}


async def test_nobody_keeps_track_of_the_writers_of_fields_once_that_was_asked_for(backend: Backend) -> None:
    await backend.node()
    name = backend.name("n")
    after = await backend.api.patch(GPU_NODES, name, [{"op": "add", "path": "/metadata/managedFields", "value": [{}]}])
    assert "managedFields" not in after["metadata"]
    later = await backend.api.patch(GPU_NODES, name, {"status": {"agentVersion": "1"}}, subresource="status")
    assert "managedFields" not in later["metadata"]


async def test_whoever_does_not_want_the_object_hears_of_its_metadata(backend: Backend) -> None:
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


async def test_a_status_is_replaced_as_a_whole_and_nothing_else(backend: Backend) -> None:
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


async def test_status_and_spec_are_written_apart(backend: Backend) -> None:
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


async def test_status_is_not_taken_at_creation(backend: Backend) -> None:
    spec = {"template": {"spec": {"containers": CONTAINERS}}}
    body = {"metadata": {"name": backend.name("j")}, "spec": spec, "status": {"state": "Running"}}
    await backend.api.create(GPU_TRAINING_JOBS, body, namespace="default")
    job = await backend.api.get(GPU_TRAINING_JOBS, backend.name("j"), GpuTrainingJob, namespace="default")
    assert job.status.state == "Predicting"
    assert job.spec.sharing.max_slowdown == 1.5


async def test_a_delete_of_another_identity_isrefused(backend: Backend) -> None:
    pod = await backend.pod("a")
    name = backend.name("a")
    await refused(Conflict, backend.api.delete(PODS, name, namespace="default", uid="other"), "other")
    await backend.api.delete(PODS, name, namespace="default", uid=pod["metadata"]["uid"])
    await refused(NotFound, backend.api.get(PODS, name, Pod, namespace="default"))


async def test_a_finalizer_holds_an_object_until_it_is_taken_off(backend: Backend) -> None:
    await backend.pod("a", finalizers=["carpool.dev/test"])
    name = backend.name("a")
    await backend.api.delete(PODS, name, namespace="default")
    assert (await backend.api.get(PODS, name, Pod, namespace="default")).metadata.deletion_timestamp
    await backend.api.patch(PODS, name, {"metadata": {"finalizers": None}}, namespace="default")
    await refused(NotFound, backend.api.get(PODS, name, Pod, namespace="default"))
