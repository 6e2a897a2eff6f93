"""What the operator has heard of jobs, pods and GpuNodes, indexed by what a look at one job needs."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import structlog
from carpool_core.keys import CONDITION_PLACED, SIMULATED_PREFIX
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.products import PRODUCTS, hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobState, JobUid

from carpool_operator import conditions
from carpool_operator.inventory import Inventory, NodeKind, node_kind
from carpool_operator.pods import controller_uid, job_key, key_of_pod
from carpool_operator.work_queue import WorkQueue

Wake = Callable[[str], None]
"""Ask for a look at the job of this key."""


def key_of(job: GpuTrainingJob) -> str:
    """Key of a job."""
    return job_key(job.metadata.namespace, job.metadata.name)


def version_of(job: GpuTrainingJob) -> str:
    """Name one job, and one generation of its spec."""
    return f"{job.metadata.uid}/{job.metadata.generation}"


def _version(job: GpuTrainingJob) -> int:
    text = job.metadata.resource_version
    return int(text) if text.isdigit() else 0


class Jobs:
    """The jobs, by key. News older than what is known is ignored: our own writes are known before the watch tells."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._jobs: dict[str, GpuTrainingJob] = {}

    def __iter__(self) -> Iterator[GpuTrainingJob]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> GpuTrainingJob | None:
        """Return a job, if it exists."""
        return self._jobs.get(key)

    def put(self, job: GpuTrainingJob) -> None:
        """Take note of a job as the API server showed it."""
        key = key_of(job)
        known = self._jobs.get(key)
        is_same = known is not None and known.metadata.uid == job.metadata.uid
        if known is not None and is_same and _version(job) <= _version(known):
            return
        self._jobs[key] = job
        self._wake(key)

    def remove(self, key: str, uid: str) -> None:
        """Take note of a job's deletion; another job that has its name since stays."""
        known = self._jobs.get(key)
        if known is not None and known.metadata.uid == uid:
            del self._jobs[key]
            self._wake(key)


class Pods:
    """The pods of jobs, by the UID of the job that controls them.

    Args:
        wake: Asks for a look at a job.
        later: Asks for one in a moment, by which a pod may have got further.
    """

    def __init__(self, wake: Wake, later: Wake) -> None:
        self._wake, self._later = wake, later
        self._of_job: dict[JobUid, dict[str, Pod]] = {}
        self._on_node: dict[str, dict[str, str]] = {}

    def of(self, uid: JobUid) -> tuple[Pod, ...]:
        """Return the pods that a job controls."""
        return tuple(self._of_job.get(uid, {}).values())

    def jobs_on(self, node: str) -> set[str]:
        """Return the keys of jobs with pods on a node."""
        return set(self._on_node.get(node, {}).values())

    def changed(self, old: Pod | None, new: Pod | None) -> None:
        """Follow the reflector."""
        for pod, is_known in ((old, False), (new, True)):
            if pod is not None:
                self._index(pod, is_known=is_known)
        for key in {key_of_pod(pod) for pod in (old, new) if pod is not None}:
            if key is not None:
                (self._later if _gets_further(old, new) else self._wake)(key)

    def _index(self, pod: Pod, *, is_known: bool) -> None:
        job, key, name = controller_uid(pod), key_of_pod(pod), pod.metadata.name
        if job is not None:
            _enter(self._of_job, job, f"{pod.metadata.namespace}/{name}", pod if is_known else None)
        if key is not None and pod.spec.node_name:
            _enter(self._on_node, pod.spec.node_name, pod.metadata.uid, key if is_known else None)


def _gets_further(old: Pod | None, new: Pod | None) -> bool:
    """Whether a pod was just created or bound, and nobody has to do anything about it."""
    if new is None or new.status.phase != "Pending" or new.metadata.deletion_timestamp is not None:
        return False
    if new.spec.node_name:
        return old is None or not old.spec.node_name
    return old is None and all(condition.type != "PodScheduled" for condition in new.status.conditions)


def _enter(index: dict[Any, dict[str, Any]], group: Any, key: str, value: Any) -> None:
    """Put a value into one group of an index, or take it out where it is None; no empty group stays."""
    if value is not None:
        index.setdefault(group, {})[key] = value
    elif group in index:
        index[group].pop(key, None)
        if not index[group]:
            del index[group]


def _whose_differ(old: GpuNode | None, new: GpuNode | None) -> set[str]:
    """Keys of the jobs whose own reservations on a node are not what they were."""
    before, after = ({} if node is None else {r.pod_uid: r for r in node.spec.reservations} for node in (old, new))
    pairs = ((before, after), (after, before))
    changed = [r for some, others in pairs for uid, r in some.items() if others.get(uid) != r]
    return {job_key(r.pod_namespace, r.job_name) for r in changed}


