"""A board that knows true slowdowns: it says how much of the distance to an oracle the slowdown model is to blame for.

Memory, modes and places are decided as ever; only whose limit is kept, and where the least is lost, follows from what
would truly happen instead of what is predicted.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from carpool_core.values import GpuUuid

from carpool_extender.cache.gpu_table import MODES
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.framework.scheduler_config import SchedulerConfig
from carpool_extender.framework.selection import Placement
from carpool_extender.simulation.engine.board import Board
from carpool_extender.simulation.engine.state import Physics
from carpool_extender.simulation.engine.strategy import Piece, Strategy
from carpool_extender.simulation.truth.workload import Truth, Workload

SLACK = 1e-6
"""Room for rounding when a slowdown meets its limit."""


class Foreseeing(Board):
    """Decides with true slowdowns. Whoever asks must say no limit of its own, or the predicted ones count as well.

    Args:
        workload: What is simulated.
        rules: The site's.
        physics: The truth.
        limit: Slowdown that everybody accepts.
    """

    def __init__(self, workload: Workload, rules: SchedulerConfig, physics: Physics, limit: float) -> None:
        super().__init__(workload.nodes, rules)
        self._physics, self._limit = physics, limit
        self._truths: Mapping[str, Truth] = {job.truth.kind: job.truth for job in workload.jobs}

    def best(self, pod_request: PodRequest, shut: Iterable[GpuUuid] = ()) -> tuple[str, Placement] | None:
        """Decide where a worker goes; as `Board.best`, among the GPUs on which the least is truly lost."""
        evaluation, closed = self._evaluation_cache.of(pod_request).evaluation, set(shut)
        newcomer = self._truths[pod_request.demand.job_uid]
        lost: dict[GpuUuid, float] = {}
        for row in np.flatnonzero(evaluation.ok).tolist():
            uuid, mode = evaluation.snapshot.columns.uuid[row], MODES[int(evaluation.found.mode[row])]
            if uuid in closed or mode is None:
                continue
            there = self._truly_on(evaluation.snapshot.node_names[int(evaluation.snapshot.columns.node[row])], uuid)
            after = self._physics.slowdowns(mode, [*there, newcomer])
            if max(after) <= self._limit + SLACK:
                lost[uuid] = sum(after) - sum(self._physics.slowdowns(mode, there)) if there else after[0]
        if not lost:
            return None
        most = min(lost.values()) + self._rules.policy.tolerance
        return super().best(pod_request, [uuid for uuid in self._rows if lost.get(uuid, np.inf) > most])

    def _truly_on(self, node: str, uuid: GpuUuid) -> list[Truth]:
        return [self._truths[r.job_uid] for r in self.reservations(node) if uuid in r.gpu_uuids]


def board_of(workload: Workload, strategy: Strategy, rules: SchedulerConfig, physics: Physics) -> Board:
    """Return what a strategy decides on."""
    if Piece.SLOWDOWNS in strategy.told:
        return Foreseeing(workload, rules, physics, strategy.max_slowdown)
    return Board(workload.nodes, rules)
