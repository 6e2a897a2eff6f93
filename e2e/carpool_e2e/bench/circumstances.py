"""What else went on while something was measured."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

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
