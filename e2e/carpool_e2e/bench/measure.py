"""Rounds of a measurement: those count in which the hypervisor gave the least of this machine to others."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from prometheus_client.parser import text_string_to_metric_families

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


_GROUP_NICE = re.compile(r"nice (-?\d+)")
RAISED = "where both wanted a processor, other work on the machine waited"
"""What raised priority means."""


def circumstances() -> str:
    """Say in a sentence how busy the machine was, and whether the benchmark had raised priority."""
    told = f"The machine's load was {os.getloadavg()[0]:.1f} at the end"
    if preferred({"": 0}):
        told += f"; the benchmark ran with raised priority: {RAISED}"
    return f"{told}."


def preferred(pids: Mapping[str, int]) -> list[str]:
    """Return which of these processes go before others: by real-time priority, niceness, or that of their session.

    Args:
        pids: Process IDs by name; 0 is this process.
    """
    return [name for name, pid in pids.items() if _is_preferred(pid)]


def _is_preferred(pid: int) -> bool:
    if os.sched_getscheduler(pid) in (os.SCHED_FIFO, os.SCHED_RR) or os.getpriority(os.PRIO_PROCESS, pid) < 0:
        return True
    group = Path("/proc", str(pid) if pid else "self", "autogroup")  # absent where the kernel has no such groups
    found = _GROUP_NICE.search(group.read_text(encoding="ascii")) if group.exists() else None
    return found is not None and int(found[1]) < 0


_COUNTER = "apiserver_request_total"


def counted(metrics: str) -> Counter[str]:
    """Count the requests that an API server has answered until now, by verb and resource: `PATCH gpunodes/status`.

    Args:
        metrics: What it tells of itself, in Prometheus' format. Watches count when they end.
    """
    # Of thousands of lines few matter, and the parser takes its time.
    lines = "".join(f"{line}\n" for line in metrics.splitlines() if line.startswith(f"{_COUNTER}{{"))
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            found[_name(sample.labels)] += int(sample.value)
    return found


def _name(labels: dict[str, str]) -> str:
    what = "/".join(part for part in (labels["resource"], labels["subresource"]) if part) or "other"
    return f"{labels['verb']} {what}{' (dry run)' if labels.get('dry_run') else ''}"
