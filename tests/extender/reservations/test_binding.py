"""The Binding itself: answers that get lost, hang or refuse."""

import asyncio

import pytest
from carpool_core.clock import parse_rfc3339
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import Forbidden, Overloaded, Unreachable
from carpool_core.testing.kube import FakeKube
from carpool_extender.reservations.binder import LATE_S
from carpool_extender.reservations.gc import GRACE_S
from carpool_extender.testing import (
    FakeAgent,
    pod_of,
    until,
)
from extender_world import args, background


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
