"""kopf's handlers: kopf watches the jobs, logs in, and ends the process on SIGTERM.

Pods and GpuNodes come through the core's reflector. kopf keeps no cache, and after an expired watch (410) it lists
again without reporting deletions, so a running job would never notice the loss of its pod. A lost deletion of a job
does no harm: nothing can be written to the job, and each relist requests a resync. Only `on.event` is used, so jobs get
neither finalizers nor kopf's annotations.
"""

import asyncio
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import aiohttp
import kopf
import msgspec
import structlog
from carpool_core import keys
from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_TRAINING_JOBS
from carpool_core.kube.config import Endpoint, load_endpoint
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.settings import KubeSettings

from carpool_operator.app import Operator


class RetryDelays:
    """Endless delays in seconds between tries of a call that the API server answers with 5xx, 403, 429 or not at all.

    kopf gives up after a finite sequence and ends the process. Its own delays grow to 21 s, which new jobs would wait
    after an outage.
    """

    def __init__(self, *first_s: float, then_s: float) -> None:
        self._first_s, self._then_s = first_s, then_s

    def __iter__(self) -> Iterator[float]:
        return chain(self._first_s, repeat(self._then_s))


_RETRY_DELAYS = RetryDelays(0.5, 1, 2, 3, then_s=5)

_WORKER_LIMIT = 32
_WORKER_IDLE_S = 0.05
"""kopf counts idle workers against the limit. With its default of 5 s, 32 workers would handle six jobs a second."""


class NullDiffBase(kopf.DiffBaseStorage):
    """Stores nothing. kopf would copy each job twice per event for handlers that are not used."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        """Return nothing."""

    def store(self, **_: Any) -> None:
        """Store nothing."""


def kopf_settings(retry_delays: RetryDelays = _RETRY_DELAYS) -> kopf.OperatorSettings:
    """Return kopf's settings: no peering, no events, and our prefix in every name that kopf could write."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.queueing.worker_limit = _WORKER_LIMIT
    settings.queueing.idle_timeout = _WORKER_IDLE_S
    settings.watching.chunk_size = 500
    settings.networking.error_backoffs = retry_delays
    settings.persistence.finalizer = keys.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=keys.DOMAIN)
    settings.persistence.diffbase_storage = NullDiffBase()
    return settings


def handle_event(operator: Operator, event: kopf.RawEvent) -> None:
    """Pass a job's event to the operator; log and skip a malformed job."""
    try:
        job = msgspec.convert(dict(event["object"]), GpuTrainingJob)
    except msgspec.ValidationError as error:
        metadata = event["object"].get("metadata", {})
        name = f"{metadata.get('namespace')}/{metadata.get('name')}"
        structlog.get_logger().error("malformed job skipped", job=name, error=str(error))
        return
    if event["type"] is None:
        operator.job_listed(job)
    else:
        operator.job_changed(job, is_deleted=event["type"] == "DELETED")


def session_for(endpoint: Endpoint, clock: Clock) -> kopf.AiohttpSession:
    """Return a session with the process's credentials. kopf requests another, with a new token, after a 401."""
    token = endpoint.token.at(clock.monotonic())
    return kopf.AiohttpSession(
        server=endpoint.server,
        default_namespace=endpoint.namespace,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=endpoint.tls or True),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        ),
    )


def registry_for(operator: Operator, kube: KubeSettings, clock: Clock, stop: asyncio.Event) -> kopf.OperatorRegistry:
    """Return the handlers that kopf calls. `stop` is kopf's stop flag."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(id="login", registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return session_for(await asyncio.to_thread(load_endpoint, kube), clock)

    @kopf.on.event(
        GPU_TRAINING_JOBS.group, GPU_TRAINING_JOBS.version, GPU_TRAINING_JOBS.plural, id="job", registry=registry
    )
    async def job_changed(event: kopf.RawEvent, **_: Any) -> None:
        handle_event(operator, event)

    @kopf.on.cleanup(id="stop", registry=registry)
    async def stopping(**_: Any) -> None:
        # After a signal kopf's own task still waits for this flag, and kopf would wait five seconds for that task.
        stop.set()

    return registry
