"""A server, a clock and agents in memory, on which extenders come and go."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import msgspec
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, LEASES, PODS
from carpool_core.kube.pods import Pod
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.app import build
from carpool_extender.extender_api import BindingArgs, ExtenderArgs
from carpool_extender.settings import ExtenderSettings
from carpool_extender.testing import FakeAgent, gpu_node, pod_of, seed_job, seed_node, seed_pod

LEASE = "carpool-system/carpool-scheduler"
NAMES = ["a", "b"]


def hold_lease(kube, holder):
    namespace, name = LEASE.split("/")
    body = {"metadata": {"name": name, "namespace": namespace}, "spec": {"holderIdentity": holder}}
    kube.seed(LEASES, body)


async def record(kube, job, number, *uids):
    """Write the pods of a job's latest attempt into its status, as the operator does."""
    status = {"status": {"attempts": [{"number": number, "outcome": "Creating", "podUids": list(uids)}]}}
    await kube.patch(GPU_TRAINING_JOBS, job, status, namespace="default", subresource="status")


class World:
    """A server, a clock, agents; extenders come and go.

    Args:
        leads: Whether the extender leads. If it does not, filter and bind are tested without claims.
        settings: Settings of the extender; by default filter returns every node that fits.
    """

    def __init__(self, *, leads=False, **settings):
        defaults = {"candidates": 100, "scheduler_lease": LEASE, "scheduler_host": "here"}
        self.settings = ExtenderSettings(**(defaults | settings))
        self.clock = FakeClock()
        self.kube = FakeKube(self.clock)
        self.agent = FakeAgent(self.kube)
        self.hold("here_1" if leads else "elsewhere_1")

    def hold(self, holder):
        """Give the scheduler's Lease to a holder."""
        hold_lease(self.kube, holder)

    @asynccontextmanager
    async def extender(self, gather_s=0):
        """A running extender; leaving kills it as SIGKILL would, wherever it is."""
        before = asyncio.all_tasks()
        parts = build(self.settings, self.kube, self.clock, self.clock.sleep, gather_s=gather_s)
        parts_task = asyncio.create_task(parts.run())
        await parts.informers.wait_synced()
        try:
            yield parts
        finally:
            mine = asyncio.all_tasks() - before - {asyncio.current_task()}
            for task in {parts_task, *mine}:
                task.cancel()
            await asyncio.gather(parts_task, *mine, return_exceptions=True)

    def add(self, *jobs, nodes=NAMES, gpus=1):
        for name in nodes:
            seed_node(self.kube, gpu_node(name, gpus))
        for name in jobs:
            seed_job(self.kube, name)
            seed_pod(self.kube, name)

    def reservations(self, node):
        return self.kube.dump(GPU_NODES, node).get("spec", {}).get("reservations", [])

    def held(self):
        return {name: [r["podUid"] for r in self.reservations(name)] for name in NAMES if self.reservations(name)}

    def pod(self, job="x"):
        return self.kube.dump(PODS, f"{job}-worker-0-1", "default")

    def bound_to(self, job="x"):
        return self.pod(job)["spec"].get("nodeName", "")

    def writes(self, plural):
        return [call for call in self.kube.calls if call.plural == plural and call.verb in ("create", "patch")]

    def events(self):
        return [(event["reason"], event["message"]) for event in self.kube.dump_all(EVENTS)]


def args(job="x", node="a", uid=""):
    return BindingArgs(pod_name=f"{job}-worker-0-1", pod_namespace="default", pod_uid=uid or f"pod-{job}", node=node)


def named(result):
    return json.loads(msgspec.json.encode(result))["NodeNames"]


def filtering(job="x", names=NAMES, **pod):
    return ExtenderArgs(pod=msgspec.convert(pod_of(job, **pod), Pod), node_names=list(names))


@asynccontextmanager
async def background(coroutine):
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
