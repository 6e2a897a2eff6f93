"""What became of each GPU, for people: those of which the same is to be said stand on one line."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from carpool_core.values import GpuUuid

from carpool_extender.placement.refusal import counted


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """One GPU and what is to be said of it."""

    node: str
    index: int
    uuid: GpuUuid
    product: str
    fits: bool
    said: str
    counts_tenants: bool = False
    """Whether what its tenants do had a say in that."""

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.node} ({self.product}): {self.said}"


def with_own(answers: Iterable[GpuAnswer], own: frozenset[GpuUuid]) -> list[GpuAnswer]:
    """Say where a job is already; what is said besides is what would be so without it."""
    return [replace(one, said=f"it is here; without it: {one.said}") if one.uuid in own else one for one in answers]


def with_measures(answers: Iterable[GpuAnswer], measured: Mapping[GpuUuid, str]) -> list[GpuAnswer]:
    """Say of GPUs whose tenants had a say what was measured of these in place of what was predicted."""
    return [
        replace(one, said=f"{one.said}; {measured[one.uuid]}") if one.counts_tenants and one.uuid in measured else one
        for one in answers
    ]


def with_refusals(answers: Iterable[GpuAnswer], refused: Mapping[str, str]) -> list[GpuAnswer]:
    """Say of the GPUs of some nodes, by name, why kube-scheduler would not offer these nodes at all."""
    return [
        replace(one, fits=False, said=f"{why}; {'the GPU itself ' if one.fits else ''}{one.said}")
        if (why := refused.get(one.node)) is not None
        else one
        for one in answers
    ]


def lines(answers: Iterable[GpuAnswer], *, each: bool) -> list[str]:
    """Write the answers down.

    Args:
        answers: Of GPUs, in the order in which they are told.
        each: Whether every GPU has a line of its own.
    """
    if each:
        return [str(one) for one in answers]
    alike: dict[tuple[str, str], list[GpuAnswer]] = {}
    for one in answers:
        alike.setdefault((one.product, one.said), []).append(one)
    return [_line(group) for group in alike.values()]


def broken(line: str, width: int) -> str:
    """Break a line between words where a terminal ends, what follows further in; words of any length stay whole."""
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _line(group: list[GpuAnswer]) -> str:
    first, nodes = group[0], {one.node for one in group}
    if len(group) == 1:
        return str(first)
    where = first.node if len(nodes) == 1 else counted(len(nodes), "node")
    return f"{counted(len(group), 'GPU')} of {where} ({first.product}): {first.said}"
