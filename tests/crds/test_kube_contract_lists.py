"""The same battery: objects are listed and watched."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from carpool_core.clock import SystemClock
from carpool_core.kube.api import PODS, Selector
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from kube_backends import Backend


async def test_pages(backend: Backend) -> None:
    for i in range(5):
        await backend.pod(f"p{i}")
    names, token = [], ""
    for _ in range(3):
        page = await backend.api.list_page(PODS, backend.selector, limit=2, continue_token=token)
        names += [msgspec.json.decode(raw, type=Pod).metadata.name for raw in page.items]
        token = page.continue_token
    assert names == [backend.name(f"p{i}") for i in range(5)]
    assert token == ""


@pytest.mark.parametrize(
    ("labels", "fields", "found"),
    [
        ("tag={tag},worker=1", "", ["b"]),
        ("tag={tag},worker!=1", "", ["a", "c"]),
        ("tag={tag},worker", "", ["b", "c"]),
        ("tag={tag},!worker", "", ["a"]),
        ("tag={tag},worker in (1,2)", "", ["b", "c"]),
        ("tag={tag},worker notin (1, 3)", "", ["a", "c"]),
        ("tag={tag}", "spec.nodeName=n1", ["c"]),
        ("tag={tag}", "spec.nodeName!=n1,spec.schedulerName=nobody", ["a", "b"]),
        ("tag={tag}", "status.phase=Pending,metadata.name=a-{tag}", ["a"]),
    ],
)
async def test_selectors(backend: Backend, labels: str, fields: str, found: list[str]) -> None:
    for text, worker, node in (("a", None, ""), ("b", "1", ""), ("c", "2", "n1")):
        own = {"tag": backend.tag} | ({"worker": worker} if worker else {})
        pod = await backend.pod(text, labels=own)
        if node:
            body = {
                "metadata": {"name": backend.name(text), "uid": pod["metadata"]["uid"]},
                "target": {"name": node},
            }
            await backend.api.create(PODS, body, namespace="default", name=backend.name(text), subresource="binding")
    selector = Selector("default", labels.format(tag=backend.tag), fields.format(tag=backend.tag))
    page = await backend.api.list_page(PODS, selector)
    names = [msgspec.json.decode(raw, type=Pod).metadata.name for raw in page.items]
    assert names == [backend.name(text) for text in found]


async def test_a_watch_tells_what_happened_since_and_what_enters_and_leaves(backend: Backend) -> None:
    page = await backend.api.list_page(PODS, backend.selector)
    pod = await backend.pod("a")
    name = backend.name("a")
    events = backend.api.watch(PODS, Selector("default", f"tag={backend.tag}", "spec.nodeName="), page.resource_version)
    told: list[tuple[str, str]] = []

    async def follow(count: int) -> None:
        while len(told) < count:
            event = await anext(events)
            if event.type != "BOOKMARK":
                told.append((event.type, msgspec.json.decode(event.object, type=Pod).metadata.name))

    await asyncio.wait_for(follow(1), 10)
    await backend.api.patch(PODS, name, {"metadata": {"annotations": {"a": "b"}}}, namespace="default")
    body = {"metadata": {"name": name, "uid": pod["metadata"]["uid"]}, "target": {"name": "n1"}}
    await backend.api.create(PODS, body, namespace="default", name=name, subresource="binding")
    await asyncio.wait_for(follow(3), 10)
    assert told == [("ADDED", name), ("MODIFIED", name), ("DELETED", name)]
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_reflector_follows(backend: Backend) -> None:
    changed = asyncio.Event()
    reflector = Reflector(
        backend.api, PODS, Pod, selector=backend.selector, clock=SystemClock(), on_change=lambda *_: changed.set()
    )
    task = asyncio.create_task(reflector.run())

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            changed.clear()
            await changed.wait()

    await asyncio.wait_for(reflector.wait_synced(), 10)
    await backend.pod("a")
    await asyncio.wait_for(until(lambda: len(reflector.store.items) == 1), 10)
    await backend.api.delete(PODS, backend.name("a"), namespace="default")
    await asyncio.wait_for(until(lambda: not reflector.store.items), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
