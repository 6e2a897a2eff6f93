"""For how many workers there would be room if some GPUs were free."""

from collections.abc import Set

import msgspec
import numpy as np
from carpool_core.resources.node import GpuNode
from carpool_core.values import GpuUuid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.places import as_if_gone
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.gang import max_workers
from carpool_extender.framework.scores import SchedulerConfig


class PaperRoom:
    """A copy of some GPUs, some of which become free again and again.

    Args:
        cluster: The GPUs as they are.
        pod_request: What each worker asks for.
        rules: What the site has chosen.
        wanted: How many workers there are.
        able: GPUs on which they are placed.
    """

    def __init__(
        self, cluster: ClusterCache, pod_request: PodRequest, rules: SchedulerConfig, wanted: int, able: Set[GpuUuid]
    ) -> None:
        self._applicant, self._rules, self._wanted = pod_request, rules, wanted
        self._nodes = {name: part for name, node in cluster.nodes.items() if (part := _part_of(node, able))}
        self._paper = ClusterCache(rules.slots)
        for node in self._nodes.values():
            self._paper.apply(node)

    def once_free(self, freed: Set[GpuUuid]) -> int:
        """Return how many workers find a place once whoever is on some GPUs is gone."""
        changed = list[GpuNode]()
        for node in self._nodes.values():
            gone = [one for one in node.spec.reservations if not freed.isdisjoint(one.gpu_uuids)]
            if gone:
                self._paper.apply(as_if_gone(node, gone))
                changed.append(node)
        found = CachedEvaluation(self._applicant, self._rules, self._paper.snapshot())
        fits = max_workers(found, np.flatnonzero(found.evaluation.ok), self._wanted)
        for node in changed:
            self._paper.apply(node)
        return fits


def _part_of(node: GpuNode, able: Set[GpuUuid]) -> GpuNode | None:
    """Return a node with nothing but some GPUs; None where it has none of them."""
    devices = [device for device in node.status.devices if device.uuid in able]
    status = msgspec.structs.replace(node.status, devices=devices)
    return msgspec.structs.replace(node, status=status) if devices else None
