"""A prediction that comes with the pod, before the job's status tells it: believed only from who has the key."""

from dataclasses import replace

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_PREDICTION
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.kube.pods import Pod
from carpool_core.sealing import Sealed, Sealer
from carpool_extender.extender_api import ExtenderArgs
from carpool_extender.testing import gpu_node, pod_of, prediction, seed_job, seed_node, until
from extender_world import NAMES, World, args, background, named

KEY = b"k" * 32


@pytest.fixture
def world(tmp_path):
    """Nodes, and a job of which the status tells nothing yet."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    world = World(prediction_key=key)
    for name in NAMES:
        seed_node(world.kube, gpu_node(name))
    add_job(world, "x")
    return world


def add_job(world, name):
    seed_job(world.kube, name)
    job = world.kube.dump(GPU_TRAINING_JOBS, name, "default")
    world.kube.seed(GPU_TRAINING_JOBS, {**job, "status": {}})


def generation(world, name="x"):
    return world.kube.dump(GPU_TRAINING_JOBS, name, "default")["metadata"]["generation"]


def seal(world, job="job-x", key=KEY, **changes):
    told = {"job": job, "generation": generation(world), "prediction": prediction(memory_mib=9000), **changes}
    return Sealer(key).seal(Sealed(**told))


def put_pod(world, value, job="x"):
    body = pod_of(job)
    body["metadata"]["annotations"] = {ANNOTATION_PREDICTION: value}
    return world.kube.seed(PODS, body)


async def filtered(extender, body):
    return await extender.service.filter(ExtenderArgs(pod=msgspec.convert(body, Pod), node_names=list(NAMES)))


def reads(world):
    return sum(call.verb == "get" and call.plural == GPU_TRAINING_JOBS.plural for call in world.kube.calls)


async def test_pod_is_placed_by_what_it_carries(world):
    body = put_pod(world, seal(world))
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert named(await filtered(extender, body)) == NAMES
        known = extender.informers.pod("pod-x")
        assert (await extender.service.bind(args())).error == ""
        held = world.reservations("a")
        assert [r["tenant"]["memoryMib"] for r in held] == [9000]
        assert reads(world) == 0, "the job's status need not be read"
        await until(lambda: world.bound_to() == "a")
        await until(lambda: ANNOTATION_PREDICTION not in extender.informers.pod("pod-x").metadata.annotations)
        assert ANNOTATION_PREDICTION in known.metadata.annotations


@pytest.mark.parametrize(
    "forge",
    [
        lambda world: seal(world, key=b"K" * 32),
        lambda world: seal(world, job="job-y"),
        lambda world: seal(world, generation=generation(world) + 1),
        lambda world: seal(world)[:-2] + " }",
        lambda world: msgspec.json.encode(prediction(memory_mib=1)).decode(),
        lambda _: "",
    ],
    ids=["another key", "another job's", "another generation", "changed", "not sealed", "empty"],
)
async def test_what_is_not_the_operators_word_is_not_believed(world, forge):
    body = put_pod(world, forge(world))
    async with world.extender() as extender:
        found = await filtered(extender, body)
        assert named(found) == []
        assert found.error.startswith("NotPredicted: the status of job x tells no prediction yet, and what pod ")
        told = (await extender.service.bind(args())).error
        assert told == found.error
        assert world.held() == {}
        assert [
            score.score
            for score in await extender.service.prioritize(
                ExtenderArgs(pod=msgspec.convert(body, Pod), node_names=list(NAMES))
            )
        ] == [0, 0]
        # Once the status tells it, nobody needs the annotation.
        status = {"status": {"prediction": msgspec.to_builtins(prediction(memory_mib=8000))}}
        await world.kube.patch(GPU_TRAINING_JOBS, "x", status, namespace="default", subresource="status")
        await until(lambda: extender.informers.job("job-x").status.prediction is not None)
        assert named(await filtered(extender, body)) == NAMES


async def test_without_a_key_nothing_on_a_pod_is_believed(world):
    body = put_pod(world, seal(world))
    world.settings = replace(world.settings, prediction_key=None)
    async with world.extender() as extender:
        assert "NotPredicted" in (await filtered(extender, body)).error


async def test_status_is_believed_before_the_pod(world):
    body = put_pod(world, seal(world))
    status = {"status": {"prediction": msgspec.to_builtins(prediction(memory_mib=8000))}}
    await world.kube.patch(GPU_TRAINING_JOBS, "x", status, namespace="default", subresource="status")
    async with world.extender() as extender, background(world.agent.serve("a")):
        await filtered(extender, body)
        assert (await extender.service.bind(args())).error == ""
    assert [r["tenant"]["memoryMib"] for r in world.reservations("a")] == [8000]


async def test_status_that_comes_between_filter_and_bind_counts(world):
    body = put_pod(world, seal(world))
    async with world.extender() as extender, background(world.agent.serve("a")):
        await filtered(extender, body)
        status = {"status": {"prediction": msgspec.to_builtins(prediction(memory_mib=8000))}}
        await world.kube.patch(GPU_TRAINING_JOBS, "x", status, namespace="default", subresource="status")
        await until(lambda: extender.informers.job("job-x").status.prediction is not None)
        assert (await extender.service.bind(args())).error == ""
    assert [r["tenant"]["memoryMib"] for r in world.reservations("a")] == [8000]


async def test_job_that_the_watch_has_not_seen_is_read(world):
    async with world.extender() as extender:
        add_job(world, "y")
        body = put_pod(world, seal(world, job="job-y", generation=generation(world, "y")), "y")
        assert named(await filtered(extender, body)) == NAMES
        assert reads(world) == 1
