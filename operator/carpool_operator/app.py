"""The operator as a whole: what it hears, the queue between, what it does. Tests build it as `__main__` does."""

import asyncio
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
import structlog
from carpool_core.clock import Clock
from carpool_core.keys import LABEL_JOB
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi, Selector
from carpool_core.kube.errors import KubeError
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.values import JobUid
from carpool_predictor.calibration.store import CalibrationMap
from carpool_predictor.predict import model_version
from carpool_predictor.tracing.source import Tracer, input_digest

from carpool_operator.actions import Predict
from carpool_operator.calibrator import Learner
from carpool_operator.expectations import Recollection
from carpool_operator.informers import Fleet, Jobs, News, Pods, Sweeps, key_of, version_of
from carpool_operator.learning import peak_of, sample_of
from carpool_operator.metrics import Metrics
from carpool_operator.observations import Knowledge
from carpool_operator.performer import Performer, Superseded
from carpool_operator.placement import without_reservation
from carpool_operator.prediction import products_of
from carpool_operator.prediction_worker import Learned, Marks, Predictions
from carpool_operator.reconcile import reconcile
from carpool_operator.settings import OperatorSettings
from carpool_operator.snapshot import Snapshot
from carpool_operator.work_queue import WorkQueue

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 60.0


class Operator:
    """Hears of jobs, pods and GpuNodes; looks at each job that something happened to."""

    def __init__(self, settings: OperatorSettings, api: KubeApi, clock: Clock, tracer: Tracer) -> None:
        self._settings, self._api, self._clock = settings, api, clock
        self.queue = WorkQueue(clock)
        self.jobs = Jobs(self.queue.add)
        news = News(self.queue)
        self.pods = Pods(self.queue.add, news.of_pod)
        self.fleet = Fleet(self.queue.add, news.of_pod, news.of_gpus, self.pods, self.jobs)
        self.metrics = Metrics(version("carpool"), lambda: self.jobs, lambda: self.learner.calibration)
        place = settings.calibration_place
        self.predictions = Predictions(
            tracer,
            clock,
            wake=self.queue.add,
            took=self.metrics.prediction_seconds.observe,
            traces_at_once=settings.traces,
            learned=Learned(
                calibration=lambda: self.learner.usable,
                marks=lambda *asked: self.learner.marks(*asked),
                is_strict=place is not None and not settings.share_unmeasured,
            ),
        )
        events = EventRecorder(api, clock, "carpool-operator")
        self.learner = Learner(
            None if place is None else CalibrationMap(api, *place),
            asked=self.predictions.asked,
            wake=self.queue.add,
            simulated=lambda: self.fleet.simulated,
            events=events,
        )
        self._recollection = Recollection()
        self._performer = Performer(
            api,
            clock,
            events=events,
            jobs=self.jobs,
            recollection=self._recollection,
            predictions=self.predictions,
            learner=self.learner,
        )
        self.pod_reflectors = [
            Reflector(
                api,
                PODS,
                Pod,
                selector=Selector(namespace=namespace, labels=LABEL_JOB),
                clock=clock,
                on_change=self.pod_changed,
            )
            for namespace in settings.namespace_list or ("",)
        ]
        self.node_reflector = Reflector(api, GPU_NODES, GpuNode, clock=clock, on_change=self.fleet.changed)
        self._failures: dict[str, int] = {}
        self._sweeps = Sweeps(self.sweep)
        self._log = structlog.get_logger()

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Take note of a pod."""
        self._recollection.pod_changed(old, new)
        self.pods.changed(old, new)

    def job_changed(self, job: GpuTrainingJob, *, is_deleted: bool) -> None:
        """Take note of a job."""
        if is_deleted:
            self.jobs.remove(key_of(job), job.metadata.uid)
        else:
            self.jobs.put(job)

    def job_listed(self, job: GpuTrainingJob) -> None:
        """Take note of a job that kopf listed; a list in mid-life means that its watch had lost some events."""
        if self.jobs.get(key_of(job)) is not None:
            self._sweeps.ask()
        self.jobs.put(job)

    @property
    def is_sweep_wanted(self) -> bool:
        """Whether a sweep is due."""
        return self._sweeps.is_wanted

    def unready(self) -> str | None:
        """Say why the operator is not at work yet; None where it is."""
        if not all(reflector.store.synced for reflector in self.pod_reflectors):
            return "the pods are not listed yet"
        if not self.node_reflector.store.synced:
            return "the GpuNodes are not listed yet"
        return None

    def snapshot(self, job: GpuTrainingJob) -> Snapshot:
        """Gather what a look at a job needs."""
        now = self._clock.monotonic()
        key, pods = key_of(job), self.pods.of(JobUid(job.metadata.uid))
        names = sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})
        nodes = tuple(node for name in names if (node := self.fleet.get(name)) is not None)
        unreserved = without_reservation(JobUid(job.metadata.uid), pods, nodes)
        digest = input_digest(job.spec.model, job.spec.training)
        products = products_of(job, self.fleet.products)
        marks = self.predictions.marks(job.spec, digest, products)
        recorded = job.status.attempts[-1].pod_uids if job.status.attempts else ()
        return Snapshot(
            job=job,
            now=self._clock.now(),
            digest=digest,
            products=products,
            prediction=self.predictions.get(key, digest, products, marks),
            model_version=model_version(),
            retry_in_s=self.predictions.retry_in(digest),
            traces_ahead=self.predictions.ahead(digest),
            pods=pods,
            made=self._recollection.made(key, recorded),
            created=self._recollection.created(key, now) - {pod.metadata.name for pod in pods},
            is_template_checked=self._recollection.is_checked(key, version_of(job)),
            refusal=self._recollection.refusal(key, now),
            unreserved_s=self._recollection.unreserved(key, unreserved, now),
            nodes=nodes,
            inventory=self.fleet.inventory,
            backoff=self._settings.backoff,
            knowledge=self._knowledge(job, key, pods, nodes, marks, now) if self.learner.is_on else Knowledge(),
        )

    def _knowledge(
        self, job: GpuTrainingJob, key: str, pods: Sequence[Pod], nodes: Sequence[GpuNode], marks: Marks, now: float
    ) -> Knowledge:
        latest = job.status.attempts[-1:]
        samples = [sample_of(job, attempt) for attempt in latest]
        peak = max([peak_of(pods, nodes), *(attempt.peak_memory_mib for attempt in latest)])
        return Knowledge(
            is_on=True,
            learned=frozenset(sample for sample in samples if self.learner.has_learned(sample)),
            steady_s=self._recollection.steady_for(key, (samples, peak), now),
            marks=marks,
        )

    async def look(self, key: str) -> None:
        """Look at one job and do what has to be done."""
        job = self.jobs.get(key)
        if job is None:
            self._recollection.forget(key)
            self.predictions.forget(key)
            self.queue.forget(key)
            self._failures.pop(key, None)
            return
        decision = reconcile(self.snapshot(job))
        if decision.requeue_after_s is not None:
            self.queue.add_after(key, decision.requeue_after_s)
        await self._performer.perform(job, decision)
        if not any(isinstance(action, Predict) for action in decision.actions):
            self.predictions.forget(key)

    async def look_safely(self, key: str) -> None:
        """Look at one job; where that fails, look again later, and at the others meanwhile."""
        began = self._clock.monotonic()
        try:
            await self.look(key)
        except Superseded as why:
            self._log.debug("decision superseded", job=key, why=str(why))
            result = "superseded"
            self.queue.add(key)
        except KubeError as error:
            result = "retry"
            self._log.warning("look failed", job=key, error=str(error), retry_in_s=self._retry(key))
        except Exception:
            result = "error"
            self._log.exception("look failed", job=key, retry_in_s=self._retry(key))
        else:
            result = "ok"
            self._failures.pop(key, None)
        self.metrics.reconcile_total.labels(result).inc()
        self.metrics.reconcile_seconds.observe(self._clock.monotonic() - began)

    def _retry(self, key: str) -> float:
        """Have a job looked at again after a failure; return the seconds until then."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = float(min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** min(failures, 10)))
        self.queue.add_after(key, delay_s)
        return delay_s

    async def sweep(self) -> None:
        """List all jobs, to hear of what kopf's watch missed: it tells nothing of deletions that it slept through."""
        before = {job.metadata.uid: key_of(job) for job in self.jobs}
        for namespace in self._settings.namespace_list or ("",):
            token = ""
            while True:
                page = await self._api.list_page(GPU_TRAINING_JOBS, Selector(namespace=namespace), continue_token=token)
                for raw in page.items:
                    before.pop(self._listed(raw), None)
                token = page.continue_token
                if not token:
                    break
        for uid, key in before.items():
            self.jobs.remove(key, uid)

    def _listed(self, raw: msgspec.Raw) -> str:
        """Take note of a listed job; return its UID."""
        try:
            job = msgspec.json.decode(raw, type=GpuTrainingJob)
        except msgspec.ValidationError as error:
            self._log.error("malformed job skipped", error=str(error))
            return msgspec.json.decode(raw, type=_Nameplate).metadata.uid
        self.jobs.put(job)
        return job.metadata.uid

    async def run(self, started: asyncio.Event | None = None) -> None:
        """Work for ever.

        Args:
            started: Set once every task of the operator exists, so that who stops tasks can tell them from others.
        """
        await self.learner.load()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.learner.run(), name="learner")
            for reflector in self.pod_reflectors:
                group.create_task(reflector.run(), name="pods")
            group.create_task(self.node_reflector.run(), name="gpunodes")
            group.create_task(self._sweeps.run(), name="sweep")
            for number in range(self._settings.workers):
                group.create_task(self._work(), name=f"worker {number}")
            if started is not None:
                started.set()

    async def close(self) -> None:
        """Let go of what runs in the background."""
        await self.predictions.close()
        self.learner.close()

    async def _work(self) -> None:
        for reflector in self.pod_reflectors:
            await reflector.wait_synced()
        await self.node_reflector.wait_synced()
        while True:
            key = await self.queue.take()
            try:
                await self.look_safely(key)
            finally:
                self.queue.done(key)


class _Meta(msgspec.Struct, frozen=True):
    uid: str = ""


class _Nameplate(msgspec.Struct, frozen=True):
    metadata: _Meta = _Meta()


def build(settings: OperatorSettings, api: KubeApi, clock: Clock, tracer: Tracer) -> Operator:
    """Build the operator from its ports."""
    return Operator(settings, api, clock, tracer)
