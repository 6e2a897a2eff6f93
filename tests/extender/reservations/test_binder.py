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


async def turns():
    """Let other tasks run."""
    for _ in range(50):
        await asyncio.sleep(0)


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


@pytest.mark.parametrize("extenders", [1, 2])
async def test_two_pods_race_for_the_last_place_and_one_gets_it(world, extenders):
    world.add("x", "y", nodes=["a"])
    for job in ("x", "y"):
        seed_job(world.kube, job, memory_mib=30000)
    async with world.extender() as one, world.extender() as other, background(world.agent.serve("a")):
        second = other if extenders == 2 else one
        answers = await asyncio.gather(one.service.bind(args("x")), second.service.bind(args("y")))
    assert sorted(bool(answer.error) for answer in answers) == [False, True]
    assert "needs 30,000 MiB; freest NVIDIA A100-SXM4-40GB has 10,960 MiB free" in "".join(a.error for a in answers)
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


async def test_endless_conflicts_end_in_an_error(world):
    world.add("x")
    for _ in range(50):
        world.kube.fail_next("patch", GPU_NODES, Conflict("changed", status=409))
    async with world.extender() as extender:
        assert "was not bound to node a: changed" in (await extender.service.bind(args())).error
    assert len([c for c in world.kube.calls if c.verb == "patch" and c.plural == "gpunodes"]) == 8


