"""Pods that have ended and hold reservations still: who would be refused in that moment waits for what they held."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Container
from contextlib import suppress
from typing import Any

import msgspec
from carpool_core.clock import Clock
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode
from carpool_core.values import PodUid

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig
from carpool_extender.informers import Informers
from carpool_extender.reservations.binder import wait_for

PATIENCE_S = 1.0
"""Longest after a pod's end that anybody waits for what it held: where it cannot be given back, others are offered."""
MOST_TRIED = 16
"""Nodes on which it is tried whether somebody would fit then. Of more it is supposed: trying takes a while, too."""


class TerminatingPods:
    """Knows the pods that have ended and whose reservations are being given back, which takes two calls of the server.

    kube-scheduler hears of the end as well, and tries all that wait at once, in the order of its queue. Those that it
    tries before the reservation is gone would be refused and sit out a backoff, while one from further behind takes the
    GPU: with each end anew, so that the first of a long queue would get none.

    kube-scheduler asks about nobody else meanwhile. So only those wait who would fit then.

    Args:
        informers: Tell of ends, and of what is given back.
        rules: What the site has chosen.
        clock: Tells how long ago a pod has ended.
        sleep: Ends the patience.
    """

    def __init__(
        self, informers: Informers, rules: SchedulerConfig, clock: Clock, sleep: Callable[[float], Awaitable[Any]]
    ) -> None:
        self._informers, self._rules, self._clock, self._sleep = informers, rules, clock, sleep
        self._until: OrderedDict[PodUid, float] = OrderedDict()
        """Until when it is waited for what an ended pod holds; the first that ended stand first."""
        informers.on_pod(self._pod_changed)

    def promising(self, pod_request: PodRequest, nodes: Container[str]) -> list[PodUid]:
        """Return the pods whose ends would make room for somebody who is refused; none where they would not.

        Args:
            pod_request: Who is refused.
            nodes: Names of the nodes in question.
        """
        self._forget()
        ended: dict[str, set[PodUid]] = {}
        for uid in self._until:
            for name in self._holders(uid):
                if name in nodes:
                    ended.setdefault(name, set()).add(uid)
        if not ended or (len(ended) <= MOST_TRIED and not self._would_fit(pod_request, ended)):
            return []
        return [uid for gone in ended.values() for uid in gone]

    def _would_fit(self, pod_request: PodRequest, ended: dict[str, set[PodUid]]) -> bool:
        """Whether somebody would find a place on some nodes, were all given back there that has ended."""
        paper = ClusterCache(self._rules.slots)
        for name, gone in ended.items():
            if (node := self._informers.cluster.with_assumed(name)) is not None:
                paper.apply(_without(node, gone))
        return bool(CachedEvaluation(pod_request, self._rules, paper.snapshot()).best.fits.any())

    async def over(self, pods: Collection[PodUid]) -> None:
        """Wait until some pods have given back what they held, or it was waited for long enough."""
        for uid in pods:
            until = self._until.get(uid, 0.0)
            with suppress(TimeoutError):
                await wait_for(self._given_back(uid), until - self._clock.monotonic(), self._sleep)

    async def _given_back(self, uid: PodUid) -> None:
        while holders := self._holders(uid):
            await self._informers.stirred(holders[0])

    def _forget(self) -> None:
        """Forget those for which nobody waits any more."""
        now = self._clock.monotonic()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def _holders(self, uid: PodUid) -> list[str]:
        return self._informers.cluster.nodes_holding(uid)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        if pod is None or not (new is None or new.is_finished):
            return
        uid = PodUid(pod.metadata.uid)
        if self._holders(uid):
            self._forget()
            self._until.setdefault(uid, self._clock.monotonic() + PATIENCE_S)


def _without(node: GpuNode, gone: Container[PodUid]) -> GpuNode:
    """Return a node as it is once some pods are gone, of which neither a reservation nor a measure is left."""
    reservations = [one for one in node.spec.reservations if one.pod_uid not in gone]
    tenants = [one for one in node.status.tenants if one.pod_uid not in gone]
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, reservations=reservations),
        status=msgspec.structs.replace(node.status, tenants=tenants),
    )
