"""Arrays that follow GpuNodes; views that do not."""

import msgspec
import numpy as np
import pytest
from carpool_core.kube.nodes import Node, NodeConstraints
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_extender.cache.cluster import GpuBackoff
from carpool_extender.cache.gpu_table import NO_TENANT
from carpool_extender.testing import T4, cluster, device, gpu_node, node_of, tenant
from hypothesis import given
from hypothesis import strategies as st


def rows(snapshot):
    """Return the values of a snapshot for each GPU that exists, by UUID."""
    columns = snapshot.gpus
    return {
        columns.uuid[row]: (
            snapshot.node_names[columns.node[row]],
            snapshot.product(row),
            int(columns.usable_mib[row]),
            not columns.unavailable[row],
            int(columns.mode[row]),
            tuple(map(str, columns.tenants[row])),
            tuple(columns.memory_mib[row, : columns.count[row]].tolist()),
            int(columns.free_mib[row]),
            round(float(columns.sm_active[row]), 6),
            round(float(columns.count[row] - columns.existing_slowdown[row]), 6),
            int(columns.tenant_namespace[row]) == NO_TENANT,
            int(columns.prepared[row]),
            str(snapshot.unavailable.get(int(row), ("", ""))[1]),
        )
        for row in np.flatnonzero(columns.alive)
    }


def test_exclusive_gpu_has_no_free_memory():
    held = tenant("x", ["GPU-a-0"], SharingMode.EXCLUSIVE, memory_limit_mib=4000)
    assert cluster(gpu_node("a", 1, [held])).snapshot().gpus.free_mib.tolist() == [0]


def test_a_view_cannot_be_written_through():
    snapshot = cluster(gpu_node("a", 1)).snapshot()
    with pytest.raises(ValueError, match="read-only"):
        snapshot.gpus.count[0] = 3


def test_equal_report_is_no_change():
    known = cluster(gpu_node("a", 1))
    before = known.generation
    known.apply(gpu_node("a", 1))
    assert known.generation == before


@pytest.mark.parametrize("excluded", [{"unschedulable": True}, {"taints": [{"key": "k", "effect": "NoExecute"}]}])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_node_is_refused_while_it_is_excluded_also_if_that_changes_while_it_reports_no_gpus(excluded, gpus):
    known, constraints = cluster(gpu_node("a", 1)), NodeConstraints()
    for spec, refused in (({}, False), (excluded, True), ({}, False), (excluded, True)):
        known.apply(gpu_node("a", gpus))
        known.set_kube_node("a", msgspec.convert(node_of("a", **spec), Node))
        known.apply(gpu_node("a", 1))
        assert known.snapshot().refusing_nodes(constraints).tolist() == [refused]


def test_an_older_version_is_ignored():
    known = cluster(gpu_node("a", 1, [tenant("x", ["GPU-a-0"])], resource_version="10"))
    known.apply(gpu_node("a", 1, resource_version="9"))
    assert known.nodes_holding(PodUid("pod-x")) == ["a"]


def test_a_new_object_of_the_same_name_begins_anew():
    known = cluster(gpu_node("a", 1, [tenant("x", ["GPU-a-0"])], resource_version="10"))
    known.remove("a")
    assert known.nodes_holding(PodUid("pod-x")) == []
    known.apply(gpu_node("a", 2, resource_version="3"))
    assert len(rows(known.snapshot())) == 2


def made(name, gpus, held, seen):
    """A node whose GPUs, reservations and measures all differ from one drawing to the next."""
    devices = [device(i, name, memory_mib=40960 + usable, **changes) for i, (usable, changes) in enumerate(gpus)]
    reserved = [tenant(f"{name}-{i}", [f"GPU-{name}-{gpu}"]) for i, gpu in enumerate(held) if gpu < len(gpus)]
    measured = [
        Tenant(pod_uid=PodUid(f"pod-{name}-{i}"), gpu_uuid=GpuUuid(f"GPU-{name}-{gpu}"), memory_mib=9, **measure)
        for i, (gpu, measure) in enumerate(seen)
    ]
    node = gpu_node(name, devices, reserved)
    status = msgspec.structs.replace(node.status, tenants=measured)
    return msgspec.structs.replace(node, status=status)


MEASURES = ({"sm_active_ratio": 0.1}, {"sm_active_ratio": 0.2, "settled": True}, {"settled": True})
DEVICES = ({}, {"health": DeviceHealth.UNHEALTHY}, {"mode": SharingMode.MPS}, {"product": T4})
nodes = st.builds(
    made,
    st.sampled_from("abcd"),
    st.lists(st.tuples(st.sampled_from([0, 100]), st.sampled_from(DEVICES)), max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(MEASURES)), max_size=4),
)


@given(steps=st.lists(st.one_of(nodes, st.sampled_from("abcd")), max_size=20))
def test_following_changes_equals_starting_from_the_end(steps):
    known, last = cluster(slots=2), {}
    for step in steps:
        if isinstance(step, str):
            known.remove(step)
            last.pop(step, None)
        else:
            known.apply(step)
            last[step.metadata.name] = step
        known.snapshot()
    fresh = cluster(*last.values(), slots=2)
    assert rows(known.snapshot()) == rows(fresh.snapshot())
    for node in last.values():
        for reservation in node.spec.reservations:
            assert known.nodes_holding(reservation.pod_uid) == fresh.nodes_holding(reservation.pod_uid)


def test_only_the_gpu_that_something_was_said_of_is_written_again():
    known = cluster(gpu_node("a", 8), gpu_node("b", 8, [tenant("y", ["GPU-b-7"])]))
    known.snapshot()
    before = known.generation
    known.apply(gpu_node("a", 8, [tenant("x", ["GPU-a-2", "GPU-a-5"])]))
    known.apply(gpu_node("b", [device(i, "b", mode=SharingMode.MPS if i == 3 else None) for i in range(8)]))
    assert known.changed_since(before).tolist() == [2, 5, 11, 15]


def test_indices_of_deleted_nodes_are_used_again():
    """Regression: the arrays of each cached evaluation grew with every node that ever existed."""
    known = cluster(gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    for i in range(50):
        name = f"n{i}"
        known.apply(gpu_node(name, [device(0, name, memory_mib=i)], [tenant(name, [f"GPU-{name}-0"], namespace=name)]))
        known.apply(gpu_node(name, [device(0, name, memory_mib=1000 + i)]))
        known.remove(name)
    snapshot = known.snapshot()
    assert list(snapshot.node_ids) == ["a"]
    assert len(snapshot.node_names) == 2
    assert len(snapshot.gpus.alive) == 2
    assert len(snapshot.present_classes) == 1


def test_backoff_of_a_gpu_ends_with_a_success():
    clock = FakeClock()
    backoff = GpuBackoff(clock)
    for _ in range(2):
        backoff.record_failure("a", ["g0", "g0"])  # several that failed together are one failure
        assert backoff.in_backoff()["a", "g0"].reason.endswith("at 2026-01-31T12:00:30Z")
        backoff.record_success("a", ["g0"])
        assert backoff.in_backoff() == {}
