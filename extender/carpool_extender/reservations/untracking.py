"""Has the API server no longer keep who wrote which field of a GpuNode."""

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog
from carpool_core.kube.api import GPU_NODES, KubeApi
from carpool_core.kube.errors import KubeError, Retryable

from carpool_extender.kube.watches import Watches

UNTRACKED: Mapping[str, Any] = {"op": "add", "path": "/metadata/managedFields", "value": [{}]}
"""As a part of a JSON patch. Nobody applies a GpuNode, and that record is to be read and written with each report of
its agent: with dozens of reservations, each with a dozen fields, it is as long as the rest."""
AT_ONCE = 4


class Untracker:
    """Looks after GpuNodes that were created, and have no reservation yet: the first one has the same done.

    An agent cannot do it: it may write the status of its GpuNode only.

    Args:
        api: The Kubernetes API.
        watches: What is known of the cluster.
    """

    def __init__(self, api: KubeApi, watches: Watches) -> None:
        self._api, self._watches = api, watches
        self._asked: set[str] = set()
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Look for ever. A server that was too busy is asked again with the node's next sign of life."""
        while True:
            await self._watches.heard_of_tracked.wait()
            self._watches.heard_of_tracked.clear()
            await self.sweep()

    async def sweep(self) -> None:
        """Ask for it once for each GpuNode, a few at a time."""
        tracked = dict(self._watches.tracked)
        self._asked &= {*tracked.values()}
        due = [(name, uid) for name, uid in tracked.items() if uid not in self._asked]
        for begin in range(0, len(due), AT_ONCE):
            await asyncio.gather(*(self._ask(name, uid) for name, uid in due[begin : begin + AT_ONCE]))

    async def _ask(self, name: str, uid: str) -> None:
        patch: list[Mapping[str, Any]] = [{"op": "test", "path": "/metadata/uid", "value": uid}, UNTRACKED]
        try:
            await self._api.patch(GPU_NODES, name, patch, wants_object=False)
        except Retryable:
            return
        except KubeError as error:
            self._log.info("fields stay tracked", node=name, error=str(error))
        self._asked.add(uid)
