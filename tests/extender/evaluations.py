"""Evaluations of a job on clusters that tests build or draw."""

from typing import Any

from carpool_core.resources.node import GpuNode
from carpool_core.values import SharingMode
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation
from carpool_extender.testing import cluster, gpu_node, pod_request, tenant
from hypothesis import strategies as st

RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)


def evaluate(
    known: ClusterCache | GpuNode, request: PodRequest | None = None, rules: SchedulerConfig = RULES
) -> CachedEvaluation:
    """Evaluate a request, by default the usual one, on a cluster or on its only node."""
    found = known if isinstance(known, ClusterCache) else cluster(known)
    return CachedEvaluation(request or pod_request(), rules, found.snapshot())


_GPUS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30000), max_size=3), st.sampled_from([SharingMode.MPS, SharingMode.TIME_SLICING])
    ),
    min_size=1,
    max_size=4,
)
LAYOUTS = st.lists(_GPUS, min_size=1, max_size=3)
"""For each node and GPU the memory of its tenants in MiB, and their mode."""


def nodes_of(layout: list[list[tuple[list[int], SharingMode]]], **has: Any) -> list[GpuNode]:
    """Return the nodes `n0`, `n1`, … of a layout; `has` are further arguments of each tenant."""
    return [
        gpu_node(
            f"n{n}",
            len(row),
            [
                tenant(f"{n}-{g}-{t}", [f"GPU-n{n}-{g}"], mode, memory_limit_mib=mib, **has)
                for g, (tenants, mode) in enumerate(row)
                for t, mib in enumerate(tenants)
            ],
        )
        for n, row in enumerate(layout)
    ]
