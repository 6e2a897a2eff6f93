"""Rounds of a measurement: those count in which the hypervisor gave the least of this machine to others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

CALM = 0.02
"""A round in which other machines were given more than that share of the processor time is played again."""


class Round(Protocol):
    """What was measured in one go."""

    @property
    def stolen(self) -> float:
        """Of the processor time that was asked for on this machine, the share that the hypervisor gave others."""
        ...


R = TypeVar("R", bound=Round)


def stolen_and_asked(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return how much processor time the hypervisor gave to other machines, and how much was asked for, in ticks."""
    told = (proc / "stat").read_text(encoding="ascii")  # its first line adds up all processors
    user, nice, system, _, _, irq, softirq, stolen = (int(ticks) for ticks in told.split(maxsplit=9)[1:9])
    return stolen, user + nice + system + irq + softirq + stolen


def share_stolen(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share that was stolen between two looks with `stolen_and_asked`, 0..1."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def are_enough(rounds: Sequence[Round], wanted: int, most: int) -> bool:
    """Whether there were as many calm rounds as are wanted, or as many as there may be."""
    return sum(one.stolen <= CALM for one in rounds) >= wanted or len(rounds) >= most


def played(play: Callable[[], R], wanted: int, most: int) -> list[R]:
    """Play rounds until there are enough, and return all of them."""
    rounds = list[R]()
    while not are_enough(rounds, wanted, most):
        rounds.append(play())
    return rounds


def least_disturbed(rounds: Sequence[R], wanted: int) -> list[R]:
    """Return as many rounds as are wanted: those in which the least was stolen, however long they took."""
    return sorted(rounds, key=lambda one: one.stolen)[:wanted]
