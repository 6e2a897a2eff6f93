"""Two schedulers with their extenders in virtual time: faulty connections, skewed clocks, changes of the leader.

`play(seed)` runs one random history and returns every violation of a promise.

The API server, agents, kubelets and jobs are models. The extenders are the real ones. Each reaches the server through
a `Connection` that delays calls, loses answers, answers 409, 429 and 500, breaks watches, and is cut off for a while.
GpuNodes are deleted and created again, jobs are suspended, and users create pods with the names of workers.
"""

import asyncio
import gc
import itertools
import random
from collections import Counter
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush

import msgspec
from carpool_core.keys import GATE_ADMISSION
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, LEASES, PODS
from carpool_core.kube.errors import Conflict, Gone, KubeError, NotFound, Overloaded, Unreachable
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import GpuNode, Partition, Tenant
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PartitionState, SharingMode
from carpool_extender.app import Extender, build
from carpool_extender.extender_api import BindingArgs, ExtenderArgs
from carpool_extender.settings import ExtenderSettings
from carpool_extender.testing import gpu_node, pod_of, seed_job, seed_node
from extender_world import record
from msgspec import structs

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
LEASE = "carpool-system/carpool-scheduler"
ACTIVE_S, QUIET_S = 150.0, 180.0
"""Length of the part with faults, and of the part without, in which everything must settle."""
START_DEADLINE_S = 60.0
"""Time from the binding of a pod to its start, after which the operator deletes it."""
STRANGER = "stranger"
"""Begin of the UIDs of pods that the operator did not create."""
SHARED = {"sharing": {"mode": "TimeSlicing"}, "memory": {"limit": "15Gi"}}
EXCLUSIVE = {"sharing": {"mode": "Exclusive"}}

