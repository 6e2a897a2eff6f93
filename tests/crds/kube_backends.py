"""The backends of `KubeApi` that one battery runs over: the fake, and a real API server."""

from dataclasses import dataclass
from typing import Any

import pytest
from carpool_core.kube.api import GPU_NODES, PODS, KubeApi, Selector
from carpool_core.kube.errors import KubeError

CONTAINERS = [{"name": "c", "image": "i"}]


@dataclass
class Backend:
    """An API server and names on it for one test only."""

    api: KubeApi
    tag: str

    def name(self, text: str) -> str:
        return f"{text}-{self.tag}"

    async def pod(self, text: str, **metadata: Any) -> dict[str, Any]:
        body = {
            "metadata": {"name": self.name(text), "labels": {"tag": self.tag}, **metadata},
            "spec": {"containers": CONTAINERS, "schedulerName": "other", "terminationGracePeriodSeconds": 0},
        }
        return await self.api.create(PODS, body, namespace="default")

    async def node(self) -> dict[str, Any]:
        return await self.api.create(GPU_NODES, {"metadata": {"name": self.name("n")}, "spec": {}})

    @property
    def selector(self) -> Selector:
        return Selector(namespace="default", labels=f"tag={self.tag}")


def reservation(pod_uid: str) -> dict[str, Any]:
    return {
        "podUid": pod_uid, "podNamespace": "d", "podName": "p", "jobUid": "j", "jobName": "j",
        "gpuUuids": ["GPU-1"], "mode": "MPS",
    }  # fmt: skip


async def refused(kind: type[KubeError], call: Any, *words: str) -> None:
    with pytest.raises(kind) as caught:
        await call
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
