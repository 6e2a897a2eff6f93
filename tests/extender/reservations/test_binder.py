"""Binds: the whole path, replays and races, preparation by the agent, the Binding itself, and kills in between."""

import asyncio
from datetime import timedelta

import pytest
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MODE
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Conflict, Forbidden, Overloaded, Unreachable
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PartitionState
from carpool_extender.extender_api import BindingArgs
from carpool_extender.reservations.binder import LATE_S, MAX_CONCURRENT_BINDS
from carpool_extender.reservations.gc import GRACE_S
from carpool_extender.testing import FakeAgent, pod_of, seed_job, seed_pod, unavailable_nodes, until
from extender_world import NAMES, args, background, filtering, named
from prometheus_client import generate_latest

# The whole path, replays and races


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


async def test_the_deadline_counts_from_the_write_though_the_bind_waited_for_it(world):
    """Regression: a bind that waited for the write before it had so much less time until its reservation lapsed."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))):
        await until(lambda: world.held() == {"a": ["pod-x"]})
        async with background(extender.service.bind(args("y"))):
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: world.held() == {"a": ["pod-x", "pod-y"]})
    first, second = (parse_rfc3339(one["deadline"]) for one in world.reservations("a"))
    assert second - first == timedelta(seconds=4)


async def test_a_reason_names_no_neighbour_that_left_while_the_bind_waited_to_be_written(world):
    """Regression: a decision that was made before was taken as it was, words and slowdown and limit of threads."""
    world.add("x", "y", nodes=["a"])
    async with world.extender(gather_s=4) as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args("x"))).error == ""
        await until(lambda: 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as binding:
            for _ in range(50):
                await asyncio.sleep(0)
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: not extender.informers.cluster.node("a").spec.reservations)
            world.clock.advance(4)
            assert (await binding).error == ""
    [held] = world.reservations("a")
    assert "MPS on GPU 0 of a alone; " in held["reason"]
    assert (held.get("threadPercentage"), held["expectedSlowdown"]) == (100, 1.0)


async def test_a_pod_that_is_being_bound_fits_only_where_that_is(world):
    """Regression: kube-scheduler hung up, tried the pod on another node each time, and was told to try again."""
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())):
        await asyncio.sleep(0)
        assert not world.held()
        found = await extender.service.filter(filtering())
        assert found.node_names == ["a"]
        assert found.failed_nodes == {"b": "NoGpuFits: this pod is being bound to node a at present"}
        assert [(p.host, p.score) for p in await extender.service.prioritize(filtering())] == [("a", 10), ("b", 0)]


async def test_binds_beyond_the_limit_wait_without_a_reservation_and_go_on_when_one_ends(world):
    """Regression: with 1,000 pods waiting, all binds took longer than a reservation lasts, and none succeeded."""
    names = [f"x{number}" for number in range(MAX_CONCURRENT_BINDS + 1)]
    world.add(nodes=["a", "b"], gpus=16)
    for name in names:
        seed_job(world.kube, name, memory_mib=1000, util=10)
        seed_pod(world.kube, name)
    async with world.extender() as extender:
        binds = [asyncio.create_task(extender.service.bind(args(name))) for name in names[:-1]]
        await until(lambda: len(world.reservations("a")) == MAX_CONCURRENT_BINDS)
        last = asyncio.create_task(extender.service.bind(args(names[-1], "b")))
        for _ in range(50):
            await asyncio.sleep(0)
        assert world.reservations("b") == []
        world.clock.advance(3)
        await world.agent.report("a")
        await until(lambda: len(world.reservations("b")) == 1)
        await world.agent.report("b")
        assert not any(result.error for result in await asyncio.gather(*binds, last))
        metrics = generate_latest(extender.registry).decode()
    assert "carpool_extender_kept_back_seconds_sum 3.0" in metrics


async def test_workers_of_a_job_that_are_bound_together_do_not_take_the_same_gpu(world):
    seed_job(world.kube, "x", spec={"workers": 4, "sharing": {"mode": "Exclusive"}})
    world.add(gpus=2)
    for worker in range(4):
        seed_pod(world.kube, "x", worker=worker)
    async with (
        world.extender(gather_s=4) as extender,
        background(world.agent.serve("a")),
        background(world.agent.serve("b")),
    ):
        bodies = [worker_args(worker, "ab"[worker % 2]) for worker in range(4)]
        binds = [asyncio.create_task(extender.service.bind(body)) for body in bodies]
        await until(lambda: 4 in world.clock.sleeping)
        world.clock.advance(4)
        await until(lambda: all(bind.done() for bind in binds))
        assert [bind.result().error for bind in binds] == [""] * 4
    assert [len(world.reservations(node)) for node in "ab"] == [2, 2]
    assert len({gpu for node in "ab" for one in world.reservations(node) for gpu in one["gpuUuids"]}) == 4


def worker_args(worker, node):
    uid = f"pod-x-{worker}" if worker else "pod-x"
    return BindingArgs(pod_name=f"x-worker-{worker}-1", pod_namespace="default", pod_uid=uid, node=node)


# Preparation by the agent


async def test_a_partition_that_fails_is_given_back_with_an_event(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
        answer = await binding
        assert answer.error == "node a could not prepare MPS for pod default/x-worker-0-1: the MPS daemon did not start"
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
    async def wait(seconds):
        world.clock.advance(seconds)
        await world.agent.beat(*NAMES)
        now, nodes = rfc3339(world.clock.now()), extender.informers.cluster.nodes
        await until(lambda: all(node.status.heartbeat_time == now for node in nodes.values()))

    world.add("x")
    async with world.extender() as extender:
        for rest in (30, 60, 120, 240, 480, 600, 600):
            await fails(world, extender)
            begins = world.clock.now() + timedelta(seconds=rest)
            sentence = f"NoGpuFits: 1 node: could not be prepared, is tried again at {begins:%Y-%m-%dT%H:%M:%SZ}"
            found = await extender.service.filter(filtering())
            assert names_and_refusals(found) == (["b"], {sentence})
            await wait(rest - 1)
            assert named(await extender.service.filter(filtering())) == ["b"]
            await wait(1)
            assert named(await extender.service.filter(filtering())) == NAMES


async def test_another_gpu_of_the_node_is_taken_meanwhile_and_a_success_ends_the_count(world):
    world.add("x", nodes=["a"], gpus=2)
    async with world.extender() as extender:
        await fails(world, extender)
        async with background(world.agent.serve("a")):
            assert (await extender.service.bind(args())).error == ""
        assert world.reservations("a")[0]["gpuUuids"] == ["GPU-a-1"]


async def test_a_gpu_that_fails_while_a_pod_waits_to_be_written_there_takes_it_no_more(world):
    """Regression: its bind had been decided before, and only what the node tells was compared."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))) as failing:
        await until(lambda: world.held() == {"a": ["pod-x"]} and 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as waiting:
            for _ in range(50):
                await asyncio.sleep(0)
            await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
            await until(lambda: unavailable_nodes(extender.informers.cluster) == {"a"})
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: failing.done() and waiting.done())
            assert "could not prepare MPS" in (await failing).error
            assert "could not be prepared, is tried again at" in (await waiting).error
    assert world.held() == {}


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
        assert names_and_refusals(found) == ([], {"NoGpuFits: 1 node: its agent has not reported for more than 60 s"})
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


# The Binding


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
    world.hold("here_1")
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


@pytest.mark.parametrize("read_error", [Unreachable("reset"), Forbidden("no right", status=403)])
async def test_a_refused_binding_of_a_pod_that_cannot_be_read_keeps_its_reservation(world, read_error):
    """Regression: a 409 and an unreadable pod counted as not bound, and the GPU of a running pod was given away."""
    world.add("x")
    world.kube.fail_next("create", PODS, Conflict("already bound", status=409), after=True, subresource="binding")
    world.kube.fail_next("get", PODS, read_error)
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert "is not known" in (await extender.service.bind(args())).error
        assert world.bound_to() == "a"
        for _ in range(100):
            await asyncio.sleep(0)
    assert world.held() == {"a": ["pod-x"]}


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


async def test_a_reservation_of_a_node_that_is_not_offered_lapses_and_is_released(world):
    world.add("x")
    world.hold("here_1")
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