class Fleet:
    """The GpuNodes.

    Args:
        wake: Asks for a look at a job.
        soon: Asks for one in a moment, by which its place may be known.
        later: Asks for one when there is time, which several of these share: neighbours and measures are only told of.
        pods: Which jobs are on a node.
        jobs: The jobs.
    """

    def __init__(self, wake: Wake, soon: Wake, later: Wake, pods: Pods, jobs: Jobs) -> None:
        self._wake, self._soon, self._later, self._pods, self._jobs = wake, soon, later, pods, jobs
        self._nodes: dict[str, GpuNode] = {}
        self._kinds: Counter[NodeKind] = Counter()
        self._inventory: Inventory | None = None
        self._products: tuple[str, ...] | None = None
        self._simulated: frozenset[str] | None = None

    def get(self, name: str) -> GpuNode | None:
        """Return a GpuNode, if it exists."""
        return self._nodes.get(name)

    @property
    def inventory(self) -> Inventory:
        """How many nodes there are of each kind."""
        if self._inventory is None:
            self._inventory = dict(self._kinds)
        return self._inventory

    @property
    def products(self) -> tuple[str, ...]:
        """Products of the cluster's GPUs that predictions are made for; all that are known where there are none yet."""
        if self._products is None:
            present = {hardware_name(kind.product) for node in self._kinds for kind, _ in node}
            known = tuple(product.name for product in PRODUCTS)
            self._products = tuple(name for name in known if name in present) or known
        return self._products

    @property
    def simulated(self) -> frozenset[str]:
        """Products of which all of the cluster's GPUs are simulated, without what marks them."""
        if self._simulated is None:
            present = {kind.product for node in self._kinds for kind, _ in node}
            hardware = {product for product in present if not product.startswith(SIMULATED_PREFIX)}
            self._simulated = frozenset(map(hardware_name, present)) - hardware
        return self._simulated

    def changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        """Follow the reflector."""
        node = new if new is not None else old
        if node is None:
            return
        name = node.metadata.name
        if new is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = new
        before, after = None if old is None else node_kind(old.status.devices), None
        if new is not None:
            after = node_kind(new.status.devices)
        if before != after:
            self._count(before, after)
        elif old is None or new is None or old.spec != new.spec or old.status.tenants != new.status.tenants:
            own = _whose_differ(old, new)
            for key in self._pods.jobs_on(name):
                (self._later if self._is_placed(key) and key not in own else self._soon)(key)

    def _is_placed(self, key: str) -> bool:
        job = self._jobs.get(key)
        return job is not None and conditions.holds(job.status, CONDITION_PLACED)

    def _count(self, before: NodeKind | None, after: NodeKind | None) -> None:
        """Count a node as another kind; look at the jobs to which that may matter."""
        known = set(self._kinds)
        if before is not None:
            self._kinds[before] -= 1
        if after is not None:
            self._kinds[after] += 1
        self._kinds = +self._kinds
        self._inventory = self._products = self._simulated = None
        is_new = known != set(self._kinds)
        for job in self._jobs:
            if (is_new and not conditions.is_finished(job.status)) or job.status.state is JobState.UNPLACEABLE:
                self._wake(key_of(job))


NEWS_S = 2.0
"""How long nothing is told of a pod that was created or bound, and of what changed on its GPUs. Most pods get their
place within that time, and then their container, and one write tells of all; while many jobs start, each brings some
news to others."""


class News:
    """Has jobs looked at for news, each within `NEWS_S`, or later where others are more urgent.

    Args:
        queue: Takes the keys.
    """

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def of_pod(self, key: str) -> None:
        """Look at a job whose pod got a little further."""
        self._queue.add_after(key, NEWS_S, at_leisure=True)

    def of_gpus(self, key: str) -> None:
        """Look at a job on whose GPUs something has changed, when it is its turn."""
        self._queue.add_in_turn(key, NEWS_S)


_EVERY_S = 600.0
"""How often all jobs are listed at the least."""

_SOON_S = 1.0
"""How long after kopf has listed again, during which it hands over the rest of its list."""

_LONGEST_RETRY_S = 60.0


class Sweeps:
    """Sweeps when asked to, and every ten minutes; one that fails is repeated after pauses that double."""

    def __init__(
        self, sweep: Callable[[], Awaitable[None]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._sweep, self._sleep = sweep, sleep
        self._wanted = asyncio.Event()
        self._log = structlog.get_logger()

    def ask(self) -> None:
        """Have a sweep made soon."""
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        """Whether a sweep is due."""
        return self._wanted.is_set()

    async def run(self) -> None:
        """Sweep for ever."""
        pause_s = _SOON_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._wanted.wait()
            await self._sleep(pause_s)
            self._wanted.clear()
            try:
                await self._sweep()
            except KubeError as error:
                pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)
                self._log.warning("sweep failed", error=str(error), retry_in_s=pause_s)
                self._wanted.set()
            else:
                pause_s = _SOON_S
