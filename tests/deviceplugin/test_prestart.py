"""Whose container is about to start: refusals are sentences."""

import pytest
from carpool_core.kube.pods import (
    Container,
    Pod,
    PodMeta,
    PodSpec,
    PodStatus,
    ResourceRequirements,
    SecurityContext,
    container_uid,
)
from carpool_core.resources.node import Partition
from carpool_core.values import PartitionState, PodUid
from carpool_deviceplugin.kubelet.prestart import LaterError, Owner, claimant, earlier, owner_of, promise, same_user
from carpool_deviceplugin.kubelet.protos.podresources_pb2 import ContainerDevices, ContainerResources, PodResources
from carpool_deviceplugin.kubelet.wire import RefusedError
from msgspec.structs import replace

OWNER = Owner("default", "a", "train", ("slot-2",))


def holds(pod: str, *slots: str, container: str = "train", resource: str = "carpool.dev/gpu") -> PodResources:
    devices = [ContainerDevices(resource_name=resource, device_ids=slots)]
    return PodResources(name=pod, namespace="default", containers=[ContainerResources(name=container, devices=devices)])


def pod(name: str = "a", *, phase: str = "Pending", deleted: str | None = None) -> Pod:
    return Pod(
        metadata=PodMeta(name=name, namespace="default", uid=f"uid-{name}", deletion_timestamp=deleted),
        status=PodStatus(phase=phase),
    )


def partition(name: str = "a", state: PartitionState = PartitionState.READY, message: str = "") -> Partition:
    return Partition(pod_uid=PodUid(f"uid-{name}"), generation=1, state=state, message=message)


def test_owner_is_who_holds_the_slots_in_their_order() -> None:
    held = [holds("b", "slot-1"), holds("other", "slot-10", "slot-2", resource="nvidia.com/gpu")]
    assert owner_of(["slot-10", "slot-2"], [*held, holds("a", "slot-10", "slot-2")]) == Owner(
        "default", "a", "train", ("slot-2", "slot-10")
    )


@pytest.mark.parametrize(
    ("slots", "held", "error", "says"),
    [
        (["slot-1"], [], LaterError, "expected a container that holds slot-1, found none"),
        (
            ["slot-1"],
            [holds("a", "slot-1"), holds("b", "slot-1")],
            RefusedError,
            "found default/a/train, default/b/train",
        ),
        (["slot-1"], [holds("a", "slot-1", "slot-2")], RefusedError, "expected default/a to start with slot-1, slot-2"),
        (["GPU-1"], [], RefusedError, "expected a slot such as slot-3, found 'GPU-1'"),
    ],
)
def test_owner_refusals(slots, held, error, says) -> None:
    with pytest.raises(error, match=says):
        owner_of(slots, held)


@pytest.mark.parametrize("found", [None, pod(phase="Succeeded"), pod(deleted="2026-01-31T12:00:00Z")])
def test_a_namesake_that_leaves_is_not_the_pod(found) -> None:
    with pytest.raises(LaterError, match="expected pod default/a"):
        claimant(OWNER, found)


def test_promise_is_the_pods_own_reservation(reserve) -> None:
    assert promise(OWNER, pod(), [reserve("b"), reserve("a")], [partition("b"), partition()]) == reserve("a")


@pytest.mark.parametrize(
    ("pods", "partitions", "error", "says"),
    [
        ([], [], LaterError, "expected a reservation for pod default/a .uid-a.*submit a GpuTrainingJob"),
        (["b"], ["b"], LaterError, "expected a reservation for pod default/a"),
        (["a"], [], LaterError, "found them being prepared"),
        (
            ["a"],
            [partition(state=PartitionState.PREPARING, message="waits for b")],
            LaterError,
            "prepared .waits for b",
        ),
        (["a"], [partition(state=PartitionState.FAILED, message="no MIG")], RefusedError, "to be ready, found: no MIG"),
    ],
)
def test_promise_refusals(reserve, pods, partitions, error, says) -> None:
    partitions = [partition(p) if isinstance(p, str) else p for p in partitions]
    with pytest.raises(error, match=says):
        promise(OWNER, pod(), [reserve(p) for p in pods], partitions)


def test_an_older_generation_is_not_ready(reserve) -> None:
    with pytest.raises(LaterError, match="being prepared"):
        promise(OWNER, pod(), [reserve("a", generation=2)], [partition()])


def test_two_containers_cannot_split_a_reservation(reserve) -> None:
    with pytest.raises(
        RefusedError, match=r"expected container train .* to hold 2 of carpool\.dev/gpu, as reserved, found 1"
    ):
        promise(OWNER, pod(), [reserve("a", "GPU-1", "GPU-2")], [partition()])


def running_as(pod_user: int | None, **containers: int | None) -> Pod:
    """A pod whose container `train` has a GPU."""
    made = [
        Container(
            name=name,
            resources=ResourceRequirements(limits={"carpool.dev/gpu": 1} if name == "train" else {}),
            security_context=SecurityContext(run_as_user=user),
        )
        for name, user in containers.items()
    ]
    return Pod(
        metadata=PodMeta(name="a"),
        spec=PodSpec(containers=made, security_context=SecurityContext(run_as_user=pod_user)),
    )


@pytest.mark.parametrize(
    ("found", "container", "user"),
    [
        (running_as(None, train=None), "train", None),
        (running_as(1000, train=None), "train", 1000),
        (running_as(1000, side=7, train=0), "train", 0),
        (running_as(1000, side=7, train=1001), "", 1001),
        (running_as(1000), "train", 1000),
    ],
    ids=["image", "pod", "container-root", "whoever-has-the-gpu", "unknown-container"],
)
def test_user_is_the_containers_or_the_pods(found: Pod, container: str, user: int | None) -> None:
    assert container_uid(found.spec, container) == user


def test_user_within_a_namespace_of_users_is_nobody_the_node_knows() -> None:
    found = running_as(1000, train=None)
    assert container_uid(replace(found.spec, host_users=False), "train") is None


@pytest.mark.parametrize(
    ("user", "served", "is_fine"),
    [(1000, 1000, True), (None, 1000, True), (1000, None, True), (0, 1000, False), (1001, 1000, False)],
)
def test_an_mps_daemon_is_asked_by_one_user(user: int | None, served: int | None, is_fine: bool) -> None:
    """A client of another user waited within CUDA, without a word, until the first one had ended."""
    beside = {"pod default/x": None, "the MPS server of GPU GPU-1": served}
    if is_fine:
        same_user(OWNER, user, beside)
        return
    with pytest.raises(
        LaterError, match=f"run as user {served}, as the MPS server of GPU GPU-1 does, found {user}; .*runAsUser"
    ):
        same_user(OWNER, user, beside)


def test_whoever_reserved_first_waits_for_nobody(reserve) -> None:
    """If both waited for the other, neither would ever start."""
    first, second, elsewhere = reserve("a"), reserve("b"), reserve("0", "GPU-9")
    everybody = [second, elsewhere, first]
    assert earlier(first, everybody) == []
    assert earlier(second, everybody) == [first]
