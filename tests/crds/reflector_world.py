"""A reflector of pods that runs against a fake server, and the changes that it reported."""

import asyncio
from typing import Any

from carpool_core.kube.api import PODS
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube


def pod_body(name: str, node: str = "", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "d"}, "spec": {"nodeName": node, **spec}}


async def settle() -> None:
    """Let every task run until it waits for the test."""
    for _ in range(50):
        await asyncio.sleep(0)


class World:
    """A reflector of pods that runs against a fake server, and the changes that it reported."""

    def __init__(self, api: FakeKube, clock: FakeClock, **options: Any) -> None:
        self.api, self.clock = api, clock
        self.changes: list[tuple[str | None, str | None]] = []
        self.reflector = Reflector(
            api, PODS, Pod, clock=clock, on_change=self._on_change, sleep=clock.sleep, jitter=lambda: 1.0, **options
        )
        self.task = asyncio.create_task(self.reflector.run())

    def _on_change(self, old: Pod | None, new: Pod | None) -> None:
        self.changes.append(tuple(None if p is None else f"{p.metadata.name}@{p.spec.node_name}" for p in (old, new)))  # type: ignore[arg-type]

    @property
    def names(self) -> set[str]:
        return set(self.reflector.store.items)
