"""Experiments in which GPUs that several share lose memory in pieces."""

from dataclasses import replace
from pathlib import Path

from carpool_extender.simulation.contest import Experiment
from carpool_extender.simulation.workload import Workload


def fragmented(experiment: Experiment, share: float) -> Experiment:
    """Let several tenants of a GPU lose a share of its memory, 0..1."""
    if not share:
        return experiment

    def draw(data: Path, seed: int) -> Workload:
        drawn = experiment.draw(data, seed)
        told = f"Several tenants of a GPU lose {share:.0%} of its memory in pieces, which no decision knows."
        return replace(drawn, fragmented=share, assumptions=(*drawn.assumptions, told))

    return replace(experiment, draw=draw)