PROCESS: ContextVar[dict[asyncio.Task, None] | None] = ContextVar("process", default=None)
"""Tasks of the process that is running: killing it cancels them all."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop without I/O, whose time passes only while every task sleeps."""

    def __init__(self):
        super().__init__()
        self._now, self._timers, self._count = 0.0, [], itertools.count()
        self.set_task_factory(_in_process)

    def time(self):
        return self._now

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when, callback, *args, context=None):
        return self.add_timer(when, asyncio.TimerHandle(when, callback, args, self, context))

    def add_timer(self, when, timer):
        """At a time, call back (for a handle) or set the result (for a future)."""
        heappush(self._timers, (when, next(self._count), timer))
        return timer

    def _run_once(self):
        """Run what is due; if nothing is, move the time to the next timer."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][-1].cancelled():
            heappop(timers)
        if not ready:
            assert timers, "all tasks wait for each other"
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heappop(timers)[-1]
            if isinstance(timer, asyncio.TimerHandle):
                ready.append(timer)
            elif not timer.cancelled():
                timer.set_result(None)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


async def sleep(delay):
    """Sleep as `asyncio.sleep` does, at a third of its cost."""
    loop = asyncio.get_running_loop()
    await (loop.add_timer(loop.time() + delay, loop.create_future()) if delay > 0 else asyncio.sleep(0))


def _in_process(loop, coroutine, **named):
    task = asyncio.Task(coroutine, loop=loop, **named)
    if (process := PROCESS.get()) is not None:
        process[task] = None
        task.add_done_callback(lambda done: process.pop(done, None))
    return task


class LoopClock:
    """The loop's time, with the error of one machine's clock."""

    def __init__(self, ahead_s=0.0):
        self._ahead = timedelta(seconds=ahead_s)

    def now(self):
        return START + timedelta(seconds=self.monotonic() - 1000.0) + self._ahead

    def monotonic(self):
        return 1000.0 + asyncio.get_running_loop().time()


class Connection:
    """The way of one host to the API server."""

    def __init__(self, kube, draw, ahead_s, counts):
        self._kube, self._draw, self._ahead_s, self._counts = kube, draw, ahead_s, counts
        self.server_ahead_s = 0.0
        self.is_cut = self.is_faulty = False
        self._restored = asyncio.Event()

    namespace = "default"

    def cut(self):
        self.is_cut = True
        self._restored.clear()

    def restore(self):
        self.is_cut = False
        self._restored.set()

    async def _call(self, work, *, writes=False):
        await sleep(self._latency())
        await self._check()
        if self.is_faulty and self._draw.random() < 0.06:
            errors = [Overloaded("429", status=429), Overloaded("500", status=500), Unreachable("reset")]
            self._counts["calls refused"] += 1
            raise self._draw.choice([*errors, Conflict("409", status=409)] if writes else errors)
        result = await work()
        await sleep(self._latency())
        await self._check()
        self.server_ahead_s = -self._ahead_s  # every answer has a date
        if self.is_faulty and self._draw.random() < 0.06:
            self._counts["answers lost"] += 1
            raise Unreachable("the answer was lost")
        return result

    async def _check(self):
        if self.is_cut:
            await sleep(self._draw.uniform(0.5, 10.0))
            raise Unreachable("no route")

    def _latency(self):
        if self.is_faulty and self._draw.random() < 0.05:
            return self._draw.uniform(1.0, 8.0)
        return self._draw.uniform(0.001, 0.1)

    def __getattr__(self, verb):
        """Return the call of the API server with this name, with the faults of the connection."""
        call, writes = getattr(self._kube, verb), verb not in ("get", "list_page")
        return lambda *args, **named: self._call(lambda: call(*args, **named), writes=writes)

    async def watch(self, *args):
        """Yield changes late; a half-dead watch yields none for a while and then breaks."""
        await self._check()
        async for event in self._kube.watch(*args):
            if self.is_cut:
                await self._restored.wait()
                raise Unreachable("watch broken")
            if self.is_faulty and self._draw.random() < 0.01:
                await sleep(self._draw.uniform(5.0, 40.0))
                self._counts["watches broken"] += 1
                raise self._draw.choice([Unreachable("watch broken"), Gone("410", status=410)])
            await sleep(self._draw.uniform(0.0, 0.05))
            yield event


@dataclass
class Host:
    """A kube-scheduler and the extender beside it."""

    name: str
    clock: LoopClock
    connection: Connection
    tasks: dict = field(default_factory=dict)
    main: asyncio.Task | None = None
    extender: Extender | None = None
    is_leader: bool = False
    starts: int = 0


class History:
    """One random history."""

    def __init__(self, seed):
        self.draw = random.Random(seed)  # noqa: S311  # a test, no secret
        self.kube = FakeKube(LoopClock())
        self.nodes = [f"n{number}" for number in range(self.draw.randint(1, 3))]
        self.devices = {name: gpu_node(name, self.draw.randint(1, 2)).status.devices for name in self.nodes}
        for name, devices in self.devices.items():
            seed_node(self.kube, gpu_node(name, devices))
        self.started = {}
        """Node and GPUs of each pod that a kubelet started, by UID."""
        namespace, name = LEASE.split("/")
        self.lease = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"holderIdentity": "", "renewTime": "0"},
        }
        self.kube.seed(LEASES, self.lease)
        self.hosts, self.counts = [], Counter()
        for number in range(2):
            ahead_s = self.draw.choice([0, 0, -60, 60, self.draw.uniform(-60, 60)])
            connection = Connection(self.kube, self.draw, ahead_s, self.counts)
            self.hosts.append(Host(f"host{number}", LoopClock(ahead_s), connection))
        self.jobs = self.strangers = self.lost_nodes = 0
        self.is_active = True

    async def run(self):
        always = [asyncio.create_task(self._agent(name)) for name in self.nodes]
        always += [asyncio.create_task(self._kubelets()), asyncio.create_task(self._users())]
        for host in self.hosts:
            host.connection.is_faulty = True
            self._boot(host)
        faults = asyncio.create_task(self._faults())
        await sleep(ACTIVE_S)
        self.is_active = False
        faults.cancel()
        for host in self.hosts:
            host.connection.is_faulty = False
            host.connection.restore()
            if not host.tasks:
                self._boot(host)
        await sleep(QUIET_S)
        dead = [task for task in always if task.done()]
        dead += [host.main for host in self.hosts if host.main is not None and host.main.done()]
        if dead:
            await dead[0]  # raises why it ended
            raise AssertionError("a process of the history ended by itself")
        unwritten = [text for host in self.hosts for text in _unwritten(host)]
        for task in [*always, *(task for host in self.hosts for task in host.tasks)]:
            task.cancel()
        await sleep(0)
        return self._violations() + unwritten

    # Hosts

    def _boot(self, host):
        def start():
            PROCESS.set(host.tasks)
            return asyncio.create_task(self._host(host))

        host.starts += 1
        host.main = copy_context().run(start)

    def _kill(self, host):
        for task in [*host.tasks]:
            task.cancel()
        host.tasks.clear()
        host.is_leader = False

    async def _host(self, host):
        settings = ExtenderSettings(
            candidates=self.draw.choice([1, 3]), scheduler_lease=LEASE, scheduler_host=host.name, queue_order="Arrival"
        )
        host.extender = extender = build(settings, host.connection, host.clock, sleep)
        running = asyncio.create_task(extender.run())
        await extender.informers.wait_synced()
        electing = asyncio.create_task(self._elect(host))
        scheduling = asyncio.create_task(self._schedule(host, extender))
        await asyncio.gather(running, electing, scheduling)

    async def _elect(self, host):
        """client-go's leader election: renew every 2 s, give up after 10 s, take over after 15 s without a change."""
        me, renewed, observed = f"{host.name}_{host.starts}", float("-inf"), (None, 0.0)
        namespace, name = LEASE.split("/")
        loop = asyncio.get_running_loop()
        while True:
            with suppress(KubeError):
                found = await host.connection.get(LEASES, name, dict, namespace=namespace)
                spec, version = found["spec"], found["metadata"]["resourceVersion"]
                if observed[0] != (spec["holderIdentity"], spec["renewTime"]):
                    observed = ((spec["holderIdentity"], spec["renewTime"]), loop.time())
                if spec["holderIdentity"] in ("", me) or loop.time() - observed[1] > 15.0:
                    patch = {
                        "metadata": {"resourceVersion": version},
                        "spec": {"holderIdentity": me, "renewTime": str(loop.time())},
                    }
                    await host.connection.patch(LEASES, name, patch, namespace=namespace)
                    renewed = loop.time()
            was, host.is_leader = host.is_leader, loop.time() - renewed < 10.0
            self.counts["leaders elected"] += host.is_leader and not was
            if was and not host.is_leader:  # kube-scheduler exits; its extender goes on with what it has begun
                await sleep(self.draw.uniform(0.0, 3.0))
            await sleep(2.0)

    async def _schedule(self, host, extender):
        """kube-scheduler: one pod after the other through filter and prioritize, binds at the same time."""
        flying, retry_at = set(), {}
        loop = asyncio.get_running_loop()
        while True:
            await sleep(self.draw.uniform(0.05, 0.5))
            if not host.is_leader or host.connection.is_cut:
                continue
            for item in self._pods():
                uid = item["metadata"]["uid"]
                waits = not item["spec"].get("nodeName") and not item["spec"].get("schedulingGates")
                if not waits or uid in flying or retry_at.get(uid, 0.0) > loop.time() or not host.is_leader:
                    continue
                retry_at[uid] = loop.time() + self.draw.uniform(1.0, 10.0)
                pod = msgspec.convert(item, Pod)
                names = [name for name in self.nodes if self.draw.random() < 0.95]
                fits = (await extender.service.filter(ExtenderArgs(pod=pod, node_names=names))).node_names
                if not fits:
                    continue
                scores = await extender.service.prioritize(ExtenderArgs(pod=pod, node_names=fits))
                best = max(scores, key=lambda one: one.score).host
                args = BindingArgs(
                    pod_name=pod.metadata.name, pod_namespace=pod.metadata.namespace, pod_uid=uid, node=best
                )
                flying.add(uid)
                asyncio.create_task(self._bind(extender, args, flying))  # noqa: RUF006  # the process holds it

    async def _bind(self, extender, args, flying):
        try:
            async with asyncio.timeout(5.0):  # httpTimeout: kube-scheduler tries again while the first bind runs on
                answer = await extender.service.bind(args)
                self.counts["binds done" if not answer.error else "binds failed"] += 1
        except TimeoutError:
            self.counts["binds unanswered"] += 1
        finally:
            flying.discard(args.pod_uid)

    # The rest of the cluster

    def _pods(self):
        """Return the stored pods themselves: copies of all pods would be most of the work."""
        return [*self.kube._objects[PODS.plural].values()]

    async def _agent(self, node):
        """Prepare what is reserved, late or never."""
        read = None
        while True:
            await sleep(self.draw.choice([0.05, 0.3, 1.0]))
            if self.is_active and self.draw.random() < 0.03:
                await sleep(self.draw.uniform(5.0, 35.0))
            try:
                stored = self.kube._find(GPU_NODES, "", node)
            except NotFound:
                continue
            if stored is not read:
                read, found = stored, msgspec.convert(stored, GpuNode)
            known = {(one.pod_uid, one.generation): one for one in found.status.partitions}
            wanted = [
                known.get((one.pod_uid, one.generation)) or self._prepared(one) for one in found.spec.reservations
            ]
            tenants = self._unreserved_tenants(node, found)
            is_new = not found.status.devices or tenants != found.status.tenants
            if wanted != found.status.partitions or is_new:
                status = {"partitions": wanted, "devices": self.devices[node], "tenants": tenants}
                patch = {"status": msgspec.to_builtins(status)}
                await self.kube.patch(GPU_NODES, node, patch, subresource="status")

    def _unreserved_tenants(self, node, found):
        """Return what the agent measures of running pods whose reservation is lost."""
        held = {one.pod_uid for one in found.spec.reservations}
        lost = {uid: gpus for uid, (place, gpus) in self.started.items() if place == node and uid not in held}
        alive = {pod["metadata"]["uid"] for pod in self._pods() if not _has_ended(pod)} if lost else ()
        return [
            Tenant(pod_uid=uid, gpu_uuid=gpu, memory_mib=900)
            for uid, gpus in lost.items()
            if uid in alive
            for gpu in gpus
        ]

    def _prepared(self, held):
        fails = self.is_active and self.draw.random() < 0.05
        state = PartitionState.FAILED if fails else PartitionState.READY
        return Partition(pod_uid=held.pod_uid, generation=held.generation, state=state)

    async def _kubelets(self):
        """Start bound pods whose GPUs are prepared, and end them; delete those that do not start in time."""
        ends, late = {}, {}
        loop = asyncio.get_running_loop()
        while True:
            await sleep(0.5)
            for item in self._pods():
                meta, node = item["metadata"], item["spec"].get("nodeName")
                if not node or item["status"].get("phase") in ("Succeeded", "Failed"):
                    continue
                held = {}
                with suppress(NotFound):
                    stored = self.kube._find(GPU_NODES, "", node)["spec"].get("reservations", [])
                    held = {one["podUid"]: one["gpuUuids"] for one in stored}
                if meta["uid"] not in ends and meta["uid"] in held:
                    ends[meta["uid"]] = loop.time() + self.draw.uniform(5.0, 90.0)
                    self.started[meta["uid"]] = node, held[meta["uid"]]
                    await self._set_phase(meta["name"], "Running")
                elif meta["uid"] not in ends:
                    if late.setdefault(meta["uid"], loop.time() + START_DEADLINE_S) < loop.time():
                        await self._delete_pod(meta["name"])
                elif ends.get(meta["uid"], float("inf")) < loop.time():
                    del self.started[meta["uid"]]
                    await self._set_phase(meta["name"], "Succeeded")

    async def _set_phase(self, name, phase):
        with suppress(KubeError):
            started = [{"name": "train", "state": {"running": {"startedAt": "2026-01-31T12:00:00Z"}}}]
            status = {"phase": phase, "containerStatuses": started}
            await self.kube.patch(PODS, name, {"status": status}, namespace="default", subresource="status")

    async def _users(self):
        """Create and suspend jobs, and create and delete pods."""
        async with asyncio.TaskGroup() as operator:
            while True:
                await sleep(self.draw.uniform(0.5, 6.0))
                if not self.is_active:
                    continue
                what = self.draw.random()
                if what < 0.7 or not self.jobs:
                    operator.create_task(self._create_job())
                elif what < 0.78:
                    self._create_stranger()
                elif what < 0.84:
                    operator.create_task(self._suspend(f"j{self.draw.randint(1, self.jobs)}"))
                elif pods := self._pods():
                    await self._delete_pod(self.draw.choice(pods)["metadata"]["name"])

    async def _delete_pod(self, name):
        with suppress(NotFound):
            await self.kube.delete(PODS, name, namespace="default")

    def _create_stranger(self):
        """Create a pod with the name of a job's worker, on a node or for the scheduler."""
        self.strangers += 1
        spec = {"nodeName": self.draw.choice(self.nodes)} if self.draw.random() < 0.3 else {}
        job = f"j{self.draw.randint(1, self.jobs)}"
        pod = pod_of(job, uid=f"{STRANGER}-{self.strangers}", **spec)
        pod["metadata"]["name"] = f"{job}-worker-0-{1 + self.strangers}"
        self.kube.seed(PODS, pod)

    async def _suspend(self, name):
        """Suspend a job; the operator deletes its recorded pods later."""
        patch = {"spec": {"runPolicy": {"suspend": True}}}
        await self.kube.patch(GPU_TRAINING_JOBS, name, patch, namespace="default")
        await sleep(self.draw.uniform(0.0, 20.0))
        for pod in list(self._pods()):
            if pod["metadata"]["ownerReferences"][0]["name"] == name and not _is_stranger(pod["metadata"]["uid"]):
                await self._delete_pod(pod["metadata"]["name"])

    async def _create_job(self):
        """Create a job with its pods, and record them as late as the operator may."""
        self.jobs += 1
        name, workers = f"j{self.jobs}", self.draw.choice([1, 1, 1, 2])
        spec = self.draw.choice([EXCLUSIVE, SHARED]) | {"workers": workers, "gpusPerWorker": 1}
        seed_job(self.kube, name, spec=spec)
        await record(self.kube, name, 1)
        uids = []
        created = LoopClock().now().strftime("%Y-%m-%dT%H:%M:%SZ")
        for worker in range(workers):
            pod = pod_of(name, worker=worker, schedulingGates=[{"name": GATE_ADMISSION}])
            pod["metadata"]["creationTimestamp"] = created
            uids.append(pod["metadata"]["uid"])
            self.kube.seed(PODS, pod)
        await sleep(self.draw.choice([0.0, 0.0, self.draw.uniform(0.0, 10.0)]))
        await record(self.kube, name, 1, *uids)

    async def _faults(self):
        """Cut hosts off, expire watches, kill processes, lose GpuNodes."""
        while True:
            await sleep(self.draw.uniform(3.0, 25.0))
            host = self.draw.choice(self.hosts)
            what = self.draw.choice(["cut", "cut", "expire", "kill", "lose"])
            self.counts[what] += 1
            if what == "expire":
                self.kube.end_watches(Gone("too old resource version", status=410))
            elif what == "lose":
                await self._lose_node(self.draw.choice(self.nodes))
            elif what == "kill" and host.tasks:
                self._kill(host)
                await sleep(self.draw.uniform(0.0, 5.0))
                self._boot(host)
            elif what == "cut":
                host.connection.cut()
                await sleep(self.draw.uniform(1.0, 40.0))
                host.connection.restore()

    async def _lose_node(self, name):
        """Delete a GpuNode; its agent creates it again, and reports afterwards."""
        await self.kube.delete(GPU_NODES, name)
        try:
            await sleep(self.draw.choice([0.0, self.draw.uniform(0.0, 10.0)]))
        finally:
            self.lost_nodes += 1
            node = gpu_node(name, [])
            uid = f"{node.metadata.uid}-{self.lost_nodes}"
            self.kube.seed(GPU_NODES, structs.replace(node, metadata=structs.replace(node.metadata, uid=uid)))

    # Promises

    def _violations(self):
        """Replay every write, and check the promises after each."""
        found, pods, nodes = [], {}, {}
        places, lost = {}, {}
        for change in self.kube._changes:
            item = change.new or change.old
            name = item["metadata"]["name"]
            if change.plural == "pods":
                pods[name] = change.new
            elif change.plural == "gpunodes":
                if change.new is None:
                    lost |= {(name, uid): one for uid, one in _held(nodes, name).items()}
                before, nodes[name] = _held(nodes, name), change.new
                self.counts["reservations ended"] += len(before.keys() - _held(nodes, name))
                for uid in _held(nodes, name):
                    lost.pop((name, uid), None)
            else:
                continue
            found += _unreserved(pods, nodes, lost) + _moved(pods, nodes, places)
            found += _overcommitted(nodes, _started(pods, lost)) + _strange(nodes)
        found += self._leaks(pods, nodes)
        return list(dict.fromkeys(found))

    def _leaks(self, pods, nodes):
        alive = {pod["metadata"]["uid"] for pod in pods.values() if pod and not _has_ended(pod)}
        return [
            f"leak: {one['podName']} on {name} at the end"
            for name, node in nodes.items()
            for one in (node or {}).get("spec", {}).get("reservations", [])
            if one["podUid"] not in alive
        ]


