"""What else went on while something was measured."""

import os


def circumstances() -> str:
    """Say in a sentence how busy the machine was, and whether the benchmark went before others."""
    told = f"The machine's load was {os.getloadavg()[0]:.1f} at the end"
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        told += "; the benchmark ran at real-time priority, before what else ran"
    return f"{told}."
