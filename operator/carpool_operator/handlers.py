"""kopf's part: it watches the jobs, logs in, and ends the process well on SIGTERM.

Pods and GpuNodes come through the core's reflector instead. kopf keeps no cache, hands over whole objects as
dictionaries, and after an expired watch (410) lists again without telling what was deleted meanwhile: a running job
whose pod disappeared just then would wait for ever. A job whose deletion goes unheard does no harm: nothing can be
written to it, and when kopf lists again the operator sweeps out what is gone. Jobs have neither finalizers nor kopf's
annotations, because nothing but `on.event` is used; the prefixes are set all the same, so that a later handler leaves
no foreign names in objects.
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


class Pauses:
    """Pauses of a call that the API server does not answer, or answers with 5xx, 403 or 429, in seconds.

    Without end: after the last of a finite sequence kopf gives up, and the process with it, while it could go on with
    what it knows. Each call begins anew. kopf's own grow to 21 s, for which new jobs would wait afterwards.
    """

    def __init__(self, *first_s: float, then_s: float) -> None:
        self._first_s, self._then_s = first_s, then_s

    def __iter__(self) -> Iterator[float]:
        return chain(self._first_s, repeat(self._then_s))


_RETRIES_S = Pauses(0.5, 1, 2, 3, then_s=5)

_WORKER_LIMIT = 32
_WORKER_IDLE_S = 0.05
"""kopf counts a worker that idles after its last event against the limit: idling for its five seconds, 32 workers would
let through six jobs a second."""


class NoDiffs(kopf.DiffBaseStorage):
    """Keeps nothing to compare jobs with. kopf would copy each job of each event twice, for handlers that we lack."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Say that nothing of a job is compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        """Find nothing of earlier."""

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def kopf_settings(pauses_s: Pauses = _RETRIES_S) -> kopf.OperatorSettings:
    """Configure kopf: alone, silent in the cluster, ours in every name that it could write."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.queueing.worker_limit = _WORKER_LIMIT
    settings.queueing.idle_timeout = _WORKER_IDLE_S
    settings.watching.chunk_size = 500
    settings.networking.error_backoffs = pauses_s
    settings.persistence.finalizer = keys.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=keys.DOMAIN)
    settings.persistence.diffbase_storage = NoDiffs()
    return settings


def hear(operator: Operator, event: kopf.RawEvent) -> None:
    """Pass on what kopf's watch tells of a job; one that does not fit our types is told of, and left as it is."""
    try:
        job = msgspec.convert(dict(event["object"]), GpuTrainingJob)
    except msgspec.ValidationError as error:
        metadata = event["object"].get("metadata", {})
        where = f"{metadata.get('namespace')}/{metadata.get('name')}"
        structlog.get_logger().error("malformed job skipped", job=where, error=str(error))
        return
    if event["type"] is None:
        operator.job_listed(job)
    else:
        operator.job_changed(job, is_deleted=event["type"] == "DELETED")


def session_for(endpoint: Endpoint, clock: Clock) -> kopf.AiohttpSession:
    """Log in as the rest of the process does. kopf calls again, and so reads the token again, when it is refused."""
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
    """Register what kopf calls. `stop` is kopf's stop flag."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(id="login", registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return session_for(await asyncio.to_thread(load_endpoint, kube), clock)

    @kopf.on.event(
        GPU_TRAINING_JOBS.group, GPU_TRAINING_JOBS.version, GPU_TRAINING_JOBS.plural, id="job", registry=registry
    )
    async def job_changed(event: kopf.RawEvent, **_: Any) -> None:
        hear(operator, event)

    @kopf.on.cleanup(id="stop", registry=registry)
    async def stopping(**_: Any) -> None:
        # After a signal kopf leaves its own waiter for this flag behind, and then waits five seconds for it to end.
        stop.set()

    return registry
