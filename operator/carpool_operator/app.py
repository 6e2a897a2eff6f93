"""Composition root of the operator: caches, work queue, reconciliation, performer. Tests build it with fakes."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import structlog
from carpool_core.clock import Clock, ServerClock
from carpool_core.keys import ANOMALIES, SCHEDULER_NAME
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi, Selector
from carpool_core.kube.errors import KubeError
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.products import hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobUid, WhenSlowed
from carpool_predictor.calibration.colocation import solo_name
from carpool_predictor.calibration.store import CalibrationStore
from carpool_predictor.predict import model_version
from carpool_predictor.tracing.source import Tracer, input_digest

from carpool_operator.actions import CreatePod, Predict
from carpool_operator.anomalies import candidates, measurements
from carpool_operator.attempts import Backoff
from carpool_operator.calibrator import Calibrator
from carpool_operator.expectations import Expectations
from carpool_operator.informers import JobCache, NodeCache, PodCache
from carpool_operator.metrics import Metrics
from carpool_operator.moves import slowdowns
from carpool_operator.observations import peak_of, sample_of
from carpool_operator.performer import Performer, Superseded
from carpool_operator.placement import pods_without_reservation
from carpool_operator.pods import key_of, key_of_pod
from carpool_operator.prediction import known_products, products_of
from carpool_operator.prediction_worker import PredictionWorker
from carpool_operator.reconcile import reconcile
from carpool_operator.settings import OperatorSettings
from carpool_operator.snapshot import CalibrationState, Snapshot
from carpool_operator.work_queue import WorkQueue

_RETRY = Backoff(first_s=0.5, most_s=60.0)
"""Pauses after a reconciliation that failed."""


class Operator:
    """Caches jobs, pods and GpuNodes, and reconciles each job that an event concerns."""

    def __init__(
        self,
        settings: OperatorSettings,
        api: KubeApi,
        clock: Clock,
        tracer: Tracer,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        clock = ServerClock(clock, api)  # deadlines count from times that the API server wrote
        self._settings, self._api, self._clock, self._sleep = settings, api, clock, sleep
        self.queue = WorkQueue(clock)
        self.jobs = JobCache(self.queue)
        self.pods = PodCache(self.queue)
        self.nodes = NodeCache(self.queue, self.pods, self.jobs)
        self.metrics = Metrics(version("carpool"), lambda: self.jobs, lambda: self.calibrator.calibration)
        place = settings.calibration_place
        self.predictions = PredictionWorker(
            tracer,
            clock,
            enqueue=self.queue.add,
            observe_seconds=self.metrics.prediction_seconds.observe,
            traces=settings.traces,
            calibration=lambda *of: self.calibrator.usable(*of),
            calibration_keys=lambda *job: self.calibrator.keys(*job),
            find_products=lambda names: known_products(names, self.nodes.described),
            is_strict=place is not None and not settings.share_unmeasured,
        )
        events = EventRecorder(api, clock, "carpool-operator")
        self.calibrator = Calibrator(
            None if place is None else CalibrationStore(api, *place),
            clock,
            prepare=self.predictions.prepare,
            enqueue=self.queue.add,
            simulated=lambda: self.nodes.simulated,
            find_products=lambda names: known_products(names, self.nodes.described),
            events=events,
        )
        self._expectations = Expectations()
        self._performer = Performer(
            api,
            clock,
            events=events,
            jobs=self.jobs,
            expectations=self._expectations,
            predictions=self.predictions,
            calibrator=self.calibrator,
            on_status=self.metrics.status_written,
        )
        self._reflectors: list[Reflector[Any]] = [
            Reflector(api, GPU_NODES, GpuNode, clock=clock, on_change=self.nodes.changed, sleep=sleep)
        ]
        for namespace in settings.namespace_list or ("",):
            jobs = Selector(namespace=namespace)
            pods = Selector(namespace=namespace, fields=f"spec.schedulerName={SCHEDULER_NAME}")
            self._reflectors += [
                Reflector(
                    api,
                    GPU_TRAINING_JOBS,
                    GpuTrainingJob,
                    selector=jobs,
                    clock=clock,
                    on_change=self.jobs.changed,
                    share=self.jobs.share,
                    sleep=sleep,
                ),
                Reflector(api, PODS, Pod, selector=pods, clock=clock, on_change=self.pod_changed, sleep=sleep),
            ]
        self._reconciled: dict[str, str] = {}
        """UID of the job that was last reconciled, by key."""
        self._failures: dict[str, int] = {}
        self._log = structlog.get_logger()

    # Events

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Handle an event of a pod."""
        self._expectations.pod_changed(old, new)
        if old is not None and new is None and (job := self.jobs.get(key_of_pod(old) or "")) is not None:
            self._expectations.retry_creation(job.metadata.uid)  # the pod's name is free again
        self.pods.changed(old, new)

    def unready(self) -> str | None:
        """Return why the operator does not reconcile yet; None if it does."""
        missing = (r.kind.kind for r in self._reflectors if not r.store.synced)
        return next((f"the {kind}s are not listed yet" for kind in missing), None)

    # Reconciliation

    async def reconcile(self, key: str) -> None:
        """Reconcile one job: take a snapshot, decide, perform."""
        job = self.jobs.get(key)
        known = self._reconciled.get(key)
        if known is not None and (job is None or job.metadata.uid != known):
            self._forget(key, known)
        if job is None:
            return
        self._reconciled[key] = job.metadata.uid
        decision = reconcile(self.snapshot(job))
        if decision.requeue_after_s is not None:
            self.queue.add_after(key, decision.requeue_after_s)
        await self._performer.perform(job, decision)
        if job.spec.workers > 1 and any(isinstance(action, CreatePod) for action in decision.actions):
            self.queue.add(key)  # the status records the UIDs at once: no other process serves a pod before that
        if not any(isinstance(action, Predict) for action in decision.actions):
            self.predictions.forget(key)

    def _forget(self, key: str, uid: str) -> None:
        """Forget a job that is gone; another one may have its name."""
        self._expectations.forget(uid)
        self._reconciled.pop(key, None)
        self.predictions.forget(key)
        self.queue.forget(key)
        self._failures.pop(key, None)

    def snapshot(self, job: GpuTrainingJob) -> Snapshot:
        """Return everything that the reconciliation of a job reads."""
        now = self._clock.monotonic()
        key, uid = key_of(job), JobUid(job.metadata.uid)
        pods = self.pods.of(key)
        names = sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})
        nodes = tuple(node for name in names if (node := self.nodes.get(name)) is not None)
        digest = input_digest(job.spec.model, job.spec.training)
        products = products_of(job, self.nodes.products)
        keys = self.predictions.calibration_keys(key, job.spec, digest, products)
        calibration = CalibrationState()
        if self.calibrator.is_on:
            latest = job.status.attempts[-1:]
            samples = [sample_of(job, attempt) for attempt in latest]
            peak = max([peak_of(pods, nodes), *(attempt.peak_memory_mib for attempt in latest)])
            product = next((hardware_name(place.product) for place in job.status.placement), "")
            solo = solo_name(digest, job.spec.workers, job.spec.gpus_per_worker)
            calibration = CalibrationState(
                is_on=True,
                solo_step_s=self.calibrator.solo_step_s(job.metadata.namespace, solo, product) if product else None,
                learned=frozenset(sample for sample in samples if self.calibrator.has_learned(sample)),
                peak_stable_s=self._expectations.unchanged_s(uid, "peak", (samples, peak), now),
                keys=keys,
            )
        workers = measurements(pods, nodes)
        likeliest = {type_: candidates(workers, type_, is_new=True) for type_ in ANOMALIES}
        lags_s = {
            type_: self._expectations.unchanged_s(uid, type_, found[0][0] if found else None, now)
            for type_, found in likeliest.items()
        }
        unreserved = pods_without_reservation(uid, pods, nodes)
        return Snapshot(
            job=job,
            now=self._clock.now(),
            digest=digest,
            products=products,
            prediction=self.predictions.get(key, digest, products, keys),
            model_version=model_version(),
            retry_in_s=self.predictions.retry_in_s(digest),
            traces_ahead=self.predictions.ahead(key, digest),
            trace_waited_s=self.predictions.trace_waited_s(key),
            pods=pods,
            created=self._expectations.created(uid),
            expected=self._expectations.expected(uid, now) - {pod.metadata.name for pod in pods},
            is_template_checked=self._expectations.is_checked(uid, job.metadata.generation),
            refusal=self._expectations.refusal(uid, now),
            warnings=self._expectations.warnings(uid),
            unreserved_s=self._expectations.unreserved_s(uid, unreserved, now),
            nodes=nodes,
            inventory=self.nodes.inventory,
            backoff=self._settings.backoff,
            autoscaling=self._settings.autoscaling,
            calibration=calibration,
            slowdowns={} if job.spec.sharing.when_slowed is WhenSlowed.STAY else slowdowns(nodes, self.jobs.get),
            lags_s=lags_s,
        )

    async def process(self, key: str) -> None:
        """Reconcile one job; after a failure, requeue it with a growing delay."""
        began = self._clock.monotonic()
        try:
            await self.reconcile(key)
        except Superseded as why:
            self._log.debug("decision superseded", job=key, why=str(why))
            result = "superseded"
            self.queue.add(key)
        except KubeError as error:
            result = "retry"
            self._log.warning("reconciliation failed", job=key, error=str(error), retry_in_s=self._retry(key))
        except Exception:
            result = "error"
            self._log.exception("reconciliation failed", job=key, retry_in_s=self._retry(key))
        else:
            result = "ok"
            self._failures.pop(key, None)
        self.metrics.reconcile_total.labels(result).inc()
        self.metrics.reconcile_seconds.observe(self._clock.monotonic() - began)

    def _retry(self, key: str) -> float:
        """Requeue a job after a failure; return the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = _RETRY.after(self._failures[key])
        self.queue.add_after(key, delay_s)
        return delay_s

    # The process

    async def run(self) -> None:
        """Run until cancelled."""
        await self.calibrator.load()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.calibrator.run(self._sleep), name="calibrator")
            for reflector in self._reflectors:
                group.create_task(reflector.run(), name=reflector.kind.plural)
            for number in range(self._settings.workers):
                group.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        for reflector in self._reflectors:
            await reflector.wait_synced()
        while True:
            key = await self.queue.take()
            try:
                await self.process(key)
            finally:
                self.queue.done(key)

    async def close(self) -> None:
        """Stop what runs in the background."""
        await self.predictions.close()
        self.calibrator.close()
