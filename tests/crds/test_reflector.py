"""What a reflector does while the server answers, and while it does not."""

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from carpool_core.kube.api import PODS, Page, ResourceKind, Selector, WatchEvent
from carpool_core.kube.errors import Forbidden, Gone, Overloaded, Unreachable
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from reflector_world import World, pod_body, settle
from structlog.testing import capture_logs


async def test_list_and_changes_are_reported(api: FakeKube, start: Callable[..., World]) -> None:
    api.seed(PODS, pod_body("a"))
    world = start()
    assert not world.reflector.store.synced
    await world.reflector.wait_synced()
    await settle()
    await api.create(PODS, pod_body("b"))
    await api.patch(PODS, "a", {"spec": {"nodeName": "n1"}}, namespace="d")
    await api.delete(PODS, "b", namespace="d")
    await settle()
    assert world.changes == [(None, "a@"), (None, "b@"), ("a@", "a@n1"), ("b@", None)]
    assert world.names == {"d/a"}
    found = world.reflector.store.get("d/a")
    assert found is not None
    assert found.spec.node_name == "n1"


async def test_all_pages_are_listed(api: FakeKube, start: Callable[..., World]) -> None:
    for i in range(1234):
        api.seed(PODS, pod_body(f"p{i}"))
    world = start()
    await world.reflector.wait_synced()
    assert len(world.reflector.store.values()) == 1234
    assert [call.verb for call in api.calls].count("list") == 3


async def test_expired_watch_lists_again_and_reports_deletions(api: FakeKube, start: Callable[..., World]) -> None:
    for name in ("stays", "goes", "moves", "replaced"):
        api.seed(PODS, pod_body(name))
    world = start()
    await settle()
    world.changes.clear()
    # The connection breaks, things happen, and the server forgets them before the watch comes back.
    api.end_watches(Unreachable("cut"))
    await settle()
    await api.delete(PODS, "goes", namespace="d")
    await api.patch(PODS, "moves", {"spec": {"nodeName": "n2"}}, namespace="d")
    await api.create(PODS, pod_body("comes"))
    await api.delete(PODS, "replaced", namespace="d")
    await api.create(PODS, pod_body("replaced"))
    api.compact()
    world.clock.advance(60)
    await settle()
    changes = [("goes@", None), ("moves@", "moves@n2"), ("replaced@", None), (None, "comes@"), (None, "replaced@")]
    assert sorted(world.changes, key=str) == changes
    assert world.names == {"d/stays", "d/moves", "d/comes", "d/replaced"}


async def test_repeated_expiry_backs_off(api: FakeKube, clock: FakeClock, start: Callable[..., World]) -> None:
    for _ in range(5):
        api.fail_next("list", PODS, Gone("expired"))
    start()
    await settle()
    assert [call.verb for call in api.calls] == ["list", "list"]
    assert clock.sleeping == [pytest.approx(0.4)]


async def test_watch_continues_from_the_last_bookmark(api: FakeKube, start: Callable[..., World]) -> None:
    world = start(selector=Selector(fields="spec.nodeName=n1"))
    await settle()
    for i in range(5):
        await api.create(PODS, pod_body(f"elsewhere{i}", "n2"))
    api.bookmark()
    await settle()
    versions: list[str] = []
    original = api.watch

    def watch(kind: ResourceKind, selector: Selector, version: str) -> AsyncIterator[WatchEvent]:
        versions.append(version)
        return original(kind, selector, version)

    api.watch = watch  # type: ignore[method-assign]
    world.clock.advance(300)
    api.end_watches()
    await settle()
    assert versions == ["5"]
    assert world.names == set()


async def test_ended_watch_loses_nothing(api: FakeKube, start: Callable[..., World]) -> None:
    world = start()
    await settle()
    world.clock.advance(300)
    api.end_watches()
    await api.create(PODS, pod_body("meanwhile"))
    world.clock.advance(1)
    await settle()
    assert world.names == {"d/meanwhile"}
    assert [call.verb for call in api.calls].count("list") == 1


