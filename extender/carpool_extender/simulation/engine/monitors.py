"""What the agents of simulated nodes report of the jobs that run there."""

from collections.abc import Iterable, Mapping

import msgspec
from carpool_core.resources.node import Reservation, Tenant
from carpool_core.values import GpuUuid, PodUid

from carpool_extender.simulation.engine.board import Board
from carpool_extender.simulation.engine.knowing import Knower
from carpool_extender.simulation.engine.state import Gpu, Running

LOADED_S = 60.0
"""Time until a job has taken its memory, in seconds: it loads, and allocates in its first step."""


class Monitors:
    """Reports tenants as a strategy gets to see them.

    Args:
        knower: What may be seen.
        board: Where it is written.
        gpus: All GPUs.
    """

    def __init__(self, knower: Knower, board: Board, gpus: Iterable[Gpu]) -> None:
        self._knower, self._board = knower, board
        self._on_node: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            self._on_node.setdefault(gpu.node, []).append(gpu)

    def report(self, nodes: Iterable[str], now_s: float) -> None:
        """Write down what is now seen of the tenants of some nodes."""
        for node in nodes:
            seen, tenants = {}, []
            for gpu in self._on_node[node]:
                for running in gpu.tenants:
                    uid, tenant = self._measured(running, gpu.device.uuid)
                    seen[uid] = running
                    if tenant is not None and now_s >= running.started_s + LOADED_S:
                        tenants.append(tenant)
            self._board.report(node, tenants, self._as_seen(node, seen), now_s)

    def _measured(self, running: Running, gpu: GpuUuid) -> tuple[PodUid, Tenant | None]:
        """Return who a tenant of a GPU is and what is measured of it: the same for as long as its speed is."""
        known = running.measured.get(gpu)
        if known is None or known[0] != running.slowdown:
            uid = running.uid_on(gpu)
            tenant = self._knower.measured(running.job.truth, uid, gpu, running.slowdown)
            known = running.measured[gpu] = (running.slowdown, uid, tenant)
        return known[1:]

    def _as_seen(self, node: str, seen: Mapping[PodUid, Running]) -> dict[PodUid, Reservation]:
        """Return the reservations of a node as a monitor without promises has them; none where there are promises."""
        if not self._knower.informers:
            return {}
        return {
            r.pod_uid: msgspec.structs.replace(r, tenant=self._knower.profile(one.job.truth, r.tenant, one.slowdown))
            for r in self._board.reservations(node)
            if (one := seen.get(r.pod_uid)) is not None
        }
