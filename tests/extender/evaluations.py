"""Evaluations of a job on clusters that tests build."""

from carpool_core.resources.node import GpuNode
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation
from carpool_extender.testing import cluster, pod_request

RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)


def evaluate(
    known: ClusterCache | GpuNode, request: PodRequest | None = None, rules: SchedulerConfig = RULES
) -> CachedEvaluation:
    """Evaluate a request, by default the usual one, on a cluster or on its only node."""
    found = known if isinstance(known, ClusterCache) else cluster(known)
    return CachedEvaluation(request or pod_request(), rules, found.snapshot())
