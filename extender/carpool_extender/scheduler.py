"""The scheduler's main path.

1. Admit: the queue admits jobs and removes their scheduling gates (`queue.admission`).
2. Filter: return the best feasible nodes, the claim's own node first.
3. Score: rank them by the site's policy.
4. Reserve: decide on the GPUs of that node and write the reservation (`reservations.binder`).
5. Bind: wait until the node agent has prepared them, then write the Binding.

kube-scheduler calls steps 2 to 5 for admitted pods only. Filter, score and preempt only read.
"""

import msgspec
from carpool_core.kube.pods import Pod
from carpool_core.values import PodUid

from carpool_extender.cache import ledger
from carpool_extender.extender_api import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    PreemptionArgs,
    PreemptionResult,
)
from carpool_extender.framework.diagnosis import PREFIX
from carpool_extender.framework.scores import MAX_SCORE
from carpool_extender.framework.selection import FEW, EvaluationCache, filter_nodes, score_nodes
from carpool_extender.informers import Informers
from carpool_extender.queue.admission import AdmissionController
from carpool_extender.queue.scheduling_queue import Claim
from carpool_extender.reservations.binder import Binder
from carpool_extender.workloads import NotOurs, Workloads, too_many


class BadRequest(Exception):  # noqa: N818  # an answer about the request
    """An invalid body; `str()` states what was expected, what was found and what to do."""


class Scheduler:
    """Answers kube-scheduler."""

    def __init__(
        self,
        informers: Informers,
        workloads: Workloads,
        admission: AdmissionController,
        binder: Binder,
        *,
        evaluation_cache: EvaluationCache,
        candidates: int,
    ) -> None:
        self._informers, self._workloads, self._admission, self._binder = informers, workloads, admission, binder
        self._evaluation_cache, self._candidates = evaluation_cache, candidates

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Return the best nodes for an admitted pod; a pod with a reservation fits on that node only."""
        names = _offered(args)
        # 1. Look up the request.
        try:
            pod_request = self._workloads.watched(args.pod)
        except NotOurs as refusal:
            return FilterResult(failed_and_unresolvable_nodes=dict.fromkeys(names, str(refusal)))
        # 2. Return the node of a reservation.
        if (reserved := self._reserved_on(args.pod)) is not None:
            node, why = reserved
            others = dict.fromkeys((name for name in names if name != node), why)
            return FilterResult(node_names=[node] if node in names else [], failed_nodes=others)
        # 3. Return the node of the claim.
        uid = PodUid(args.pod.metadata.uid)
        workers = self._informers.workers_with_reservation(pod_request.demand.job_uid)
        if (why_not := too_many(pod_request, uid, workers)) is not None:
            return FilterResult(failed_nodes=dict.fromkeys(names, why_not))
        claim = self._admission.claim_of(uid)
        claimed = [] if claim is None or claim.node not in names or not self._is_available(claim) else [claim.node]
        if len(claimed) == self._candidates and len(names) > FEW:
            return FilterResult(node_names=claimed)
        # 4. Return the best other nodes.
        among = self._informers.cluster.without_workers(pod_request.demand.job_uid, [uid])
        found = filter_nodes(self._evaluation_cache.of(pod_request), names, self._candidates, among)
        others_first = [name for name in found.fits if name not in claimed]
        return FilterResult(
            node_names=[*claimed, *others_first][: self._candidates],
            failed_nodes={name: why for name, why in found.refused.items() if name not in claimed},
            failed_and_unresolvable_nodes={name: why for name, why in found.unsuitable.items() if name not in claimed},
        )

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score nodes from 0 to 10. A pod of an unknown job scores 0 everywhere; bind decides again."""
        names, reserved = _offered(args), self._reserved_on(args.pod)
        try:
            pod_request = self._workloads.watched(args.pod)
        except NotOurs:
            return [HostPriority(host=name, score=0) for name in names]
        claim = self._admission.claim_of(PodUid(args.pod.metadata.uid))
        own = reserved[0] if reserved is not None else None if claim is None else claim.node
        if own in names and (reserved is not None or (claim is not None and self._is_available(claim))):
            return [HostPriority(host=name, score=MAX_SCORE if name == own else 0) for name in names]
        found = score_nodes(self._evaluation_cache.of(pod_request), names)
        return [HostPriority(host=name, score=score) for name, score in zip(names, found.tolist(), strict=True)]

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Reserve and bind a pod."""
        for field, value in msgspec.structs.asdict(args).items():
            if not value:
                raise BadRequest(f"expected {field} of the pod to bind, found an empty string")
        return BindingResult(error=await self._binder.bind(args))

    async def preempt(self, args: PreemptionArgs) -> PreemptionResult:
        """Return no victims: this version never evicts pods."""
        return PreemptionResult(node_name_to_meta_victims={})

    def _is_available(self, claim: Claim) -> bool:
        """Whether the GPUs of a claim exist and are healthy; they may have failed since admission."""
        snapshot = self._informers.cluster.snapshot()
        columns, wanted = snapshot.gpus, set(claim.reservation.gpu_uuids)
        rows = (columns.alive & (columns.node == snapshot.node_ids.get(claim.node, -1))).nonzero()[0].tolist()
        found = [row for row in rows if columns.uuid[row] in wanted]
        return len(found) == len(wanted) and not columns.unavailable[found].any()

    def _reserved_on(self, pod: Pod) -> tuple[str, str] | None:
        """Return the node on which a pod has a reservation or is being bound, and why it fits on no other."""
        uid = PodUid(pod.metadata.uid)
        if (bound := self._binder.node_of(uid)) is not None:
            return bound, f"{PREFIX}this pod is being bound to node {bound} at present"
        for name in self._informers.cluster.nodes_holding(uid):
            node = self._informers.cluster.node(name)
            reserved = None if node is None else ledger.held(node.spec, uid)
            if reserved is not None:
                until = f"lapses at {reserved.deadline} unless it is bound there"
                return name, f"{PREFIX}this pod has a reservation on node {name}, which {until}"
        return None


def _offered(args: ExtenderArgs) -> list[str]:
    """Return the names of the offered nodes; BadRequest if kube-scheduler sends whole nodes."""
    if args.node_names is None:
        raise BadRequest(
            "expected NodeNames, found null or nothing; set nodeCacheCapable: true for this extender in the "
            "KubeSchedulerConfiguration, because it knows the nodes already"
        )
    return args.node_names
