"""Workloads on GPUs that lose memory in pieces where several share them."""

from dataclasses import replace
from pathlib import Path

from carpool_extender.simulation.truth.workload import Draw, Workload


def in_pieces(draw: Draw, share: float) -> Draw:
    """Let several tenants of a GPU lose a share of its memory, 0..1; what draws workloads stays as it is at 0."""
    if not share:
        return draw

    def drawn(data: Path, seed: int) -> Workload:
        found = draw(data, seed)
        told = f"Several tenants of a GPU lose {share:.0%} of its memory in pieces, which no decision knows."
        return replace(found, fragmented=share, assumptions=(*found.assumptions, told))

    return drawn