def _unwritten(host):
    """Return what an extender counts though it is neither written nor a claim."""
    cluster, found = host.extender.informers.cluster, []
    for name, node in cluster.nodes.items():
        written = {one.pod_uid for one in node.spec.reservations}
        for one in cluster.with_assumed(name).spec.reservations:
            if host.extender.binder.node_of(one.pod_uid) is not None:
                continue  # its reservation is being written
            claim = host.extender.admission.claim_of(one.pod_uid)
            if one.pod_uid not in written and (claim is None or claim.node != name):
                found.append(f"{host.name} counts {one.pod_name} on {name} without a reservation")
    jobs = {one.job_uid for node in cluster.nodes.values() for one in node.spec.reservations}
    for job in jobs:
        held = {one.pod_uid for node in cluster.nodes.values() for one in node.spec.reservations if one.job_uid == job}
        if not held <= cluster.pods_of_job(job):
            found.append(f"{host.name} does not count all reservations of {job}")
    return found


def _held(nodes, node):
    return {one["podUid"]: one for one in (nodes.get(node) or {}).get("spec", {}).get("reservations", [])}


def _running(pods):
    return [pod for pod in pods.values() if pod and pod["spec"].get("nodeName") and not _has_ended(pod)]


def _has_ended(pod):
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _is_stranger(uid):
    return uid.startswith(STRANGER)


