"""Failures of GPUs: each fails now and then, at random, and takes jobs again after its repair."""

import random
from dataclasses import replace

from carpool_core.values import GpuUuid

from carpool_extender.simulation.truth.workload import Failure, Workload

REPAIR_S = 3600.0
"""Mean time until a GPU that failed takes jobs again, in seconds; an assumption: a reset, or another node."""


def with_failures(workload: Workload, mean_hours: float, seed: int) -> Workload:
    """Let the GPUs of a workload fail.

    Args:
        workload: What is simulated.
        mean_hours: Mean time between two failures of one GPU, in hours; exponentially distributed.
        seed: Draws them.
    """
    draw = random.Random(f"failures/{seed}")  # noqa: S311  # a simulation, no secret
    span_s = _span_s(workload)
    failures = []
    for device in _devices(workload):
        at_s = draw.expovariate(1 / (3600 * mean_hours))
        while at_s < span_s:
            lasts_s = draw.expovariate(1 / REPAIR_S)
            failures.append(Failure(device, at_s, lasts_s))
            at_s += lasts_s + draw.expovariate(1 / (3600 * mean_hours))
    told = f"Each GPU fails every {mean_hours:g} hours on average, and is back after one; its jobs begin again."
    return replace(
        workload, failures=sorted(failures, key=lambda one: one.at_s), assumptions=(*workload.assumptions, told)
    )


def _devices(workload: Workload) -> list[GpuUuid]:
    return [device.uuid for devices in workload.nodes.values() for device in devices]


def _span_s(workload: Workload) -> float:
    """A time by which everything has ended, even one job after the other on half of the GPUs."""
    work_s = sum(job.work_s * job.gpus * job.workers for job in workload.jobs)
    gpus = sum(len(devices) for devices in workload.nodes.values())
    return max(job.arrival_s for job in workload.jobs) + 4 * work_s / gpus
