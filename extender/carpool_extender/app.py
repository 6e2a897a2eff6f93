"""The composition root: every object of the process is built here, in tests too."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from carpool_core.clock import Clock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.events import EventRecorder
from carpool_core.sealing import sealer_of
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from carpool_extender.cache.cluster import Cluster
from carpool_extender.cache.health import Standing
from carpool_extender.config import ExtenderSettings
from carpool_extender.connections import HELD_S, Connections
from carpool_extender.framework.evaluation_cache import Assessments
from carpool_extender.framework.gang import Gangs
from carpool_extender.framework.scheduler_config import Rules
from carpool_extender.framework.scores import find_policy
from carpool_extender.informers import Watches
from carpool_extender.metrics import KnowledgeCollector, Telemetry
from carpool_extender.queue.nominator import Keeper, Line
from carpool_extender.reservations.binder import Binder, Inflow, Tools
from carpool_extender.reservations.gc import Janitor, Restorer
from carpool_extender.reservations.peaks import Settler, Stillness
from carpool_extender.reservations.writer import GATHER_S, Book, Untracker
from carpool_extender.scheduler import Service
from carpool_extender.server import create_app
from carpool_extender.terminating_pods import Departures
from carpool_extender.workloads import JobOptions, Workloads

COMPONENT = "carpool-extender"


@dataclass(frozen=True, slots=True)
class Extender:
    """The parts of a running extender."""

    app: Starlette
    service: Service
    watches: Watches
    janitor: Janitor
    binder: Binder
    settler: Settler | None
    keeper: Keeper
    untracker: Untracker
    registry: CollectorRegistry

    async def run(self) -> None:
        """Watch and sweep for ever; serving `app` is the caller's."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watches.run())
            group.create_task(self.janitor.run())
            group.create_task(self.untracker.run())
            group.create_task(self.keeper.run())
            if self.settler is not None:
                group.create_task(self.settler.run())


def build(
    settings: ExtenderSettings,
    api: KubeApi,
    clock: Clock,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    *,
    gather_s: float = GATHER_S,
    held_s: float = HELD_S,
) -> Extender:
    """Put the process together.

    Args:
        settings: What the site has chosen.
        api: The Kubernetes API.
        clock: Tells the time.
        sleep: Waits.
        gather_s: Seconds from one write of a GpuNode to the next.
        held_s: Seconds for which an answer to a bind is held at most.

    Raises:
        UnknownPolicyError: The policy's name is not in the table.
        SettingsError: A precondition is impossible.
    """
    rules = Rules(find_policy(settings.policy), settings.slots_per_gpu, settings.conditions.conditions())
    registry = CollectorRegistry()
    telemetry = Telemetry(registry, clock)
    standing = Standing(clock)
    watches = Watches(api, clock, Cluster(settings.slots_per_gpu, standing))
    registry.register(KnowledgeCollector(watches))
    workloads = Workloads(
        api, watches, JobOptions(settings.job_policies, settings.count_peaks), sealer_of(settings.prediction_key)
    )
    book = Book(api, watches, clock, sleep, gather_s)
    events = EventRecorder(api, clock, COMPONENT)
    tools = Tools(api, clock, sleep, events, telemetry, standing)
    assessments = Assessments(watches.cluster, rules)
    gangs = Gangs(watches, assessments, rules)
    restorer = Restorer(api, watches, book, events, settings.slots_per_gpu)
    janitor = Janitor(api, watches, book, restorer, clock=clock, sleep=sleep)
    keeper = Keeper(
        Line(settings.queue_order, watches.cluster, clock),
        watches,
        standing,
        assessments=assessments,
        gangs=gangs,
        clock=clock,
        sleep=sleep,
        telemetry=telemetry,
        remind=janitor.remind,
    )
    binder = Binder(
        tools,
        watches,
        workloads,
        book,
        assessments=assessments,
        gangs=gangs,
        keeper=keeper,
        inflow=Inflow(clock, sleep, settings.bind_timeout_seconds),
        slots=settings.slots_per_gpu,
        timeout_s=settings.bind_timeout_seconds,
    )
    janitor.leave_alone(binder.open)
    settler = Settler(watches, book, Stillness(clock)) if settings.count_peaks else None
    service = Service(
        watches,
        workloads,
        binder,
        assessments=assessments,
        gangs=gangs,
        keeper=keeper,
        connections=Connections(sleep, held_s),
        departures=Departures(watches, rules, clock, sleep),
        telemetry=telemetry,
        candidates=settings.candidates,
    )
    app = create_app(service, telemetry, watches.not_ready)
    untracker = Untracker(api, watches)
    return Extender(app, service, watches, janitor, binder, settler, keeper, untracker, registry)
