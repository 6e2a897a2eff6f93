"""GPUs side by side: every GPU of every node, in its place, as nodes come, change and go."""

import numpy as np
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.gpu_table import NOWHERE
from carpool_extender.testing import device, gpu_node, pod_request
from evaluations import evaluate
from hypothesis import given
from hypothesis import strategies as st

CHANGES = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4)), min_size=1, max_size=12)
"""Nodes, and how many GPUs each has from now on; none when it goes."""


def told(snapshot):
    """The GPUs of each node by its name, as the grid has them."""
    found = {}
    for place in snapshot.grid.rows:
        for row, node in zip(place.tolist(), snapshot.grid.node.tolist(), strict=True):
            if row != NOWHERE:
                found.setdefault(snapshot.node_names[node], []).append(snapshot.gpus.uuid[row])
    return found


@given(CHANGES)
def test_every_gpu_of_every_node_has_its_place_whatever_came_and_went(changes):
    cluster, there = ClusterCache(), {}
    for name, gpus in changes:
        if gpus:
            cluster.apply(gpu_node(name, gpus))
            there[name] = [f"GPU-{name}-{index}" for index in range(gpus)]
        else:
            cluster.remove(name)
            there.pop(name, None)
        snapshot = cluster.snapshot()
        assert told(snapshot) == there
        assert snapshot.grid.has_gaps == (len({len(gpus) for gpus in there.values()}) > 1)


def test_a_gpu_that_does_not_fit_is_not_taken_for_the_tightest_place():
    """Nothing is left over on a GPU that is too small, and less than nothing on one that is much too small."""
    known = ClusterCache()
    known.apply(gpu_node("a", [device(0, memory_mib=1000), device(1), device(2, memory_mib=20_000)]))
    known.apply(gpu_node("b", [device(0, "b", memory_mib=1000)]))
    best = evaluate(known, pod_request(memory_limit_mib=30_000)).best
    assert best.fits.tolist() == [True, False]
    assert best.of(np.array([0])).rows.tolist() == [[1]]
