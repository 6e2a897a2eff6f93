"""An operator on a cluster in memory, with a scheduler and nodes that the test controls, and crashes."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from carpool_core.clock import rfc3339
from carpool_core.keys import RESOURCE_GPU, SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, ResourceKind
from carpool_core.kube.errors import KubeError
from carpool_core.kube.pods import Pod
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import GpuTrainingJob, ModelSource, Training
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import GpuNode
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_operator.app import Operator
from carpool_operator.conditions import find
from carpool_operator.settings import OperatorSettings
from carpool_predictor.features import Abstention
from operator_fixtures import FEATURES, device, job_body, reservation

T = TypeVar("T", Pod, GpuNode, GpuTrainingJob)


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


class FakeTracer:
    """Counts what it traces; answers with the same features."""

    def __init__(self, answer: ModelFeatures | Abstention | Exception | None = None) -> None:
        self.answer = answer or msgspec.convert(FEATURES, ModelFeatures)
        self.stored: ModelFeatures | None = None
        self.traced: list[ModelSource] = []

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        self.traced.append(model)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def lookup(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention | None:
        return self.stored


class MortalKube(FakeKube):
    """Kills its caller at a write: before it happens, or after it, before the answer."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.writes = 0
        self.lethal: tuple[int, bool] | None = None
        """(which write from now on, whether it still happens)"""

    async def _guarded(self, write: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        self.writes += 1
        lethal, happens = self.lethal or (0, False)
        if lethal != self.writes:
            return await write(*args, **options)
        self.lethal = None
        if happens:
            await write(*args, **options)
        raise Killed

    async def create(self, *args: Any, **options: Any) -> Any:
        return await self._guarded(super().create, args, options)

    async def patch(self, *args: Any, **options: Any) -> Any:
        return await self._guarded(super().patch, args, options)

    async def replace_status(self, *args: Any, **options: Any) -> Any:
        return await self._guarded(super().replace_status, args, options)

    async def delete(self, *args: Any, **options: Any) -> None:
        await self._guarded(super().delete, args, options)

    def kill_at(self, write: int, *, happens: bool) -> None:
        self.writes, self.lethal = 0, (write, happens)


def status_writes(world: "World") -> int:
    return sum(call.verb == "replace" for call in world.kube.calls)


class World:
    """A cluster with one node of four GPUs, and the operator."""

    def __init__(self, tracer: FakeTracer | None = None, **settings: Any) -> None:
        self.clock = FakeClock()
        self.kube = MortalKube(self.clock)
        self.tracer = tracer or FakeTracer()
        self.settings = OperatorSettings(**settings)
        self.seed_node()
        self.start()

    def seed_node(self, name: str = "n1", gpus: int = 4) -> None:
        devices = [msgspec.to_builtins(device(f"{name}-GPU-{i}")) | {"index": i} for i in range(gpus)]
        self.kube.seed(GPU_NODES, {"metadata": {"name": name}, "spec": {}, "status": {"devices": devices}})

    def start(self) -> None:
        """Start the operator with empty caches."""
        self.operator: Operator = Operator(self.settings, self.kube, self.clock, self.tracer, self.clock.sleep)
        self._delivered: dict[str, dict[str, Any]] = {"pods": {}, "gpunodes": {}, "gputrainingjobs": {}}
        self._is_loaded = False

    def apply(self, name: str = "x", **spec: Any) -> None:
        self.kube.seed(GPU_TRAINING_JOBS, job_body(name, **spec))

    # Events

    def deliver_events(self, *, pods: bool = True) -> None:
        """Bring the operator's caches up to date, all or all but the pods'."""
        operator = self.operator
        for old, new in self._changes(GPU_NODES, GpuNode):
            operator.nodes.changed(old, new)
        if pods:
            for old_pod, new_pod in self._changes(PODS, Pod):
                operator.pod_changed(old_pod, new_pod)
        for old_job, new_job in self._changes(GPU_TRAINING_JOBS, GpuTrainingJob):
            operator.jobs.changed(old_job, new_job)

    def _changes(self, kind: ResourceKind, type_: type[T]) -> list[tuple[T | None, T | None]]:
        before = self._delivered[kind.plural]
        items = self.kube.dump_all(kind)
        if kind is PODS:
            items = [item for item in items if item.get("spec", {}).get("schedulerName") == SCHEDULER_NAME]
        now = {item["metadata"]["uid"]: msgspec.convert(item, type_) for item in items}
        self._delivered[kind.plural] = now
        return [(before.get(uid), now.get(uid)) for uid in {**before, **now} if before.get(uid) != now.get(uid)]

    async def settle(self, *, after_s: float = 0.0, pods: bool = True, rounds: int = 50) -> None:
        """Let this time pass, and the operator do all that it wants to do then."""
        self.clock.advance(after_s)
        if not self._is_loaded:
            await self.operator.calibrator.load()
            self._is_loaded = True
        for _ in range(rounds):
            self.deliver_events(pods=pods)
            await self.operator.predictions.idle()
            key = self.operator.queue.take_now()
            if key is None:
                if await self._learn():
                    continue
                return
            try:
                await self.operator.process(key)
            finally:
                self.operator.queue.done(key)
        raise AssertionError(f"the operator does not come to rest in {rounds} looks")

    async def submit(self, name: str = "x", **spec: Any) -> "World":
        """Apply a job, and let the operator settle; returns this world."""
        self.apply(name, **spec)
        await self.settle()
        return self

    async def start_pods(self, node: str = "n1", name: str = "x") -> None:
        """Place and start the job's pending pods, and let the operator settle."""
        self.run_pods(node, name)
        await self.settle()

    async def finish_pod(self, name: str, exit_code: int = 0, message: str = "") -> None:
        """End a pod's container, and let the operator settle."""
        self.end_pod(name, exit_code, message)
        await self.settle()

    async def reconcile_again(self, name: str = "x") -> None:
        """Add the job to the queue, and let the operator settle."""
        self.operator.queue.add(f"default/{name}")
        await self.settle()

    async def _learn(self) -> bool:
        """Let the operator store its observations; return whether there were any and all are stored."""
        if self.operator.calibrator.is_settled:
            return False
        try:
            await self.operator.calibrator.flush()
        except KubeError:
            return False
        return self.operator.calibrator.is_settled

    async def survive(self, write: int, *, happens: bool) -> bool:
        """Let the operator work until it is killed at a write, and start it again; False where it needed fewer."""
        self.kube.kill_at(write, happens=happens)
        try:
            await self.settle()
        except Killed:
            self.start()
            return True
        self.kube.lethal = None
        return False

    # Other actors

    def pods(self, name: str = "x") -> list[dict[str, Any]]:
        return [pod for pod in self.kube.dump_all(PODS) if pod["metadata"]["name"].startswith(f"{name}-worker-")]

    def living(self, name: str = "x") -> list[str]:
        """Names of pods that have not finished."""
        return [p["metadata"]["name"] for p in self.pods(name) if p["status"]["phase"] in ("Pending", "Running")]

    def job(self, name: str = "x") -> GpuTrainingJob:
        return msgspec.convert(self.kube.dump(GPU_TRAINING_JOBS, name, "default"), GpuTrainingJob)

    def run_pods(self, node: str = "n1", name: str = "x", **reserved_with: Any) -> None:
        """Reserve, bind and start every pending pod, as extender, agent and kubelet would."""
        for number, pod in enumerate(self.pods(name)):
            if pod["status"]["phase"] != "Pending":
                continue
            metadata, owner = pod["metadata"], pod["metadata"]["ownerReferences"][0]
            home = self.kube.dump(GPU_NODES, node)
            gpus = int(pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE_GPU])
            uuids = [f"{node}-GPU-{(number * gpus + index) % 4}" for index in range(gpus)]
            reserved = reservation(metadata["uid"], owner["uid"], gpuUuids=uuids, **reserved_with)
            home["spec"].setdefault("reservations", []).append(reserved)
            self.kube.seed(GPU_NODES, home)
            pod["spec"]["nodeName"] = node
            started = {"running": {"startedAt": "2026-01-31T12:00:01Z"}}
            bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(self.clock.now())}
            statuses = [{"name": "train", "state": started}]
            pod["status"] = {"phase": "Running", "conditions": [bound], "containerStatuses": statuses}
            self.kube.seed(PODS, pod)

    def condition(self, type_: str, name: str = "x") -> Condition:
        """A condition of the job, which has it."""
        found = find(self.job(name).status, type_)
        assert found is not None, f"no condition {type_}"
        return found

    def measure(self, peak_mib: int, name: str = "x", node: str = "n1", **measures: Any) -> None:
        """Let the agent report the memory of a job's pods: the peak on the last GPU of each, half of it on others."""
        home = self.kube.dump(GPU_NODES, node)
        living = {pod["metadata"]["uid"] for pod in self.pods(name) if pod["status"]["phase"] == "Running"}
        tenants = [t for t in home["status"].get("tenants", []) if t["podUid"] not in living]
        for held in home["spec"].get("reservations", []):
            for gpu in held["gpuUuids"] if held["podUid"] in living else ():
                mib = peak_mib if gpu == held["gpuUuids"][-1] else peak_mib // 2
                measured = {"podUid": held["podUid"], "gpuUuid": gpu, "memoryMib": mib, "peakMemoryMib": mib}
                tenants.append(measured | measures)
        home["status"]["tenants"] = tenants
        self.kube.seed(GPU_NODES, home)

    def end_pod(self, name: str, exit_code: int = 0, message: str = "") -> None:
        """Let a pod's container end."""
        pod = self.kube.dump(PODS, name, "default")
        ended = {"terminated": {"exitCode": exit_code, "message": message, "reason": "Error" if exit_code else ""}}
        phase = "Failed" if exit_code else "Succeeded"
        pod["status"] = {"phase": phase, "containerStatuses": [{"name": "train", "state": ended}]}
        self.kube.seed(PODS, pod)


async def submitted(name: str = "x", **spec: Any) -> World:
    """A world with one job, to which the operator has reacted."""
    return await World().submit(name, **spec)


async def running(name: str = "x", **spec: Any) -> World:
    """A world with one job whose pods run."""
    world = await submitted(name, **spec)
    await world.start_pods(name=name)
    return world
