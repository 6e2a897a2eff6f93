"""Documents of the board that no command prints, computed from those of the commands. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import Annotated, Literal

from carpool_core.clock import parse_rfc3339
from carpool_core.keys import (
    CONDITION_COMPLETE,
    CONDITION_FAILED,
    CONDITION_PLACED,
    CONDITION_PREDICTED,
    CONDITION_RUNNING,
)
from carpool_core.kubectl.views import Diagnosis, EventView, GpuView, diagnose, job_view
from carpool_core.resources.job import GpuTrainingJob, WorkerPlacement
from carpool_core.resources.schema import Resource, field
from carpool_core.values import DeviceHealth

NODES_PER_PAGE = 25
"""Nodes on a page of GPUs: with eight GPUs each, 200 bars."""


class Show(StrEnum):
    """Which GPUs are shown."""

    ALL = "all"
    BUSY = "busy"
    """GPUs with a tenant."""
    IDLE = "idle"
    """Healthy GPUs without a tenant."""
    UNHEALTHY = "unhealthy"


class Fleet(Resource, frozen=True, kw_only=True):
    """Totals of all GPUs."""

    nodes: Annotated[int, field("Number of nodes with GPUs.")] = 0
    gpus: Annotated[int, field("Number of GPUs.")] = 0
    busy: Annotated[int, field("GPUs with a tenant.")] = 0
    shared: Annotated[int, field("GPUs with at least two tenants.")] = 0
    idle: Annotated[int, field("Healthy GPUs without a tenant.")] = 0
    unhealthy: Annotated[int, field("GPUs that take no new pods because of their health.")] = 0
    memory_mib: Annotated[int, field("Their memory, in MiB.")] = 0
    used_mib: Annotated[int, field("Memory that their tenants use, in MiB.")] = 0


class GpuPage(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """One page of GPUs; nodes are not divided."""

    kind: Annotated[Literal["GpuPage"], field("Kind of the document.")] = "GpuPage"
    fleet: Annotated[Fleet, field("Totals of all GPUs, whatever is selected.")]
    selected: Annotated[int, field("Number of GPUs that are selected.")]
    page: Annotated[int, field("Number of this page, from 1.")]
    pages: Annotated[int, field("Number of pages.")]
    items: Annotated[list[GpuView], field("GPUs of this page by node and index.")]


class TimelineEntry(Resource, frozen=True, kw_only=True):
    """One entry of a job's timeline."""

    what: Annotated[
        Literal["Created", "Predicted", "Placed", "Neighbours", "Running", "Measured", "Ended", "Recovered"],
        field("What happened."),
    ]
    time: Annotated[str, field("When it happened, RFC 3339; empty: it holds now.")] = ""
    message: Annotated[str, field("A sentence.")] = ""


