"""A GPU that several nodes report is unavailable on all of them until only one node reports it."""

from collections import Counter

import msgspec
import numpy as np
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode
from carpool_extender.framework.diagnosis import explain_gpus
from carpool_extender.framework.selection import EvaluationCache, filter_nodes
from carpool_extender.testing import cluster, device, gpu_node, pod_request, tenant, unavailable_nodes
from evaluations import RULES, evaluate
from hypothesis import given
from hypothesis import strategies as st

GPU = "GPU-a-0"
DUPLICATE = f"several nodes report a GPU with UUID {GPU}: "


def reporting(name, *uuids, held=()):
    """Return a node that reports GPUs with these UUIDs."""
    return gpu_node(name, [device(i, name, uuid=GpuUuid(uuid)) for i, uuid in enumerate(uuids)], held)


def reasons(known, name):
    """Return the explanation of each GPU of a node."""
    return [one.text for one in explain_gpus(evaluate(known).evaluation, [name])]


def unavailable(known):
    """Return the unavailable GPUs, by node and index, from the table's column."""
    snapshot = known.snapshot()
    columns = snapshot.gpus
    rows = np.flatnonzero(columns.alive & columns.unavailable).tolist()
    assert set(rows) <= snapshot.unavailable.keys()
    return {(snapshot.node_names[columns.node[row]], int(columns.gpu_index[row])) for row in rows}


def test_gpu_of_two_nodes_is_left_out_on_both_and_its_neighbours_are_not():
    """Regression: a GPU that one node's tenant has alone was given away on the other."""
    known = cluster(reporting("a", GPU, "GPU-a-1"))
    assert "fits by" in reasons(known, "a")[0]
    known.apply(reporting("b", "GPU-b-0", GPU, held=[tenant("x", [GPU], SharingMode.EXCLUSIVE)]))
    assert unavailable(known) == {("a", 0), ("b", 1)}
    assert unavailable_nodes(known) == {"a", "b"}
    assert reasons(known, "a")[0] == f"{DUPLICATE}a and b"
    assert "fits by" in reasons(known, "a")[1]
    assert "fits by" in reasons(known, "b")[0]


def test_nodes_that_report_it_are_counted_and_three_are_named():
    known = cluster(*(reporting(name, GPU) for name in "edcba"))
    assert reasons(known, "e") == [f"{DUPLICATE}a, b, c and 2 more"]
    for name in "cad":
        known.remove(name)
    assert reasons(known, "e") == reasons(known, "b") == [f"{DUPLICATE}b and e"]


def test_health_message_of_the_node_comes_first():
    sick = device(uuid=GpuUuid(GPU), health=DeviceHealth.UNHEALTHY, health_message="Xid 79")
    known = cluster(gpu_node("a", [sick]), reporting("b", GPU))
    assert (reasons(known, "a"), reasons(known, "b")) == (["unhealthy: Xid 79"], [f"{DUPLICATE}a and b"])


def test_reservations_do_not_make_a_duplicate_gpu_available():
    known = cluster(reporting("a", GPU), reporting("b", GPU))
    before, held = known.generation, tenant("x", [GPU])
    known.apply(reporting("b", GPU, held=[held]))
    known.assume("a", msgspec.structs.replace(held, pod_uid="pod-y"))
    assert unavailable(known) == {("a", 0), ("b", 0)}
    assert known.changed_since(before).tolist() == [0, 1]


NAMES = "abcd"
uuids = st.lists(st.sampled_from(["GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4"]), max_size=3)
steps = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | uuids, st.booleans()), max_size=24)


@given(steps)
def test_rows_and_change_log_follow_any_reports_of_nodes(steps):
    known, last, followed, seen = cluster(), {}, np.zeros(0, np.bool_), 0
    following = EvaluationCache(known, RULES)
    for name, reported, is_looked_at in steps:
        if reported is None:
            known.remove(name)
            last.pop(name, None)
        else:
            known.apply(reporting(name, *reported))
            last[name] = reported
        if not is_looked_at:
            continue
        nodes_of = Counter(uuid for reported in last.values() for uuid in set(reported))
        expected = {
            (name, index)
            for name, reported in last.items()
            for index, uuid in enumerate(reported)
            if nodes_of[uuid] > 1 or reported.count(uuid) > 1
        }
        assert unavailable(known) == expected
        assert unavailable_nodes(known) == {name for name, _ in expected}
        fresh = cluster(*(reporting(name, *reported) for name, reported in last.items()))
        assert [reasons(known, name) for name in last] == [reasons(fresh, name) for name in last]
        columns, changed = known.snapshot().gpus, known.changed_since(seen)
        followed = np.append(followed, np.zeros(len(columns.alive) - len(followed), np.bool_))
        followed[changed], seen = columns.unavailable[changed], known.generation
        assert followed[columns.alive].tolist() == columns.unavailable[columns.alive].tolist()
        mine = filter_nodes(following.of(pod_request()), NAMES)
        anew = filter_nodes(evaluate(known), NAMES)
        assert (mine.fits, mine.refused, mine.unsuitable) == (anew.fits, anew.refused, anew.unsuitable)