def _strange(nodes):
    held = [one for name in nodes for one in _held(nodes, name).values()]
    return [f"{one['podName']} is a stranger with a reservation" for one in held if _is_stranger(one["podUid"])]


def _started(pods, lost):
    """Return the lost reservations of pods that use their GPUs nevertheless."""
    running = [pod for pod in _running(pods) if pod["status"].get("phase") == "Running"]
    places = {(pod["spec"]["nodeName"], pod["metadata"]["uid"]) for pod in running}
    return [one for place, one in lost.items() if place in places]


def _unreserved(pods, nodes, lost):
    """Return the bound pods without reservation, except for those that lost it with their GpuNode.

    A binding that was on its way meanwhile may arrive later, even after another reservation elsewhere.
    """
    return [
        f"{pod['metadata']['name']} is bound to {pod['spec']['nodeName']} without a reservation"
        for pod in _running(pods)
        if (uid := pod["metadata"]["uid"]) not in _held(nodes, pod["spec"]["nodeName"])
        and (pod["spec"]["nodeName"], uid) not in lost
        and not _is_stranger(uid)
    ]


def _moved(pods, nodes, places):
    found = []
    for pod in _running(pods):
        uid = pod["metadata"]["uid"]
        held = _held(nodes, pod["spec"]["nodeName"]).get(uid)
        if held is not None and places.setdefault(uid, held["gpuUuids"]) != held["gpuUuids"]:
            found.append(f"{pod['metadata']['name']} was moved while it was bound")
    return found


def _overcommitted(nodes, started):
    found = []
    for name, node in nodes.items():
        for device in (node or {}).get("status", {}).get("devices", []):
            counted = [*_held(nodes, name).values(), *started]
            held = [one for one in counted if device["uuid"] in one["gpuUuids"]]
            usable = device["memoryMib"] - device.get("reservedMib", 0)
            names = sorted(one["podName"] for one in held)
            if len(held) > 1 and any(one["mode"] == SharingMode.EXCLUSIVE for one in held):
                found.append(f"{device['uuid']} is exclusive and has {names}")
            elif len(held) > 1 and sum(one["tenant"].get("memoryMib") or usable for one in held) > usable:
                found.append(f"{device['uuid']} has too little memory for {names}")
    return found


def play(seed):
    """Run one history; return its violations, and how often it had each kind of event."""
    random.seed(seed)  # reflectors spread their tries

    async def one():
        history = History(seed)
        return await history.run(), history.counts

    gc.disable()  # most objects of a history live to its end; scanning them is a sixth of its time
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(one())
    finally:
        gc.enable()
