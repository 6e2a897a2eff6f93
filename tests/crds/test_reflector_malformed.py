"""What a reflector makes of objects that make no sense."""

from collections.abc import Callable

import msgspec
import pytest
from carpool_core.kube.api import PODS, Page, ResourceKind, Selector
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from reflector_world import World, pod_body, settle
from structlog.testing import capture_logs


async def test_a_malformed_object_is_named_and_skipped(api: FakeKube, start: Callable[..., World]) -> None:
    api.seed(PODS, pod_body("good"))
    api.seed(PODS, pod_body("bad", containers="none"))
    with capture_logs() as logs:
        world = start()
        await settle()
        await api.create(PODS, pod_body("worse", containers=7))
        await api.create(PODS, pod_body("fine"))
        await settle()
    assert world.names == {"d/good", "d/fine"}
    assert [log["object"] for log in logs] == ["d/bad", "d/worse"]
    assert all(log["event"] == "malformed object skipped" and "containers" in log["error"] for log in logs)


async def test_an_object_that_turns_malformed_keeps_its_last_good_state(
    api: FakeKube, start: Callable[..., World]
) -> None:
    api.seed(PODS, pod_body("a", "n1"))
    world = start()
    await settle()
    with capture_logs():
        await api.patch(PODS, "a", {"spec": {"containers": 7}}, namespace="d")
        await settle()
        api.compact()
        await settle()
    kept = world.reflector.store.get("d/a")
    assert kept is not None
    assert kept.spec.node_name == "n1"
    await api.delete(PODS, "a", namespace="d")
    await settle()
    assert world.told == [(None, "a@n1"), ("a@n1", None)]


@pytest.mark.parametrize("is_lost", [False, True], ids=["watched", "found gone by a list"])
async def test_what_cannot_be_read_is_told_until_it_can_be_or_is_gone(
    api: FakeKube, start: Callable[..., World], is_lost: bool
) -> None:
    told: list[tuple[str, bool]] = []
    api.seed(PODS, pod_body("a", "n1"))
    api.seed(PODS, pod_body("b", containers=7))
    with capture_logs():
        start(on_unreadable=lambda key, why: told.append((key, why is not None)))
        await settle()
        assert told == [("d/b", True)]
        await api.patch(PODS, "a", {"spec": {"containers": 7}}, namespace="d")
        await settle()
        await api.patch(PODS, "a", {"spec": {"containers": []}}, namespace="d")
        await settle()
        assert told == [("d/b", True), ("d/a", True), ("d/a", False)]
        if is_lost:
            api.lose(PODS, "b", "d")
            api.compact()
        else:
            await api.delete(PODS, "b", namespace="d")
        await settle()
    assert told[-1] == ("d/b", False)


async def test_an_object_without_a_readable_name_is_skipped(clock: FakeClock, start: Callable[..., World]) -> None:
    class Odd(FakeKube):
        async def list_page(
            self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
        ) -> Page:
            return Page([msgspec.Raw(b'{"metadata": 7}'), msgspec.Raw(b'{"metadata": {"name": "a"}}')], "1", "")

    with capture_logs() as logs:
        world = start(api=Odd(clock))
        await settle()
    assert world.names == {"a"}
    assert [log["event"] for log in logs] == ["unreadable object skipped"]


async def test_a_change_that_cannot_be_followed_ends_the_process(api: FakeKube, clock: FakeClock) -> None:
    def fail(old: Pod | None, new: Pod | None) -> None:
        raise AssertionError("broken index")

    api.seed(PODS, pod_body("a"))
    with pytest.raises(AssertionError, match="broken index"):
        await Reflector(api, PODS, Pod, clock=clock, on_change=fail).run()
