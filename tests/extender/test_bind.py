"""Whole binds on a server in memory: replays, races, failures, and a kill between each two steps."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import parse_rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED, ANNOTATION_GPUS, ANNOTATION_MODE
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, Overloaded, Unreachable
from carpool_core.kube.pods import Pod
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PartitionState, SharingMode
from carpool_extender.app import build
from carpool_extender.binding import LATE_S
from carpool_extender.janitor import GRACE_S
from carpool_extender.settings import ExtenderSettings
from carpool_extender.testing import (
    FakeAgent,
    gpu_node,
    pod_of,
    seed_job,
    seed_node,
    seed_pod,
    tenant,
    until,
)
from carpool_extender.wire import BindingArgs, ExtenderArgs

NAMES = ["a", "b"]


class World:
    """A server, a clock, agents; extenders come and go."""

    def __init__(self):
        self.clock = FakeClock()
        self.kube = FakeKube(self.clock)
        self.agent = FakeAgent(self.kube, self.clock)

    @asynccontextmanager
    async def extender(self):
        """A running extender; leaving kills it as SIGKILL would, wherever it is."""
        before = asyncio.all_tasks()
        parts = build(ExtenderSettings(), self.kube, self.clock, self.clock.sleep)
        parts_task = asyncio.create_task(parts.run())
        await parts.watches.wait_synced()
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


@pytest.fixture
def world():
    return World()


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


async def test_a_pod_is_reserved_prepared_and_bound(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() == {"a": ["pod-x"]})
        assert not binding.done()
        assert world.bound_to() == ""
        await world.agent.report("a")
        assert (await binding).error == ""
    assert world.bound_to() == "a"
    annotations = world.pod()["metadata"]["annotations"]
    assert annotations[ANNOTATION_GPUS] == "GPU-a-0"
    assert annotations[ANNOTATION_MODE] == "MPS"
    [reservation] = world.reservations("a")
    assert reservation["memoryLimitMib"] == 4000
    assert reservation["policy"] == "least-slowdown"
    assert reservation["reason"].startswith("least-slowdown: MPS on GPU 0 of a alone; 36,960 of 40,960 MiB left")


async def test_filter_and_prioritize_write_nothing(world):
    world.add("x")
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering())) == NAMES
        assert {p.host: p.score for p in await extender.service.prioritize(filtering())}["a"] == 10
    assert not [call for call in world.kube.calls if call.verb in ("create", "patch", "delete")]


async def test_a_replay_for_the_same_node_joins_the_open_bind(world):
    world.add("x")
    async with world.extender() as extender:
        first = asyncio.create_task(extender.service.bind(args()))
        await until(lambda: world.held() != {})
        second = asyncio.create_task(extender.service.bind(args()))
        first.cancel()  # kube-scheduler hung up; the bind goes on
        await world.agent.report("a")
        assert (await second).error == ""
        assert (await extender.service.bind(args())).error == ""
    assert world.held() == {"a": ["pod-x"]}
    assert len([call for call in world.kube.calls if call.subresource == "binding"]) == 1


async def test_a_replay_for_another_node_is_told_where_the_pod_is_being_bound(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        assert "is being bound to node a at present" in (await extender.service.bind(args(node="b"))).error
        await world.agent.report("a")
        await binding
        answer = await extender.service.bind(args(node="b"))
    assert "is bound to node a, so it cannot be bound to b" in answer.error or "reservation on node a" in answer.error
    assert world.held() == {"a": ["pod-x"]}


async def test_two_pods_race_for_the_last_place_and_one_gets_it(world):
    world.add("x", "y", nodes=["a"])
    for job in ("x", "y"):
        seed_job(world.kube, job, memory_mib=30000)
    async with world.extender() as extender, background(world.agent.serve("a")):
        answers = await asyncio.gather(extender.service.bind(args("x")), extender.service.bind(args("y")))
    assert sorted(bool(answer.error) for answer in answers) == [False, True]
    assert "needs 30,000 MiB; freest NVIDIA A100-SXM4-40GB has 10,960 MiB free" in "".join(a.error for a in answers)
    assert len(world.reservations("a")) == 1


async def test_two_extenders_race_for_one_node(world):
    world.add("x", "y", nodes=["a"])
    for job in ("x", "y"):
        seed_job(world.kube, job, memory_mib=30000)
    async with world.extender() as one, world.extender() as other, background(world.agent.serve("a")):
        answers = await asyncio.gather(one.service.bind(args("x")), other.service.bind(args("y")))
    assert sorted(bool(answer.error) for answer in answers) == [False, True]
    assert len(world.reservations("a")) == 1


async def test_two_extenders_race_for_one_pod(world):
    world.add("x")
    async with (
        world.extender() as one,
        world.extender() as other,
        background(world.agent.serve("a")),
        background(world.agent.serve("b")),
    ):
        answers = await asyncio.gather(one.service.bind(args()), other.service.bind(args(node="b")))
        assert sorted(bool(answer.error) for answer in answers) == [False, True]
        assert world.bound_to() in NAMES
        await until(lambda: world.held() == {world.bound_to(): ["pod-x"]})


async def test_conflicts_are_decided_again(world):
    world.add("x")
    for _ in range(3):
        world.kube.fail_next("patch", GPU_NODES, Conflict("changed", status=409))
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""


async def test_endless_conflicts_end_in_an_error(world):
    world.add("x")
    for _ in range(50):
        world.kube.fail_next("patch", GPU_NODES, Conflict("changed", status=409))
    async with world.extender() as extender:
        assert "was not bound to node a: changed" in (await extender.service.bind(args())).error
    assert len([c for c in world.kube.calls if c.verb == "patch" and c.plural == "gpunodes"]) == 8


async def test_a_lost_answer_to_the_reservation_is_found_again(world):
    world.add("x")
    world.kube.fail_next("patch", GPU_NODES, Unreachable("reset"), after=True)
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())) as binding,
    ):
        await until(lambda: world.clock.sleeping != [])
        await until(lambda: min(world.clock.sleeping) < 1)
        world.clock.advance(0.1)
        assert (await binding).error == ""
    assert world.held() == {"a": ["pod-x"]}


async def test_a_partition_that_fails_is_given_back_with_an_event(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
        answer = await binding
        assert answer.error == "node a could not prepare MPS for pod default/x-worker-0-1: the MPS daemon did not start"
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))
    assert world.held() == {}
    assert world.events() == [("PartitionFailed", answer.error)]


async def test_a_silent_agent_ends_at_the_deadline(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await until(lambda: any(seconds > 10 for seconds in world.clock.sleeping))
        world.clock.advance(20)
        answer = await binding
    assert "did not prepare the GPU for pod default/x-worker-0-1 within 20 s" in answer.error
    assert world.held() == {}
    assert [reason for reason, _ in world.events()] == ["PartitionTimeout"]


def names_and_refusals(found):
    return named(found), set(found.failed_nodes.values())


async def fails(world, extender, node="a"):
    """A bind whose GPU the agent cannot prepare."""
    async with background(extender.service.bind(args(node=node))) as binding:
        await until(lambda: world.reservations(node))
        await world.agent.report(node, PartitionState.FAILED, "the MPS daemon did not start")
        assert "could not prepare MPS" in (await binding).error


async def test_a_gpu_that_cannot_be_prepared_is_left_alone_for_longer_and_longer(world):
    world.add("x")
    async with world.extender() as extender:
        for rest in (30, 60, 120, 240, 480, 600, 600):
            await fails(world, extender)
            begins = world.clock.now() + timedelta(seconds=rest)
            sentence = f"NoGpuFits: 1 node: could not be prepared, is tried again at {begins:%Y-%m-%dT%H:%M:%SZ}"
            found = await extender.service.filter(filtering())
            assert names_and_refusals(found) == (["b"], {sentence})
            world.clock.advance(rest - 1)
            assert named(await extender.service.filter(filtering())) == ["b"]
            world.clock.advance(1)
            assert named(await extender.service.filter(filtering())) == NAMES


async def test_another_gpu_of_the_node_is_taken_meanwhile_and_a_success_ends_the_count(world):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender:
        await fails(world, extender)
        async with background(world.agent.serve("a")):
            assert (await extender.service.bind(args())).error == ""
        assert world.reservations("a")[0]["gpuUuids"] == ["GPU-a-1"]


async def test_waiting_pods_are_tried_again_when_the_rest_is_over(world):
    world.add("x", nodes=["a"])

    def touched():
        return world.kube.dump(NODES, "a")["metadata"].get("annotations", {}).get(ANNOTATION_CAPACITY_FREED)

    async with world.extender() as extender:
        await fails(world, extender)
        await until(touched)
        first = touched()
        for _ in range(8):
            await until(lambda: any(seconds > 4 for seconds in world.clock.sleeping))
            world.clock.advance(5)
        await until(lambda: touched() != first)


async def test_an_agent_that_no_longer_reports_gets_no_more_jobs(world):
    """Counted from the last report that was seen: an old one at the start is no sign of silence."""
    world.add("x", nodes=["a"])

    async def beat(when):
        await world.kube.patch(GPU_NODES, "a", {"status": {"heartbeatTime": when}}, subresource="status")

    await beat("2020-01-01T00:00:00Z")
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering())) == ["a"]
        world.clock.advance(60)
        assert named(await extender.service.filter(filtering())) == ["a"]
        world.clock.advance(1)
        found = await extender.service.filter(filtering(names=["a"]))
        assert names_and_refusals(found) == ([], {"NoGpuFits: 1 node: its agent has not reported for 61 s"})
        await beat("2026-01-31T12:03:21Z")
        for _ in range(20):
            await asyncio.sleep(0)
        assert named(await extender.service.filter(filtering())) == ["a"]


async def test_a_report_about_another_generation_does_not_count(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        patch = {"status": {"partitions": [{"podUid": "pod-x", "generation": 0, "state": "Ready"}]}}
        await world.kube.patch(GPU_NODES, "a", patch, subresource="status")
        for _ in range(50):
            await asyncio.sleep(0)
        assert not binding.done()


@pytest.mark.parametrize("stale", [PartitionState.FAILED, PartitionState.READY])
@pytest.mark.parametrize("back_s", [0, 3600])
async def test_a_report_about_an_earlier_reservation_of_the_pod_does_not_count(world, stale, back_s):
    """Released and reserved again, a pod has another reservation, also where the clock was set back meanwhile."""
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    first = world.reservations("a")[0]["generation"]
    await world.agent.report("a", stale)
    await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
    world.clock.advance(1 - back_s)
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        assert world.reservations("a")[0]["generation"] > first
        for _ in range(50):
            await asyncio.sleep(0)
        assert not binding.done()
        await world.agent.report("a")
        assert (await binding).error == ""


@pytest.mark.parametrize("error", [Unreachable("reset"), Overloaded("504", status=504)])
async def test_a_lost_answer_to_the_binding_is_read_back(world, error):
    world.add("x")
    world.kube.fail_next("create", PODS, error, after=True, subresource="binding")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    assert world.bound_to() == "a"
    assert world.held() == {"a": ["pod-x"]}


async def test_a_binding_that_did_not_arrive_is_sent_again(world):
    world.add("x")
    world.kube.fail_next("create", PODS, Unreachable("reset"), subresource="binding")
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())) as binding,
    ):
        await until(lambda: any(seconds < 1 for seconds in world.clock.sleeping))
        world.clock.advance(0.5)
        assert (await binding).error == ""
    assert world.bound_to() == "a"


async def test_a_binding_whose_outcome_stays_unknown_keeps_its_reservation_until_it_lapses(world):
    world.add("x")
    for _ in range(3):
        world.kube.fail_next("create", PODS, Unreachable("reset"), subresource="binding")
    async with world.extender() as extender, background(world.agent.serve("a")):
        async with background(extender.service.bind(args())) as binding:
            for _ in range(3):
                await until(lambda: binding.done() or any(seconds < 1 for seconds in world.clock.sleeping))
                world.clock.advance(1)
            assert "is not known, because the API server did not answer" in (await binding).error
        assert world.held() == {"a": ["pod-x"]}
        world.clock.advance(31)
        await until(lambda: world.held() == {})
    assert world.bound_to() == ""


class Stuck(FakeKube):
    """A server on which a Binding hangs."""

    hanging = 0

    async def create(self, kind, body, *, namespace="", name="", subresource="", is_dry_run=False):
        if subresource == "binding":
            self.hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.hanging -= 1
        return await super().create(
            kind, body, namespace=namespace, name=name, subresource=subresource, is_dry_run=is_dry_run
        )


async def test_a_binding_that_hangs_is_given_up_before_anybody_may_release_its_reservation(world):
    """Regression: the call could take 30 s, and bind a pod whose reservation another extender had given away."""
    world.kube = Stuck(world.clock)
    world.agent = FakeAgent(world.kube, world.clock)
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        async with background(extender.service.bind(args())) as binding:
            await until(lambda: world.kube.hanging == 1)
            [reserved] = world.reservations("a")
            left = (parse_rfc3339(reserved["deadline"]) - world.clock.now()).total_seconds()
            world.clock.advance(left + LATE_S - 0.1)
            assert world.kube.hanging == 1
            world.clock.advance(0.2)
            await until(lambda: not world.kube.hanging)
            await until(lambda: binding.done() or any(seconds < 1 for seconds in world.clock.sleeping))
            world.clock.advance(1)
            assert "is not known" in (await binding).error
        assert world.held() == {"a": ["pod-x"]}
    assert LATE_S + 2 <= GRACE_S, "a call that is given up may be carried out a moment later"


async def test_a_refused_binding_is_given_back(world):
    world.add("x")
    world.kube.fail_next("create", PODS, Forbidden("no right", status=403), subresource="binding")
    async with world.extender() as extender, background(world.agent.serve("a")):
        answer = await extender.service.bind(args())
    assert answer.error == "pod default/x-worker-0-1 was not bound: no right"
    assert world.held() == {}


async def test_a_pod_that_somebody_else_bound_is_left_where_it_is(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        other = {"metadata": {"name": "x-worker-0-1"}, "target": {"kind": "Node", "name": "b"}}
        await world.kube.create(PODS, other, namespace="default", name="x-worker-0-1", subresource="binding")
        await world.agent.report("a")
        assert "is bound to node b already" in (await binding).error
    assert world.held() == {}


async def test_a_pod_that_was_deleted_and_made_again_is_not_bound_in_the_olds_name(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        world.kube.seed(PODS, pod_of("x", uid="pod-x-again"))
        await world.agent.report("a")
        assert "has UID pod-x-again now, not pod-x" in (await binding).error
    assert world.bound_to() == ""
    assert world.held() == {}


# A kill between each two steps


async def restarted(world):
    """A new extender finishes what an earlier one left, through filter and bind as kube-scheduler repeats them."""
    async with world.extender() as extender, background(world.agent.serve("a")), background(world.agent.serve("b")):
        for _ in range(100):
            fits = named(await extender.service.filter(filtering()))
            if fits:
                break
        if world.bound_to() == "":
            assert (await extender.service.bind(args(node=fits[0]))).error == ""
        assert world.bound_to() in NAMES
        await until(lambda: world.held() == {world.bound_to(): ["pod-x"]})
    return fits


async def test_killed_before_the_reservation(world):
    world.add("x")
    async with world.extender() as extender:
        await extender.service.filter(filtering())
    await restarted(world)


async def test_killed_after_the_reservation_the_retry_finishes_there(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args(node="b"))):
        await until(lambda: world.held() == {"b": ["pod-x"]})
    async with world.extender() as extender:
        found = await extender.service.filter(filtering())
        assert named(found) == ["b"]
        assert "has a reservation on node b, which lapses at" in found.failed_nodes["a"]
        assert {p.host: p.score for p in await extender.service.prioritize(filtering())} == {"a": 0, "b": 10}
        answer = await extender.service.bind(args(node="a"))
        assert "has a reservation on node b, so it cannot be bound to a; retry on b" in answer.error
    assert await restarted(world) == ["b"]
    assert world.bound_to() == "b"


async def test_killed_after_the_partition_was_ready(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    await world.agent.report("a")
    assert await restarted(world) == ["a"]


async def test_killed_after_the_binding(world):
    world.add("x")
    world.kube.fail_next("create", PODS, Unreachable("killed here"), after=True, subresource="binding")
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())),
    ):
        await until(lambda: world.bound_to() == "a")
    await restarted(world)


async def test_killed_after_a_release_and_before_the_node_was_touched(world):
    world.add("x")
    freed = {"metadata": {"annotations": {ANNOTATION_CAPACITY_FREED: "2026-01-31T11:59:59.000000Z"}}}
    await world.kube.patch(GPU_NODES, "a", freed)
    async with world.extender():
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))
        assert "annotations" not in world.kube.dump(NODES, "b")["metadata"]


async def test_a_reservation_of_a_node_that_is_not_offered_lapses_and_is_released(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await until(lambda: world.held() != {})
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering(names=["b"]))) == []
        world.clock.advance(29)
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.held() != {}
        world.clock.advance(5)
        await until(lambda: world.held() == {})
        assert named(await extender.service.filter(filtering(names=["b"]))) == ["b"]


# The janitor


@pytest.mark.parametrize("how", ["deleted", "Succeeded", "Failed"])
async def test_the_reservation_of_an_ended_pod_is_released_and_the_node_touched(world, how):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        if how == "deleted":
            await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        else:
            status = {"status": {"phase": how}}
            await world.kube.patch(PODS, "x-worker-0-1", status, namespace="default", subresource="status")
        await until(lambda: world.held() == {})
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))


async def test_deleting_the_job_frees_its_gpu(world):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
        await until(lambda: world.held() == {})


async def test_a_running_pod_keeps_its_reservation_beyond_any_deadline(world):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        for _ in range(5):
            world.clock.advance(3600)
            await asyncio.sleep(0)
        await extender.janitor.sweep()
    assert world.held() == {"a": ["pod-x"]}


@pytest.mark.parametrize("how", ["created anew", "emptied"])
async def test_a_running_pod_gets_the_reservation_back_that_its_node_lost(world, how):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    before = world.reservations("a")
    async with world.extender() as extender:
        if how == "emptied":
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: extender.watches.cluster.holders("pod-x") == [])
            world.clock.advance(5)
        else:
            await world.kube.delete(GPU_NODES, "a")
            for _ in range(50):
                await asyncio.sleep(0)
            seed_node(world.kube, another("a", devices=[]))
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.reservations("a") == []  # its agent has not reported the GPUs yet
            seed_node(world.kube, another("a", devices=2))
        await until(lambda: world.reservations("a") == before)
    assert world.events() == []


def another(name, devices):
    """The GpuNode that an agent creates in place of one that was deleted."""
    node = gpu_node(name, devices)
    return msgspec.structs.replace(node, metadata=msgspec.structs.replace(node.metadata, uid="another"))


async def test_it_is_told_once_where_nobody_knows_the_reservation_that_was_lost(world):
    world.add("x")
    seed_pod(world.kube, "x", nodeName="a")
    async with world.extender() as extender:
        await until(lambda: world.events() != [])
        await extender.janitor.sweep()
    [(reason, message)] = world.events()
    assert reason == "ReservationLost"
    assert message.startswith(
        "pod default/x-worker-0-1 runs on node a without a reservation, so its GPUs count as free"
    )
    assert "nothing is known of the reservation that it had" in message
    assert world.kube.dump_all(EVENTS)[0]["count"] == 1


async def test_it_is_told_where_the_place_was_given_to_another_meanwhile(world):
    world.add("x", "y", nodes=["a"])
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        taker = msgspec.structs.replace(tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE), pod_name="y-worker-0-1")
        await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": [msgspec.to_builtins(taker)]}})
        await until(lambda: extender.watches.cluster.holders("pod-x") == [])
        world.clock.advance(5)
        await until(lambda: world.events() != [])
    assert "cannot be written again: GPU-a-0: wants it by MPS, it is used by Exclusive" in world.events()[0][1]


async def test_an_ended_pod_gets_no_reservation_back(world):
    world.add("x", nodes=["a"])
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        await until(lambda: world.reservations("a") == [])
        await extender.janitor.sweep()
        assert world.reservations("a") == []
    assert world.events() == []


async def test_a_pod_that_the_cache_has_not_seen_is_confirmed_on_the_server(world):
    """A reservation must not be taken from a pod only because its watch is late or selects other pods."""
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"])]))
    hidden = pod_of("x", schedulerName="another", nodeName="a")
    hidden["metadata"]["name"] = "x"
    world.kube.seed(PODS, hidden)
    async with world.extender() as extender:
        await extender.janitor.sweep()
    assert world.held() == {"a": ["pod-x"]}


@pytest.mark.parametrize("deadline", ["soon", "2026-01-31T11:00:00", "9999-12-31T23:59:59Z", "2026-13-31T12:00:00Z"])
async def test_a_deadline_that_nobody_can_read_counts_as_none(world, deadline):
    world.add("x")
    odd = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), pod_name="x-worker-0-1", deadline=deadline)
    gone = tenant("gone", ["GPU-a-0"])
    seed_node(world.kube, gpu_node("a", 1, [odd, gone]))
    async with world.extender() as extender:
        await until(lambda: world.held() == {"a": ["pod-x"]})
        assert extender.watches.not_ready() is None


async def test_a_failing_release_is_tried_again(world):
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("gone", ["GPU-a-0"])]))
    world.kube.fail_next("patch", GPU_NODES, Forbidden("not now", status=403))
    async with world.extender():
        await until(lambda: any(seconds >= 5 for seconds in world.clock.sleeping))
        assert world.held() == {"a": ["pod-gone"]}
        world.clock.advance(5)
        await until(lambda: world.held() == {})


async def test_a_failing_touch_is_tried_again(world):
    world.add("x")
    seed_node(world.kube, gpu_node("a", 1, [tenant("gone", ["GPU-a-0"])]))
    for _ in range(2):
        world.kube.fail_next("patch", NODES, Overloaded("busy", status=429))
    async with world.extender():
        await until(lambda: world.held() == {})
        for _ in range(50):
            await asyncio.sleep(0)
        assert "annotations" not in world.kube.dump(NODES, "a")["metadata"]
        world.clock.advance(5)
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))


async def test_new_gpus_have_waiting_pods_tried_again(world):
    world.add("x", nodes=["a"])
    async with world.extender():
        patch = {"status": msgspec.to_builtins(gpu_node("a", 2).status)}
        await world.kube.patch(GPU_NODES, "a", patch, subresource="status")
        await until(lambda: ANNOTATION_CAPACITY_FREED in world.kube.dump(NODES, "a")["metadata"].get("annotations", {}))


# Whose pod it is


async def test_a_pod_without_a_job_is_refused_with_a_sentence(world):
    world.add("x")
    async with world.extender() as extender:
        pod = msgspec.convert({"metadata": {"name": "p", "namespace": "default", "uid": "u"}}, Pod)
        found = await extender.service.filter(ExtenderArgs(pod=pod, node_names=list(NAMES)))
    assert named(found) == []
    assert set(found.failed_and_unresolvable_nodes.values()) == {
        "NotAJob: pod default/p asks for carpool.dev/gpu but no GpuTrainingJob controls it; "
        "create a GpuTrainingJob with this pod's spec as its template"
    }


async def test_a_pod_that_names_another_jobs_uid_is_refused(world):
    world.add("x")
    async with world.extender() as extender:
        forged = pod_of("x")
        forged["metadata"]["ownerReferences"][0]["uid"] = "job-of-somebody"
        found = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(forged, Pod), node_names=list(NAMES)))
    assert "and there is none in its namespace" in found.failed_and_unresolvable_nodes["a"]


async def test_a_reference_that_leads_to_another_object_is_refused(world):
    """What it leads to is read as if it were a job, so its kind must say that it is one."""
    world.add("x")
    world.kube.seed(GPU_TRAINING_JOBS, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "y", "uid": "job-y"}})
    async with world.extender() as extender:
        found = await extender.service.filter(filtering("y"))
        assert "and there is none in its namespace" in found.failed_and_unresolvable_nodes["a"]
        world.kube.fail_next("get", GPU_TRAINING_JOBS, Invalid("expected a name without /"))
        found = await extender.service.filter(filtering("y"))
    assert found.failed_and_unresolvable_nodes["a"] == (
        "NotAJob: the job that pod default/y-worker-0-1 names cannot be read: expected a name without /"
    )


async def test_a_pod_that_asks_for_more_than_its_job_is_refused(world):
    world.add("x")
    async with world.extender() as extender:
        found = await extender.service.filter(filtering(gpus=2))
    assert "asks for 2 carpool.dev/gpu, its job's gpusPerWorker is 1" in found.failed_and_unresolvable_nodes["a"]


@pytest.mark.parametrize("name", ["x", "x-worker-0", "x-worker-0-1-1", "x-worker-1-1", "x-worker-00-1", "z-worker-0-1"])
async def test_a_pod_that_is_not_called_as_a_worker_of_its_job_is_refused(world, name):
    world.add("x")
    forged = pod_of("x")
    forged["metadata"]["name"] = name
    async with world.extender() as extender:
        found = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(forged, Pod), node_names=list(NAMES)))
    assert found.failed_and_unresolvable_nodes["a"] == (
        "NotAWorker: expected a pod of job x to be called x-worker-INDEX-ATTEMPT with an index below 1, "
        f"found default/{name}; let the operator create the job's pods"
    )


def seed_attempts(kube, attempts):
    """Pods that carry the names of attempts of one worker, as anybody who may create pods can."""
    for attempt in range(1, attempts + 1):
        pod = pod_of("x", uid=f"pod-x-{attempt}")
        pod["metadata"]["name"] = f"x-worker-0-{attempt}"
        kube.seed(PODS, pod)
    return [
        BindingArgs(pod_name=f"x-worker-0-{n}", pod_namespace="default", pod_uid=f"pod-x-{n}", node=NAMES[n % 2])
        for n in range(1, attempts + 1)
    ]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_job_has_no_more_reservations_than_workers(world, workers):
    for name in NAMES:
        seed_node(world.kube, gpu_node(name))
    seed_job(world.kube, "x", spec={"workers": workers})
    asked = seed_attempts(world.kube, 4)
    async with world.extender() as extender, background(world.agent.serve("a")), background(world.agent.serve("b")):
        answers = await asyncio.gather(*(extender.service.bind(one) for one in asked))
        assert [bool(answer.error) for answer in answers] == [False] * workers + [True] * (4 - workers)
        expected = (
            f"TooManyWorkers: job default/x has spec.workers {workers}, and {workers} of its pods have reservations "
            "already; this one is tried again when one of them has ended"
        )
        assert answers[-1].error == expected
        late = msgspec.convert(world.kube.dump(PODS, "x-worker-0-4", "default"), Pod)
        found = await extender.service.filter(ExtenderArgs(pod=late, node_names=list(NAMES)))
        assert found.failed_nodes == dict.fromkeys(NAMES, expected)
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        await until(lambda: sum(map(len, world.held().values())) == workers - 1)
        assert (await extender.service.bind(asked[-1])).error == ""


async def test_annotations_of_the_pod_change_nothing(world):
    world.add("x")
    forged = {"metadata": {"annotations": {ANNOTATION_GPUS: "GPU-b-0", ANNOTATION_MODE: "Exclusive"}}}
    await world.kube.patch(PODS, "x-worker-0-1", forged, namespace="default")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    assert world.pod()["metadata"]["annotations"][ANNOTATION_GPUS] == "GPU-a-0"
    assert world.reservations("a")[0]["mode"] == SharingMode.MPS


async def test_a_job_that_the_watch_has_not_seen_is_read_once(world):
    world.add("x")
    async with world.extender() as extender:
        seed_job(world.kube, "late")
        assert named(await extender.service.filter(filtering("late"))) == NAMES
        reads = [c for c in world.kube.calls if c.verb == "get" and c.plural == "gputrainingjobs"]
    assert len(reads) == 1


async def test_a_job_seen_before_its_prediction_is_read_again(world):
    seed_node(world.kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    seed_job(world.kube, "y")
    seed_pod(world.kube, "y", nodeName="a")
    bare = {"metadata": {"name": "x", "uid": "job-x"}, "spec": {"template": {}}}
    world.kube.seed(GPU_TRAINING_JOBS, bare)
    async with world.extender() as extender:
        seed_job(world.kube, "x")
        assert named(await extender.service.filter(filtering(names=["a"]))) == ["a"]