async def test_the_deadline_counts_from_the_write_though_the_bind_waited_for_it(world):
    """Regression: a bind that waited for the write before it had so much less time until its reservation lapsed."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))):
        await until(lambda: world.held() == {"a": ["pod-x"]})
        async with background(extender.service.bind(args("y"))):
            await turns()
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: world.held() == {"a": ["pod-x", "pod-y"]})
    first, second = (parse_rfc3339(one["deadline"]) for one in world.reservations("a"))
    assert second - first == timedelta(seconds=4)


async def test_a_reason_names_no_neighbour_that_left_while_the_bind_waited_to_be_written(world):
    """Regression: a decision that was made before was kept, with its reason, slowdown and limit of threads."""
    world.add("x", "y", nodes=["a"])
    async with world.extender(gather_s=4) as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args("x"))).error == ""
        await until(lambda: 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as binding:
            await turns()
            await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
            await world.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
            await until(lambda: not extender.informers.cluster.node("a").spec.reservations)
            world.clock.advance(4)
            assert (await binding).error == ""
    [held] = world.reservations("a")
    assert "MPS on GPU 0 of a alone; " in held["reason"]
    assert (held.get("threadPercentage"), held["expectedSlowdown"]) == (100, 1.0)


async def test_a_pod_that_is_being_bound_fits_only_on_that_node(world):
    """Regression: kube-scheduler hung up, and tried the pod on another node each time."""
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await asyncio.sleep(0)
        assert not world.held()
        found = await extender.service.filter(filtering())
        assert found.node_names == ["a"]
        assert found.failed_nodes == {"b": "NoGpuFits: this pod is being bound to node a at present"}
        assert [(p.host, p.score) for p in await extender.service.prioritize(filtering())] == [("a", 10), ("b", 0)]
        assert "is being bound to node a at present" in (await extender.service.bind(args(node="b"))).error
        await until(lambda: world.held() != {})
        await world.agent.report("a")
        await binding
        answer = await extender.service.bind(args(node="b"))
    assert "is bound to node a, so it cannot be bound to b" in answer.error or "reservation on node a" in answer.error
    assert world.held() == {"a": ["pod-x"]}


async def test_bind_on_a_node_that_is_deleted_leaves_nothing_that_counts(world):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        await world.kube.delete(GPU_NODES, "a")
        assert "is gone" in (await binding).error
        world.add(nodes=["a"])
        cluster = extender.informers.cluster
        await until(lambda: cluster.node("a") is not None)
        assert cluster.with_assumed("a") == cluster.node("a")
        assert cluster.pods_of_job("job-x") == set()


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
        await turns()
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


async def test_a_reservation_whose_write_got_no_answer_is_given_back_too(world):
    """Regression: a bind took its own reservation for that of another bind, and kept its GPU until the deadline."""
    world.add("x")
    world.kube.fail_next("patch", GPU_NODES, Unreachable("reset"), after=True)
    async with world.extender() as extender, background(fails(world, extender)) as failed:
        await until(lambda: any(seconds < 0.1 for seconds in world.clock.sleeping))
        world.clock.advance(0.1)
        await failed
        assert world.held() == {}


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
        await turns()

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
    """Regression: its bind had been decided before, and only the report of the node was compared."""
    world.add("x", "y")
    async with world.extender(gather_s=4) as extender, background(extender.service.bind(args("x"))) as failing:
        await until(lambda: world.held() == {"a": ["pod-x"]} and 4 in world.clock.sleeping)
        async with background(extender.service.bind(args("y"))) as waiting:
            await turns()
            await world.agent.report("a", PartitionState.FAILED, "the MPS daemon did not start")
            await until(lambda: unavailable_nodes(extender.informers.cluster) == {"a"})
            assert world.held() == {"a": ["pod-x"]}
            world.clock.advance(4)
            await until(lambda: failing.done() and waiting.done())
            assert "could not prepare MPS" in (await failing).error
            assert "could not be prepared, is tried again at" in (await waiting).error
    assert world.held() == {}


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
        await turns()
        assert not binding.done()
        await world.agent.report("a")
        assert (await binding).error == ""


# The Binding


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("error", [Unreachable("reset"), Overloaded("504", status=504)])
async def test_a_binding_without_answer_is_read_back_and_sent_again_if_it_did_not_arrive(world, error, arrives):
    world.add("x")
    world.kube.fail_next("create", PODS, error, after=arrives, subresource="binding")
    async with (
        world.extender() as extender,
        background(world.agent.serve("a")),
        background(extender.service.bind(args())) as binding,
    ):
        await until(lambda: binding.done() or any(seconds < 1 for seconds in world.clock.sleeping))
        world.clock.advance(0.5)
        assert (await binding).error == ""
    assert world.bound_to() == "a"
    assert world.held() == {"a": ["pod-x"]}


async def test_a_binding_whose_outcome_stays_unknown_keeps_its_reservation_until_it_lapses(world):
    world.add("x")
    world.hold("here_1")
    for _ in range(3):
        world.kube.fail_next("create", PODS, Unreachable("reset"), subresource="binding")
    async with world.extender() as extender, background(world.agent.serve("a")):
        async with background(extender.service.bind(args())) as binding:
            while not binding.done():
                await turns()
                world.clock.advance(0.5)
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


async def test_a_binding_that_hangs_is_given_up_before_its_reservation_may_be_released(world):
    """Regression: the call could take 30 s, and bind a pod whose reservation another extender had given away."""
    world.kube = Stuck(world.clock)
    world.agent = FakeAgent(world.kube)
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


@pytest.mark.parametrize(
    ("is_replaced", "reason"),
    [
        pytest.param(False, "is bound to node b already", id="bound by another scheduler"),
        pytest.param(True, "has UID pod-x-again now, not pod-x", id="deleted and created again"),
    ],
)
async def test_a_pod_that_changed_meanwhile_is_not_bound(world, is_replaced, reason):
    world.add("x")
    async with world.extender() as extender, background(extender.service.bind(args())) as binding:
        await until(lambda: world.held() != {})
        if is_replaced:
            await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
            world.kube.seed(PODS, pod_of("x", uid="pod-x-again"))
        else:
            other = {"metadata": {"name": "x-worker-0-1"}, "target": {"kind": "Node", "name": "b"}}
            await world.kube.create(PODS, other, namespace="default", name="x-worker-0-1", subresource="binding")
        await world.agent.report("a")
        assert reason in (await binding).error
    assert world.bound_to() == ("" if is_replaced else "b")
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


# A kill between two steps


@pytest.mark.parametrize("killed", ["while it prepares", "when it is ready", "after the Binding"])
async def test_bind_of_a_killed_extender_is_finished_on_its_node(world, killed):
    """kube-scheduler repeats filter and bind."""
    world.add("x")
    if killed == "after the Binding":
        world.kube.fail_next("create", PODS, Unreachable("killed here"), after=True, subresource="binding")
    async with world.extender() as extender, background(extender.service.bind(args(node="b"))):
        await until(lambda: world.held() == {"b": ["pod-x"]})
        if killed == "after the Binding":
            await world.agent.report("b")
            await until(lambda: world.bound_to() == "b")
    if killed == "when it is ready":
        await world.agent.report("b")
    async with world.extender() as extender, background(world.agent.serve("b")):
        found = await extender.service.filter(filtering())
        assert named(found) == ["b"]
        assert "has a reservation on node b, which lapses at" in found.failed_nodes["a"]
        assert {p.host: p.score for p in await extender.service.prioritize(filtering())} == {"a": 0, "b": 10}
        assert "node b, so it cannot be bound to a" in (await extender.service.bind(args(node="a"))).error
        assert (await extender.service.bind(args(node="b"))).error == ""
    assert (world.bound_to(), world.held()) == ("b", {"b": ["pod-x"]})


async def test_a_reservation_that_an_earlier_bind_wrote_is_not_released_by_a_later_one(world):
    """Regression: the pod was bound by the extender that had led before, while the later bind waited for the agent."""
    world.add("x")
    async with world.extender() as first, background(first.service.bind(args())) as of_first:
        await until(lambda: world.held() != {})
        [written] = world.reservations("a")
        async with world.extender() as second, background(second.service.bind(args())) as of_second:
            await until(lambda: world.reservations("a")[0]["deadline"] > written["deadline"])
            world.clock.advance(40)
            await until(lambda: of_first.done() and of_second.done())
            for answer in (await of_first, await of_second):
                assert "did not prepare the GPU for pod default/x-worker-0-1" in answer.error
            assert world.held() == {"a": ["pod-x"]}
            assert (await second.service.bind(args())).error
            assert world.reservations("a")[0]["deadline"] <= rfc3339(world.clock.now()), "no retry keeps it longer"
