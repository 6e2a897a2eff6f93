"""The composition root: every object of the process is built here, in tests too."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from carpool_core.clock import Clock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.events import EventRecorder
from carpool_core.sealing import sealer_of
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.cache.health import GpuAvailability
from carpool_extender.cache.peaks import PeakTracker
from carpool_extender.connections import HELD_S, Connections
from carpool_extender.framework.evaluation_cache import EvaluationCache
from carpool_extender.framework.gang import Gangs
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics, StateCollector
from carpool_extender.queue.nominator import Keeper, Line
from carpool_extender.reservations.binder import BindDeps, Binder
from carpool_extender.reservations.gc import ReservationGC, Restorer
from carpool_extender.reservations.peaks import PeakUpdater
from carpool_extender.reservations.writer import GATHER_S, ReservationWriter
from carpool_extender.scheduler import Service
from carpool_extender.server import create_app
from carpool_extender.settings import ExtenderSettings
from carpool_extender.terminating_pods import TerminatingPods
from carpool_extender.workloads import JobOptions, Workloads

COMPONENT = "carpool-extender"


@dataclass(frozen=True, slots=True)
class Extender:
    """The parts of a running extender."""

    app: FastAPI
    service: Service
    informers: Informers
    gc: ReservationGC
    binder: Binder
    settler: PeakUpdater | None
    keeper: Keeper
    registry: CollectorRegistry

    async def run(self) -> None:
        """Watch and sweep for ever; serving `app` is the caller's."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.informers.run())
            group.create_task(self.gc.run())
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
    rules = SchedulerConfig(find_policy(settings.policy), settings.slots_per_gpu, settings.conditions.conditions())
    registry = CollectorRegistry()
    telemetry = ExtenderMetrics(registry, clock)
    standing = GpuAvailability(clock)
    informers = Informers(api, clock, ClusterCache(settings.slots_per_gpu, standing))
    registry.register(StateCollector(informers))
    workloads = Workloads(
        api, informers, JobOptions(settings.job_policies, settings.count_peaks), sealer_of(settings.prediction_key)
    )
    writer = ReservationWriter(api, informers, clock, sleep, gather_s)
    events = EventRecorder(api, clock, COMPONENT)
    tools = BindDeps(api, clock, sleep, events, telemetry, standing)
    evaluation_cache = EvaluationCache(informers.cluster, rules)
    gangs = Gangs(informers, evaluation_cache, rules)
    restorer = Restorer(api, informers, writer, events, settings.slots_per_gpu)
    gc = ReservationGC(api, informers, writer, restorer, clock=clock, sleep=sleep)
    keeper = Keeper(
        Line(settings.queue_order, informers.cluster, clock),
        informers,
        standing,
        evaluation_cache=evaluation_cache,
        gangs=gangs,
        clock=clock,
        sleep=sleep,
        telemetry=telemetry,
        remind=gc.remind,
    )
    binder = Binder(
        tools,
        informers,
        workloads,
        writer,
        evaluation_cache=evaluation_cache,
        gangs=gangs,
        keeper=keeper,
        slots=settings.slots_per_gpu,
        timeout_s=settings.bind_timeout_seconds,
    )
    gc.leave_alone(binder.open)
    settler = PeakUpdater(informers, writer, PeakTracker(clock)) if settings.count_peaks else None
    service = Service(
        informers,
        workloads,
        binder,
        evaluation_cache=evaluation_cache,
        gangs=gangs,
        keeper=keeper,
        connections=Connections(sleep, held_s),
        terminating_pods=TerminatingPods(informers, rules, clock, sleep),
        telemetry=telemetry,
        candidates=settings.candidates,
    )
    app = create_app(service, telemetry, informers.not_ready)
    return Extender(app, service, informers, gc, binder, settler, keeper, registry)
