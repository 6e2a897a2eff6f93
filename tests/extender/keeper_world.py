"""Jobs that want GPUs to themselves, in the order in which they came, and kube-scheduler's questions about them."""

import asyncio

from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import NODES, PODS
from carpool_core.values import PodUid
from carpool_extender.extender_api import BindingArgs
from carpool_extender.testing import gpu_node, seed_job, seed_node, seed_pod, until
from extender_world import World, args, background, filtering, named
from prometheus_client import generate_latest

BOTH = ("a", "b")
ALONE = {"sharing": {"mode": "Exclusive"}}


def born(second):
    return f"2026-11-23T{7 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"


def seed(world, name, second, steps=None, gpus=1, workers=1, spec=None):
    """A job that wants GPUs to itself, created so many seconds after seven."""
    training = {"training": {"steps": steps}} if steps else {}
    size = {"gpusPerWorker": gpus, "workers": workers}
    uid = seed_job(world.kube, name, spec=ALONE | training | size | (spec or {}), created=born(second))
    seed_pod(world.kube, name, gpus=gpus)
    return uid


def crowd(*jobs, nodes=("a",), gpus=1, **chosen):
    """A world in which some jobs came one after the other, a second between."""
    world = World(**chosen)
    for node in nodes:
        seed_node(world.kube, gpu_node(node, gpus))
    for second, name in enumerate(jobs):
        seed(world, name, second)
    return world


async def ask(extender, job, names=("a",), **pod):
    answer = await extender.service.filter(filtering(job, names, **pod))
    return named(answer), next(iter((answer.failed_nodes or {}).values()), "")


async def start(world, extender, job, node="a"):
    async with background(world.agent.serve(node)):
        assert (await extender.service.bind(args(job, node))).error == ""
    await until(
        lambda: (pod := extender.informers.pod(PodUid(f"pod-{job}"))) is not None and pod.spec.node_name == node
    )


def bind_of(worker, node):
    """Binds a worker of the job `gang`."""
    uid = f"pod-gang-{worker}" if worker else "pod-gang"
    return BindingArgs(pod_name=f"gang-worker-{worker}-1", pod_namespace="default", pod_uid=uid, node=node)


async def end(world, extender, job):
    await world.kube.delete(PODS, f"{job}-worker-0-1", namespace="default")
    await until(lambda: extender.informers.pod(PodUid(f"pod-{job}")) is None)
    await until(lambda: not extender.informers.cluster.nodes_holding(PodUid(f"pod-{job}")))


async def pass_s(world, seconds):
    """Let time pass in which GPUs that are kept are looked at."""
    for _ in range(int(2 * seconds)):
        world.clock.advance(0.5)
        for _ in range(5):
            await asyncio.sleep(0)


def gang_of(workers, nodes, gpus=1, **spec):
    """A job of several workers for all of which there is room at once, and one that came later."""
    world = World(candidates=1, queue_order="Arrival")
    for name in nodes:
        seed_node(world.kube, gpu_node(name, gpus))
    seed(world, "gang", 1, workers=workers, spec=spec)
    for worker in range(1, workers):
        seed_pod(world.kube, "gang", worker=worker)
    seed(world, "late", 700)
    return world


async def told_to(extender, *workers, names=("a",)):
    return [(await ask(extender, "gang", names, worker=worker))[0] for worker in workers]


def counts(extender):
    told = generate_latest(extender.registry).decode().splitlines()
    head = 'carpool_extender_kept_total{outcome="'
    return {line.removeprefix(head).split('"')[0]: float(line.split()[-1]) for line in told if line.startswith(head)}


def touched(world, node="a"):
    return world.kube.dump(NODES, node)["metadata"].get("annotations", {}).get(ANNOTATION_CAPACITY_FREED)


async def busy_both(world, extender):
    """Have somebody on each of two nodes."""
    seed(world, "other", 9)
    for job, node in (("busy", "a"), ("other", "b")):
        await start(world, extender, job, node)


async def kept_for_first(world, extender, *others):
    """Let `first` have a GPU kept, by asking about `second`, who is refused."""
    await start(world, extender, "busy")
    for job in ("first", "second", *others):
        await ask(extender, job)
    await end(world, extender, "busy")
    assert (await ask(extender, "second"))[0] == []
