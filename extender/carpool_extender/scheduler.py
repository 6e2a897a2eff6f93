"""The four verbs of the extender, between the wire and the decisions."""

import msgspec
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.values import PodUid

from carpool_extender.cache import ledger
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.connections import Connections
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
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.gang import Gangs
from carpool_extender.framework.scores import MAX_SCORE
from carpool_extender.framework.selection import filter_nodes, score_nodes
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics
from carpool_extender.queue.nominator import Keeper
from carpool_extender.reservations.binder import Binder
from carpool_extender.terminating_pods import TerminatingPods
from carpool_extender.workloads import NotOurs, NotYet, Workloads, too_many


class BadRequest(Exception):  # noqa: N818  # an answer about the request
    """A body that this extender cannot work with; `str()` says what was expected, what was found, what to do."""


class Service:
    """Answers kube-scheduler. Filter, prioritize and preempt only read."""

    def __init__(
        self,
        informers: Informers,
        workloads: Workloads,
        binder: Binder,
        *,
        evaluation_cache: EvaluationCache,
        gangs: Gangs,
        keeper: Keeper,
        connections: Connections,
        terminating_pods: TerminatingPods,
        telemetry: ExtenderMetrics,
        candidates: int,
    ) -> None:
        self._informers, self._workloads, self._binder = informers, workloads, binder
        self._evaluation_cache, self._gangs, self._candidates = evaluation_cache, gangs, candidates
        self._keeper, self._connections, self._terminating_pods = keeper, connections, terminating_pods
        self._telemetry = telemetry

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Name the best nodes that have room for a pod. A pod that has a reservation fits only where that is."""
        names = _offered(args)
        try:
            pod_request = await self._workloads.of(args.pod)
        except NotOurs as refusal:
            return FilterResult(failed_and_unresolvable_nodes=dict.fromkeys(names, str(refusal)))
        except NotYet as error:
            return FilterResult(error=str(error))  # kube-scheduler tries again within seconds
        except KubeError as error:
            return FilterResult(error=f"the job of pod {args.pod.metadata.name} could not be read: {error}")
        if (kept := self._kept_on(args.pod)) is not None:
            node, why = kept
            told = dict.fromkeys((name for name in names if name != node), why)
            return FilterResult(node_names=[node] if node in names else [], failed_nodes=told)
        answer = self._served(pod_request, args.pod, names)
        if answer.node_names or not (ended := self._terminating_pods.promising(pod_request, answer.failed_nodes)):
            return answer
        with self._telemetry.kept_back(), self._keeper.held_up():
            await self._terminating_pods.over(ended)
        return self._served(pod_request, args.pod, names)

    def _served(self, pod_request: PodRequest, pod: Pod, names: list[str]) -> FilterResult:
        """Find room for a pod, unless that goes to others before it."""
        self._keeper.asked(pod, pod_request)
        answer = self._found(pod_request, pod, names)
        if answer.node_names and self._keeper.first(pod, pod_request, answer.node_names[0]):
            answer = self._found(pod_request, pod, names)  # in what is left
        refused = answer.failed_nodes or answer.failed_and_unresolvable_nodes or {}
        why = self._keeper.answered(pod, pod_request, names, answer.node_names or [], next(iter(refused.values()), ""))
        if answer.node_names:
            return answer
        both = (answer.failed_nodes, answer.failed_and_unresolvable_nodes)
        hopeful, hopeless = (None if of is None else dict.fromkeys(of, why) for of in both)
        return FilterResult(node_names=[], failed_nodes=hopeful, failed_and_unresolvable_nodes=hopeless)

    def _found(self, pod_request: PodRequest, pod: Pod, names: list[str]) -> FilterResult:
        uid = PodUid(pod.metadata.uid)
        crowd = self._keeper.holders(pod_request.demand.job_uid)
        if (crowded := too_many(pod_request, uid, crowd)) is not None:
            return FilterResult(failed_nodes=dict.fromkeys(names, crowded))
        waits = None if self._keeper.has_begun(pod_request) else self._gangs.refusal(pod_request, uid, names)
        if waits is not None:
            return FilterResult(failed_nodes=dict.fromkeys(names, waits))
        found = filter_nodes(self._evaluation_cache.of(pod_request), names, self._candidates)
        return FilterResult(
            node_names=found.fits, failed_nodes=found.refused, failed_and_unresolvable_nodes=found.unsuitable
        )

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score nodes from 0 to 10. What could not be looked up scores 0 everywhere; bind decides again."""
        names, kept = _offered(args), self._kept_on(args.pod)
        try:
            pod_request = await self._workloads.of(args.pod)
        except (NotOurs, NotYet, KubeError):
            return [HostPriority(host=name, score=0) for name in names]
        if kept is not None:
            return [HostPriority(host=name, score=MAX_SCORE if name == kept[0] else 0) for name in names]
        with self._keeper.comparing(PodUid(args.pod.metadata.uid), pod_request):
            found = score_nodes(self._evaluation_cache.of(pod_request), names)
        return [HostPriority(host=name, score=score) for name, score in zip(names, found.tolist(), strict=True)]

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Reserve and bind a pod."""
        for field, value in msgspec.structs.asdict(args).items():
            if not value:
                raise BadRequest(f"expected {field} of the pod to bind, found an empty string")
        self._connections.taken()
        error = await self._binder.bind(args)
        if not error:  # bad news do not wait
            await self._connections.free()
        return BindingResult(error=error)

    async def preempt(self, args: PreemptionArgs) -> PreemptionResult:
        """Say that evicting pods would not help: this version never makes room by eviction."""
        return PreemptionResult(node_name_to_meta_victims={})

    def _kept_on(self, pod: Pod) -> tuple[str, str] | None:
        """Node to which a pod is being bound, or has a reservation that an earlier bind left; and why no other."""
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
    """Names of the nodes that kube-scheduler offers; BadRequest where it sends whole nodes."""
    if args.node_names is None:
        raise BadRequest(
            "expected NodeNames, found null or nothing; set nodeCacheCapable: true for this extender in the "
            "KubeSchedulerConfiguration, because it knows the nodes already"
        )
    return args.node_names
