"""Random histories of pods and nodes: afterwards only written reservations count."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress

import pytest
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Conflict, Forbidden, NotFound, Unreachable
from carpool_core.resources.node import GpuNode
from carpool_core.values import PodUid
from carpool_extender.extender_api import BindingArgs
from carpool_extender.testing import gpu_node, seed_job, seed_node, seed_pod
from extender_world import World, background, filtering

SHARED = {"sharing": {"mode": "TimeSlicing"}, "memory": {"limit": "15Gi"}}


class Play:
    """Jobs of one to three workers on a few nodes, and somebody who asks, binds, deletes and breaks at random.

    Args:
        number: Of the play; the same one always does the same.
    """

    def __init__(self, number):
        self.random = random.Random(number)  # noqa: S311
        self.world = World(candidates=self.random.choice([1, 3]))
        self.nodes = [f"n{number}" for number in range(self.random.randint(2, 4))]
        for name in self.nodes:
            seed_node(self.world.kube, gpu_node(name, self.random.randint(1, 4)))
        self.pods = []
        for number in range(4):
            workers, gpus = self.random.choice([(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
            name, spec = f"j{number}", self.random.choice([{}, SHARED])
            alone = {"sharing": {"mode": "Exclusive"}, "workers": workers, "gpusPerWorker": gpus}
            seed_job(self.world.kube, name, spec=alone | spec)
            for worker in range(workers):
                seed_pod(self.world.kube, name, worker=worker, gpus=gpus)
            self.pods += [(name, worker, gpus) for worker in range(workers)]
        self.told, self.tasks = {}, []

    async def wait(self, times):
        for _ in range(self.random.choice(times)):
            await asyncio.sleep(0)

    async def serve(self, node):
        """An agent that has every reservation ready, where it can."""
        while True:
            with suppress(NotFound, Conflict, Unreachable):
                found = await self.world.kube.get(GPU_NODES, node, GpuNode)
                held = {(one.pod_uid, one.generation) for one in found.spec.reservations}
                if held != {(one.pod_uid, one.generation) for one in found.status.partitions}:
                    await self.world.agent.report(node)
            await asyncio.sleep(0)

    async def ask(self, extender, pod):
        job, worker, gpus = pod
        offered = [name for name in self.nodes if self.random.random() < 0.9]
        fits = (await extender.service.filter(filtering(job, offered, worker=worker, gpus=gpus))).node_names
        self.told[pod] = self.random.choice(fits) if fits else None

    def bind(self, extender):
        pod, node = self.random.choice([(pod, node) for pod, node in self.told.items() if node] or [(None, None)])
        if pod is None:
            return
        self.told.pop(pod)
        if self.random.random() < 0.2:
            self.world.kube.fail_next("create", PODS, Forbidden("no", status=403), subresource="binding")
        if self.random.random() < 0.2:
            self.world.kube.fail_next(
                "patch", GPU_NODES, self.random.choice([Conflict("c", status=409), Unreachable("u")])
            )
        binding = BindingArgs(pod_name=named(pod), pod_namespace="default", pod_uid=uid(pod), node=node)
        self.tasks.append(asyncio.create_task(extender.service.bind(binding)))

    async def act(self, extender):
        chance, pod = self.random.random(), self.random.choice(self.pods)
        known = extender.informers.pod(PodUid(uid(pod)))
        if chance < 0.55:
            if known is not None and not known.spec.node_name and extender.binder.node_of(PodUid(uid(pod))) is None:
                self.tasks.append(asyncio.create_task(self.ask(extender, pod)))
        elif chance < 0.8:
            self.bind(extender)
        elif chance < 0.86:
            with suppress(NotFound):
                await self.world.kube.delete(PODS, named(pod), namespace="default")
        elif chance < 0.9:
            name = self.random.choice(self.nodes)
            try:
                await self.world.kube.delete(GPU_NODES, name)
            except NotFound:
                seed_node(self.world.kube, gpu_node(name, 2))
        else:
            self.world.clock.advance(0.5)
        await self.wait([0, 3, 20])


def uid(pod):
    return f"pod-{pod[0]}-{pod[1]}" if pod[1] else f"pod-{pod[0]}"


def named(pod):
    return f"{pod[0]}-worker-{pod[1]}-1"


@pytest.mark.parametrize("number", range(25))
async def test_after_random_histories_only_written_reservations_count(number):
    play = Play(number)
    async with play.world.extender() as extender, AsyncExitStack() as agents:
        for name in play.nodes:
            await agents.enter_async_context(background(play.serve(name)))
        for _ in range(80):
            await play.act(extender)
        for _ in range(240):
            play.world.clock.advance(1)
            for _ in range(10):
                await asyncio.sleep(0)
        assert all(task.done() and task.exception() is None for task in play.tasks)
        cluster = extender.informers.cluster
        for name, node in cluster.nodes.items():
            assert cluster.with_assumed(name) == node, "nobody counts whose reservation is not written"
        for job in {pod[0] for pod in play.pods}:
            held = {r.pod_uid for node in cluster.nodes.values() for r in node.spec.reservations if r.job_name == job}
            assert cluster.pods_of_job(f"job-{job}") == held
