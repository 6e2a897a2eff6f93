"""The Binding that puts a pod on its node: written, and looked for where the answer leaves open what became of it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from carpool_core.clock import Clock, parse_rfc3339
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MEMORY, ANNOTATION_MODE, ANNOTATION_REASON
from carpool_core.kube.api import PODS, KubeApi
from carpool_core.kube.errors import Conflict, KubeError, NotFound, Refused, Retryable, Unreachable
from carpool_core.kube.events import EventRecorder
from carpool_core.kube.pods import Pod
from carpool_core.resources.node import Reservation

from carpool_extender.kube.wire import BindingArgs
from carpool_extender.state.standing import Standing
from carpool_extender.telemetry import Telemetry

TRIES = 3
PAUSE_S = 0.2
LATE_S = 5.0
"""How long after its deadline a Binding may still be on its way; less than the janitor's grace."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tools:
    """What binding needs of the world."""

    api: KubeApi
    clock: Clock
    sleep: Callable[[float], Awaitable[Any]]
    events: EventRecorder
    telemetry: Telemetry
    standing: Standing


class BindError(Exception):
    """The pod was not bound, or nobody knows; whatever is reserved stays until its deadline. `str()` says why."""


class AbandonedError(BindError):
    """The pod was certainly not bound, so its reservation is given back."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def named(args: BindingArgs) -> str:
    """Name a pod for people."""
    return f"pod {args.pod_namespace}/{args.pod_name}"


def check_unbound(pod: Pod, args: BindingArgs) -> None:
    """See that a pod can still be bound.

    Raises:
        BindError: It cannot.
    """
    if pod.spec.node_name:
        raise BindError(f"{named(args)} is bound to node {pod.spec.node_name}, so it cannot be bound to {args.node}")
    if pod.is_finished or pod.metadata.deletion_timestamp is not None:
        raise BindError(f"{named(args)} has finished or is being deleted, so it is not bound")


async def in_time(work: Awaitable[T], limit_s: float, sleep: Callable[[float], Awaitable[Any]]) -> T:
    """Wait for some work so long and no longer.

    Args:
        work: What is waited for; it is cancelled where it takes too long.
        limit_s: Seconds that it may take.
        sleep: Tells when they are over.

    Raises:
        TimeoutError: It took longer.
    """
    working = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(sleep(max(0.0, limit_s)))
    try:
        await asyncio.wait({working, timer}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        timer.cancel()
    raise TimeoutError(f"expected an answer within {limit_s:.0f} s, found none")


def binding_of(reserved: Reservation, node: str) -> dict[str, Any]:
    """Build the Binding of a reservation's pod, with annotations for people and for runtimes without CDI.

    Its UID is a precondition. The API server merges the annotations into the pod in the same write as `nodeName`.
    Nothing of ours trusts them.
    """
    annotations = {
        ANNOTATION_GPUS: ",".join(reserved.gpu_uuids),
        ANNOTATION_MODE: reserved.mode.value,
        ANNOTATION_REASON: reserved.reason,
    }
    if reserved.memory_limit_mib is not None:
        annotations[ANNOTATION_MEMORY] = str(reserved.memory_limit_mib)
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": reserved.pod_name,
            "namespace": reserved.pod_namespace,
            "uid": reserved.pod_uid,
            "annotations": annotations,
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


class Poster:
    """Writes Bindings.

    Args:
        api: The Kubernetes API.
        clock: Tells whether a reservation may still be bound.
        sleep: Waits between tries.
    """

    def __init__(self, api: KubeApi, clock: Clock, sleep: Callable[[float], Awaitable[Any]]) -> None:
        self._api, self._clock, self._sleep = api, clock, sleep
        self._log = structlog.get_logger()

    def seconds_left(self, reserved: Reservation) -> float:
        """Return how long a reservation lives still."""
        return (parse_rfc3339(reserved.deadline) - self._clock.now()).total_seconds()

    async def post(self, args: BindingArgs, reserved: Reservation) -> None:
        """Bind; where the answer leaves it open, read the pod.

        Raises:
            AbandonedError: The pod was not bound.
            BindError: Whether it was is not known.
        """
        for attempt in range(TRIES):
            if self.seconds_left(reserved) < -LATE_S:
                # Other extenders may release the reservation from now on, so the pod must not be bound on it.
                break
            definite = await self._try(args, reserved)
            if definite is None or await self._is_bound(args):
                return
            if isinstance(definite, Refused | Conflict) and attempt == 0:
                raise AbandonedError("BindingRefused", f"{named(args)} was not bound: {definite}") from definite
            if isinstance(definite, Refused | Conflict):
                break
            await self._sleep(PAUSE_S * 2**attempt)
        raise BindError(
            f"whether {named(args)} was bound to node {args.node} is not known, because the API server did not answer "
            f"in time; its reservation stays until {reserved.deadline}"
        )

    async def _try(self, args: BindingArgs, reserved: Reservation) -> KubeError | None:
        """Write the Binding once; return what came of it instead.

        Nothing is waited for beyond the time in which the reservation surely stands: the call itself may take longer.
        """
        body = binding_of(reserved, args.node)
        call = self._api.create(PODS, body, namespace=args.pod_namespace, name=args.pod_name, subresource="binding")
        try:
            await in_time(call, self.seconds_left(reserved) + LATE_S, self._sleep)
        except (Conflict, Refused) as error:
            return error
        except TimeoutError as error:
            self._log.warning("binding unanswered", pod=named(args), error=str(error))
            return Unreachable(str(error))
        except Retryable as error:
            self._log.warning("binding unanswered", pod=named(args), error=str(error))
            return error
        return None

    async def read(self, args: BindingArgs) -> Pod:
        """Read the pod from the server.

        Raises:
            AbandonedError: It is gone, or another one has its name.
            KubeError: It could not be read.
        """
        try:
            pod = await self._api.get(PODS, args.pod_name, Pod, namespace=args.pod_namespace)
        except NotFound as error:
            raise AbandonedError("PodGone", f"{named(args)} no longer exists") from error
        if pod.metadata.uid != args.pod_uid:
            raise AbandonedError("PodGone", f"{named(args)} has UID {pod.metadata.uid} now, not {args.pod_uid}")
        return pod

    async def _is_bound(self, args: BindingArgs) -> bool:
        """Read whether the pod is bound as decided. Raises AbandonedError where it never can be: gone, or elsewhere."""
        try:
            pod = await self.read(args)
        except Retryable:
            return False
        if pod.spec.node_name not in ("", args.node):
            raise AbandonedError("BoundElsewhere", f"{named(args)} is bound to node {pod.spec.node_name} already")
        return pod.spec.node_name == args.node
