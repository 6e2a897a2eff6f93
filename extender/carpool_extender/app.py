"""The composition root: every object of the process is built here, in tests too."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from socket import gethostname
from typing import Any

from carpool_core.clock import Clock, ServerClock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.leader import LeaseWatcher
from carpool_core.values import PodUid
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from carpool_extender.cache.cluster import ClusterCache, GpuBackoff
from carpool_extender.cache.peaks import PeakTracker
from carpool_extender.certificates import Certificates
from carpool_extender.framework.selection import EvaluationCache
from carpool_extender.informers import Informers
from carpool_extender.metrics import ExtenderMetrics, StateCollector
from carpool_extender.queue.admission import AdmissionController
from carpool_extender.queue.scheduling_queue import SchedulingQueue
from carpool_extender.reservations.binder import BindDeps, Binder, InFlightBind
from carpool_extender.reservations.gc import ReservationGC, Restorer
from carpool_extender.reservations.peaks import PeakUpdater
from carpool_extender.reservations.writer import GATHER_S, ReservationWriter
from carpool_extender.scheduler import Scheduler
from carpool_extender.server import create_app
from carpool_extender.settings import ExtenderSettings, parse_tenancy_groups
from carpool_extender.workloads import JobOptions, Workloads

COMPONENT = "carpool-extender"


@dataclass(frozen=True, slots=True)
class Extender:
    """The parts of a running extender."""

    service: Scheduler
    informers: Informers
    gc: ReservationGC
    binder: Binder
    peak_updater: PeakUpdater | None
    leadership: LeaseWatcher
    admission: AdmissionController
    certificates: Certificates
    metrics: ExtenderMetrics
    registry: CollectorRegistry

    def not_ready(self) -> str | None:
        """Return why kube-scheduler gets no answers, or will get none without a person's help; None otherwise."""
        return self.informers.not_ready() or self.certificates.problem()

    def app(self) -> FastAPI:
        """Return the HTTP application that answers kube-scheduler."""
        return create_app(self.service, self.metrics, self.informers.not_ready)

    async def run(self) -> None:
        """Watch and sweep until cancelled; the caller serves `app()`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.informers.run())
            group.create_task(self.gc.run())
            group.create_task(self.admission.run())
            group.create_task(self.leadership.run())
            if self.peak_updater is not None:
                group.create_task(self.peak_updater.run())


def build(
    settings: ExtenderSettings,
    api: KubeApi,
    clock: Clock,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    *,
    gather_s: float = GATHER_S,
) -> Extender:
    """Put the process together.

    Raises:
        UnknownPolicyError: The policy's name is not in the table.
        SettingsError: The text of the tenancy groups is invalid.
    """
    certificates = Certificates(settings.tls, clock, sleep)
    clock = ServerClock(clock, api)  # deadlines must mean the same to every extender
    rules = settings.scheduler_config()
    registry = CollectorRegistry()
    telemetry = ExtenderMetrics(registry, clock)
    backoff = GpuBackoff(clock)
    informers = Informers(api, clock, ClusterCache(settings.slots_per_gpu, backoff))
    groups = parse_tenancy_groups(settings.tenancy_groups)
    options = JobOptions(settings.job_policies, settings.count_peaks, groups)
    workloads = Workloads(api, informers, options)
    writer = ReservationWriter(api, informers, sleep, gather_s)
    events = EventRecorder(api, clock, COMPONENT)
    tools = BindDeps(api, clock, sleep, events, telemetry, backoff)
    evaluation_cache = EvaluationCache(informers.cluster, rules)
    restorer = Restorer(api, informers, writer, events, settings.slots_per_gpu)
    leadership = LeaseWatcher(api, clock, settings.scheduler_lease, settings.scheduler_host or gethostname())
    in_flight: dict[PodUid, InFlightBind] = {}
    gc = ReservationGC(
        api, informers, writer, restorer, in_flight=in_flight, leads=leadership.leads, clock=clock, sleep=sleep
    )
    queue = SchedulingQueue(
        informers.cluster,
        evaluation_cache,
        order=settings.queue_order,
        default_duration_s=settings.default_duration_seconds,
        holders=informers.workers_with_reservation,
    )
    registry.register(StateCollector(informers, queue.reasons, lambda: gc.orphaned))
    registry.register(certificates)
    admission = AdmissionController(
        api,
        informers,
        workloads,
        queue,
        evaluations=evaluation_cache,
        in_flight=in_flight,
        leadership=leadership,
        timeout_s=settings.admission_timeout_seconds,
        autoscaling=settings.autoscaling,
        clock=clock,
        sleep=sleep,
        metrics=telemetry,
    )
    binder = Binder(
        tools,
        informers,
        workloads,
        writer,
        evaluation_cache=evaluation_cache,
        in_flight=in_flight,
        forget_claim=admission.forget_claim,
        slots=settings.slots_per_gpu,
        timeout_s=settings.bind_timeout_seconds,
    )
    peak_updater = None
    if settings.count_peaks:
        peak_updater = PeakUpdater(informers.cluster, writer, PeakTracker(clock), leadership.leads, sleep)
    service = Scheduler(
        informers,
        workloads,
        admission,
        binder,
        evaluation_cache=evaluation_cache,
        candidates=settings.candidates,
    )
    return Extender(
        service, informers, gc, binder, peak_updater, leadership, admission, certificates, telemetry, registry
    )