class JobReport(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """One job with its timeline."""

    kind: Annotated[Literal["JobReport"], field("Kind of the document.")] = "JobReport"
    diagnosis: Annotated[
        Diagnosis, field("State, predicted beside measured quantities, attempts, findings and events.")
    ]
    placement: Annotated[list[WorkerPlacement], field("Places of its workers with their reasons, as in its status.")]
    timeline: Annotated[list[TimelineEntry], field("What happened to it, the latest last.")]


# GPUs


def gpu_page(gpus: Iterable[GpuView], search: str = "", show: Show = Show.ALL, page: int = 1) -> GpuPage:
    """Return one page of GPUs, the last one if there are fewer.

    `search` is a part of the name of a node, a product, or a tenant NAMESPACE/NAME; `page` counts from 1.
    """
    all_ = list(gpus)
    nodes = [list(found) for _, found in groupby(_selected(all_, search.casefold(), show), lambda gpu: gpu.node)]
    pages = max(1, -(-len(nodes) // NODES_PER_PAGE))
    page = min(max(1, page), pages)
    chosen = nodes[(page - 1) * NODES_PER_PAGE : page * NODES_PER_PAGE]
    return GpuPage(
        fleet=_fleet(all_),
        selected=sum(map(len, nodes)),
        page=page,
        pages=pages,
        items=[gpu for node in chosen for gpu in node],
    )


def _selected(gpus: Iterable[GpuView], search: str, show: Show) -> Iterator[GpuView]:
    for gpu in gpus:
        is_shown = {
            Show.ALL: True,
            Show.BUSY: bool(gpu.tenants),
            Show.IDLE: gpu.is_idle,
            Show.UNHEALTHY: gpu.device.health is not DeviceHealth.HEALTHY,
        }[show]
        names = (gpu.node, gpu.device.product, *(f"{one.namespace}/{one.job}" for one in gpu.tenants))
        if is_shown and (not search or any(search in name.casefold() for name in names)):
            yield gpu


def _fleet(gpus: Sequence[GpuView]) -> Fleet:
    return Fleet(
        nodes=len({gpu.node for gpu in gpus}),
        gpus=len(gpus),
        busy=sum(bool(gpu.tenants) for gpu in gpus),
        shared=sum(len(gpu.tenants) > 1 for gpu in gpus),
        idle=sum(gpu.is_idle for gpu in gpus),
        unhealthy=sum(gpu.device.health is not DeviceHealth.HEALTHY for gpu in gpus),
        memory_mib=sum(gpu.device.memory_mib for gpu in gpus),
        used_mib=sum(gpu.used_mib for gpu in gpus),
    )


# Jobs


def job_report(job: GpuTrainingJob, events: Sequence[EventView], now: datetime) -> JobReport:
    """Return what is known of a job."""
    # Entries of one time stay in the order in which they follow from each other; what holds now comes last.
    timeline = sorted(
        _timeline(job, now), key=lambda one: (not one.time, one.time and parse_rfc3339(one.time).timestamp())
    )
    return JobReport(diagnosis=diagnose(job, events, now), placement=job.status.placement, timeline=timeline)


def _timeline(job: GpuTrainingJob, now: datetime) -> Iterator[TimelineEntry]:
    status = job.status
    by_type = {condition.type: condition for condition in status.conditions}
    yield TimelineEntry(what="Created", time=job.metadata.creation_timestamp or "")
    if (predicted := by_type.get(CONDITION_PREDICTED)) is not None:
        yield TimelineEntry(what="Predicted", time=predicted.last_transition_time, message=predicted.message)
    earlier = None
    for attempt in status.attempts:
        if earlier is not None:
            message = f"attempt {attempt.number} follows {earlier.outcome} of attempt {earlier.number}"
            yield TimelineEntry(what="Recovered", time=attempt.started_at, message=message)
        if attempt.ended_at:
            message = f"attempt {attempt.number}: {attempt.outcome}: {attempt.message}".rstrip(": ")
            yield TimelineEntry(what="Ended", time=attempt.ended_at, message=message)
        earlier = attempt
    if (placed := by_type.get(CONDITION_PLACED)) is not None and placed.status == "True":
        where = "; ".join(f"{one.pod} on {one.node}: {one.reason}".rstrip(": ") for one in status.placement)
        yield TimelineEntry(what="Placed", time=placed.last_transition_time, message=where or placed.message)
    if (running := by_type.get(CONDITION_RUNNING)) is not None and running.status == "True":
        yield TimelineEntry(what="Running", time=running.last_transition_time, message=running.message)
    if beside := job_view(job, now).cotenants:
        slowdown = max(place.expected_slowdown for place in status.placement)
        message = f"shares its GPUs with {', '.join(beside)}; expected slowdown {slowdown:.2f}"
        yield TimelineEntry(what="Neighbours", message=message)
    if (seen := status.observed) is not None and seen.peak_memory_mib:
        parts = [f"{seen.peak_memory_mib:,} MiB at its peak"]
        parts += [] if seen.gpu_util_percent is None else [f"GPU utilization {seen.gpu_util_percent:.0f}%"]
        parts += [] if seen.slowdown is None else [f"slowdown {seen.slowdown:.2f}"]
        yield TimelineEntry(what="Measured", message=", ".join(parts))
    ends = [by_type[t] for t in (CONDITION_COMPLETE, CONDITION_FAILED) if t in by_type and by_type[t].status == "True"]
    if ends and status.completion_time:
        message = f"{ends[0].type}: {ends[0].message}".rstrip(": ")
        yield TimelineEntry(what="Ended", time=status.completion_time, message=message)