async def test_silent_watch_continues_where_it_was(
    api: FakeKube, clock: FakeClock, start: Callable[..., World]
) -> None:
    world = start()
    await settle()
    clock.advance(150)
    api.end_watches(Unreachable("no word from the API server for 150 s"))
    await api.create(PODS, pod_body("meanwhile"))
    await settle()
    assert world.reflector.store.age(clock.monotonic()) == 150
    clock.advance(0.2)
    await settle()
    assert world.names == {"d/meanwhile"}
    assert world.reflector.store.age(clock.monotonic()) == 0
    assert [call.verb for call in api.calls].count("list") == 1


async def test_delays_double_to_half_a_minute_and_reset(
    api: FakeKube, clock: FakeClock, start: Callable[..., World]
) -> None:
    for _ in range(12):
        api.fail_next("list", PODS, Overloaded("etcd is slow"))
    start()
    waits = []
    for _ in range(12):
        await settle()
        waits.append(clock.sleeping[0])
        clock.advance(clock.sleeping[0])
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30, 30])
    await settle()
    await api.create(PODS, pod_body("a"))
    await settle()
    api.end_watches(Unreachable("cut"))
    await settle()
    assert clock.sleeping == pytest.approx([0.2])


async def test_watch_that_ends_at_once_backs_off(api: FakeKube, clock: FakeClock, start: Callable[..., World]) -> None:
    start()
    await settle()
    api.end_watches()
    await settle()
    assert clock.sleeping == [pytest.approx(0.2)]


async def test_missing_right_is_logged_and_retried(
    api: FakeKube, clock: FakeClock, start: Callable[..., World]
) -> None:
    api.fail_next("list", PODS, Forbidden("pods is forbidden: grant list and watch"))
    with capture_logs() as logs:
        world = start()
        await settle()
    assert [(log["event"], log["log_level"]) for log in logs] == [("watch failed", "error")]
    assert "grant list and watch" in logs[0]["error"]
    clock.advance(1)
    await settle()
    assert world.reflector.store.synced


async def test_malformed_object_is_logged_and_skipped(api: FakeKube, start: Callable[..., World]) -> None:
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


async def test_malformed_update_keeps_the_last_good_state(api: FakeKube, start: Callable[..., World]) -> None:
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
    assert world.changes == [(None, "a@n1"), ("a@n1", None)]


@pytest.mark.parametrize("is_lost", [False, True], ids=["watched", "found gone by a list"])
async def test_unreadable_object_is_reported_until_it_is_readable_or_gone(
    api: FakeKube, start: Callable[..., World], is_lost: bool
) -> None:
    reports: list[tuple[str, bool]] = []
    api.seed(PODS, pod_body("a", "n1"))
    api.seed(PODS, pod_body("b", containers=7))
    with capture_logs():
        start(on_unreadable=lambda key, why: reports.append((key, why is not None)))
        await settle()
        assert reports == [("d/b", True)]
        await api.patch(PODS, "a", {"spec": {"containers": 7}}, namespace="d")
        await settle()
        await api.patch(PODS, "a", {"spec": {"containers": []}}, namespace="d")
        await settle()
        assert reports == [("d/b", True), ("d/a", True), ("d/a", False)]
        if is_lost:
            api.lose(PODS, "b", "d")
            api.compact()
        else:
            await api.delete(PODS, "b", namespace="d")
        await settle()
    assert reports[-1] == ("d/b", False)


async def test_object_without_a_name_is_skipped(clock: FakeClock, start: Callable[..., World]) -> None:
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


async def test_error_in_a_handler_ends_the_reflector(api: FakeKube, clock: FakeClock) -> None:
    def fail(old: Pod | None, new: Pod | None) -> None:
        raise AssertionError("broken index")

    api.seed(PODS, pod_body("a"))
    with pytest.raises(AssertionError, match="broken index"):
        await Reflector(api, PODS, Pod, clock=clock, on_change=fail).run()
