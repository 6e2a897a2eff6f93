"""Caches of jobs, pods and GpuNodes, which enqueue the jobs that an event concerns."""

from collections import Counter
from collections.abc import Iterator

from carpool_core.keys import CONDITION_PLACED, SIMULATED_PREFIX
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import put_in_group
from carpool_core.products import PRODUCTS, GpuProduct, hardware_name, products_of
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobState

from carpool_operator import conditions
from carpool_operator.inventory import Inventory, NodeKind, node_kind
from carpool_operator.pods import job_key, key_of, key_of_pod
from carpool_operator.work_queue import WorkQueue


def _resource_version(job: GpuTrainingJob) -> int:
    text = job.metadata.resource_version
    return int(text) if text.isdigit() else 0


class JobCache:
    """Jobs by key. It ignores older versions, because the operator's own writes arrive before the watch's events."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._jobs: dict[str, GpuTrainingJob] = {}

    def __iter__(self) -> Iterator[GpuTrainingJob]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> GpuTrainingJob | None:
        """Return a job, None if it does not exist."""
        return self._jobs.get(key)

    def changed(self, old: GpuTrainingJob | None, new: GpuTrainingJob | None) -> None:
        """Handle a reflector's event."""
        if new is not None:
            self._put(new)
        elif old is not None:
            self.remove(key_of(old), old.metadata.uid)

    def share(self, _: GpuTrainingJob, new: GpuTrainingJob) -> GpuTrainingJob:
        """Return the cached job unless `new` is newer, so that the reflector's store holds no second copy."""
        return self._jobs[key_of(new)] if self._is_cached(new) else new

    def update(self, job: GpuTrainingJob) -> None:
        """Store a job that a call returned, unless the watch has reported its deletion since."""
        cached = self._jobs.get(key_of(job))
        if cached is not None and cached.metadata.uid == job.metadata.uid:
            self._put(job)

    def _put(self, job: GpuTrainingJob) -> None:
        if not self._is_cached(job):
            key = key_of(job)
            self._jobs[key] = job
            self._queue.add(key)

    def _is_cached(self, job: GpuTrainingJob) -> bool:
        """Return whether this version of the job or a newer one is stored."""
        cached = self._jobs.get(key_of(job))
        is_same = cached is not None and cached.metadata.uid == job.metadata.uid
        return cached is not None and is_same and _resource_version(job) <= _resource_version(cached)

    def remove(self, key: str, uid: str) -> None:
        """Remove a deleted job; a newer job of the same name stays."""
        known = self._jobs.get(key)
        if known is not None and known.metadata.uid == uid:
            del self._jobs[key]
            self._queue.add(key)


class PodCache:
    """Pods by the key of their job, and keys of jobs by node."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._by_job: dict[str, dict[str, Pod]] = {}
        self._by_node: dict[str, dict[str, str]] = {}

    def of(self, key: str) -> tuple[Pod, ...]:
        """Return the pods that a job may have; see `snapshot` for whether they are its own."""
        return tuple(self._by_job.get(key, {}).values())

    def jobs_on(self, node: str) -> set[str]:
        """Return the keys of jobs with pods on a node."""
        return set(self._by_node.get(node, {}).values())

    def changed(self, old: Pod | None, new: Pod | None) -> None:
        """Handle a reflector's event."""
        for pod, is_known in ((old, False), (new, True)):
            if pod is not None:
                self._index(pod, is_known=is_known)
        for key in {key_of_pod(pod) for pod in (old, new) if pod is not None}:
            if key is not None:
                (self._queue.add_debounced if _is_pending(new) else self._queue.add)(key)

    def _index(self, pod: Pod, *, is_known: bool) -> None:
        key = key_of_pod(pod)
        if key is not None:
            put_in_group(self._by_job, key, pod.metadata.name, pod if is_known else None)
            if pod.spec.node_name:
                put_in_group(self._by_node, pod.spec.node_name, pod.metadata.uid, key if is_known else None)


def _is_pending(pod: Pod | None) -> bool:
    """Return whether a pod waits or starts: its events only change what the status reports."""
    return pod is not None and pod.status.phase == "Pending" and pod.metadata.deletion_timestamp is None


class NodeCache:
    """GpuNodes by name, and the kinds of GPUs in the cluster."""

    def __init__(self, queue: WorkQueue, pods: PodCache, jobs: JobCache) -> None:
        self._queue, self._pods, self._jobs = queue, pods, jobs
        self._nodes: dict[str, GpuNode] = {}
        self._kinds: Counter[NodeKind] = Counter()
        self.described: list[GpuProduct] = []
        """The products of the cluster's GPUs that can be predicted."""

    def get(self, name: str) -> GpuNode | None:
        """Return a GpuNode, None if it does not exist."""
        return self._nodes.get(name)

    @property
    def inventory(self) -> Inventory:
        """Number of nodes of each kind."""
        return dict(self._kinds)

    @property
    def products(self) -> tuple[str, ...]:
        """Names of the products of the cluster's GPUs that can be predicted; the table's before there is a GPU."""
        return tuple(product.name for product in self.described or PRODUCTS)

    @property
    def simulated(self) -> frozenset[str]:
        """Products of which all GPUs in the cluster are simulated, as hardware names."""
        present = {kind.product for node in self._kinds for kind, _ in node}
        hardware = {product for product in present if not product.startswith(SIMULATED_PREFIX)}
        return frozenset(map(hardware_name, present)) - hardware

    def changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        """Handle a reflector's event."""
        node = new if new is not None else old
        if node is None:
            return
        name = node.metadata.name
        if new is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = new
        before = None if old is None else node_kind(old.status.devices)
        after = None if new is None else node_kind(new.status.devices)
        if before != after:
            self._kind_changed(before, after)
        elif old is None or new is None or old.spec != new.spec or old.status.tenants != new.status.tenants:
            own = _jobs_with_changed_reservations(old, new)
            for key in self._pods.jobs_on(name):
                # Co-tenants and measurements of a placed job only change what its status reports.
                is_report = self._is_placed(key) and key not in own
                (self._queue.add_rate_limited if is_report else self._queue.add_debounced)(key)

    def _is_placed(self, key: str) -> bool:
        job = self._jobs.get(key)
        return job is not None and conditions.is_true(job.status, CONDITION_PLACED)

    def _kind_changed(self, before: NodeKind | None, after: NodeKind | None) -> None:
        """Count a node as another kind; enqueue the jobs that this may concern."""
        known = set(self._kinds)
        if before is not None:
            self._kinds[before] -= 1
        if after is not None:
            self._kinds[after] += 1
        self._kinds = +self._kinds
        is_new = known != set(self._kinds)
        self.described = products_of({kind for node in self._kinds for kind, _ in node})
        for job in self._jobs:
            if (is_new and not conditions.is_finished(job.status)) or job.status.state is JobState.UNPLACEABLE:
                self._queue.add(key_of(job))


def _jobs_with_changed_reservations(old: GpuNode | None, new: GpuNode | None) -> set[str]:
    """Return the keys of the jobs whose own reservations on a node differ."""
    before, after = ({} if node is None else {r.pod_uid: r for r in node.spec.reservations} for node in (old, new))
    pairs = ((before, after), (after, before))
    changed = [r for some, others in pairs for uid, r in some.items() if others.get(uid) != r]
    return {job_key(r.pod_namespace, r.job_name) for r in changed}
