"""Leader election by a Lease, with the rules of client-go's `tools/leaderelection`, and watching one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog

from carpool_core.clock import Clock, rfc3339
from carpool_core.kube.api import LEASES, KubeApi, Selector
from carpool_core.kube.errors import Conflict, KubeError, NotFound
from carpool_core.kube.reflector import Reflector
from carpool_core.resources.meta import ObjectMeta

LEASE_S = 12.0
"""Time without a renewal after which another process may take the Lease."""
RENEW_DEADLINE_S = 7.0
"""Time without a successful renewal after which the holder stops; less than `LEASE_S`."""
RETRY_S = 2.0
"""Time between two tries."""
TRY_S = 3.0
"""Longest time of one try: the last ends before the Lease expires."""


class LeadershipLostError(Exception):
    """Another process may lead now."""


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Holder of a Lease, and when it was renewed."""

    holder_identity: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    """A Lease of `coordination.k8s.io`."""

    metadata: ObjectMeta
    spec: LeaseSpec = LeaseSpec()


class LeaderElector:
    """Acquires and renews one Lease.

    A Lease of another holder expires `LEASE_S` after this process saw it change, by its own monotonic clock, so that
    the clocks of two machines need not agree. A restarted process with the same unique identity leads again at once.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        *,
        namespace: str,
        name: str,
        identity: str,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._api, self._clock, self._sleep = api, clock, sleep
        self._namespace, self._name, self._identity = namespace, name, identity
        self._observed, self._observed_at = LeaseSpec(), float("-inf")
        self._renewed_at = float("-inf")
        """Beginning of the last successful try: others count from the arrival of its write, which is later."""
        self._log = structlog.get_logger()

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        holder: str | None = None
        while not await self._renewed():
            if self._observed.holder_identity != holder:
                holder = self._observed.holder_identity
                self._log.info("waits to lead", leader=holder)
            await self._sleep(RETRY_S)
        self._log.info("leads", identity=self._identity)

    async def renew(self) -> None:
        """Renew the Lease until cancelled.

        Raises:
            LeadershipLostError: Another process took it, or it was not renewed for `RENEW_DEADLINE_S`.
        """
        while True:
            await self._sleep(RETRY_S)
            if await self._renewed():
                continue
            if self._observed.holder_identity not in {self._identity, None}:
                raise LeadershipLostError(f"{self._observed.holder_identity} leads now")
            if self._clock.monotonic() - self._renewed_at >= RENEW_DEADLINE_S:
                raise LeadershipLostError(
                    f"the Lease {self._namespace}/{self._name} was not renewed for {RENEW_DEADLINE_S:g} s"
                )

    async def release(self) -> None:
        """Give up the Lease if this process holds it, so that another need not wait until it expires."""
        held: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/spec/holderIdentity", "value": self._identity},
            {"op": "remove", "path": "/spec/holderIdentity"},
        ]
        try:
            await self._api.patch(LEASES, self._name, held, namespace=self._namespace)
        except KubeError as error:
            self._log.warning("the lease was not released", error=str(error))

    async def _renewed(self) -> bool:
        """Acquire or renew the Lease once; return whether this process holds it now."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(TRY_S):
                is_held = await self._write()
        except (KubeError, TimeoutError) as error:
            if not isinstance(error, Conflict):
                self._log.warning("the lease was not renewed", error=str(error) or "no answer")
            return False
        self._renewed_at = began if is_held else self._renewed_at
        return is_held

    async def _write(self) -> bool:
        try:
            lease = await self._api.get(LEASES, self._name, Lease, namespace=self._namespace)
        except NotFound:
            body = {"metadata": {"name": self._name}, "spec": self._spec(LeaseSpec())}
            await self._api.create(LEASES, body, namespace=self._namespace)
            return True
        if lease.spec != self._observed:
            self._observed, self._observed_at = lease.spec, self._clock.monotonic()
        is_free = lease.spec.holder_identity in {self._identity, None, ""}
        if not is_free and self._clock.monotonic() - self._observed_at < LEASE_S:
            return False
        answer = await self._api.patch(
            LEASES,
            self._name,
            {"metadata": {"resourceVersion": lease.metadata.resource_version}, "spec": self._spec(lease.spec)},
            namespace=self._namespace,
        )
        self._observed = msgspec.convert(answer, Lease).spec
        return True

    def _spec(self, before: LeaseSpec) -> dict[str, object]:
        now, spec = self._now(), {"holderIdentity": self._identity, "leaseDurationSeconds": int(LEASE_S)}
        if before.holder_identity == self._identity:
            return {**spec, "renewTime": now}
        return {**spec, "renewTime": now, "acquireTime": now, "leaseTransitions": (before.lease_transitions or 0) + 1}

    def _now(self) -> str:
        return rfc3339(self._clock.now())


class LeaseWatcher:
    """Watches a Lease that another process of this host renews: this process leads while that one holds it.

    Args:
        lease: The Lease, as `NAMESPACE/NAME`; if empty, this process always leads.
        host: Name of the host that both processes share. The holder's identity is `HOST_UUID`, as in kube-scheduler.
    """

    def __init__(self, api: KubeApi, clock: Clock, lease: str, host: str) -> None:
        self._prefix, self._lease, self._leads = f"{host}_", lease, not lease
        self._on_change: list[Callable[[], None]] = []
        namespace, _, name = lease.partition("/")
        selector = Selector(namespace=namespace, fields=f"metadata.name={name}")
        self._reflector = Reflector(api, LEASES, Lease, selector=selector, clock=clock, on_change=self._changed)

    def leads(self) -> bool:
        """Return whether this process leads at present."""
        return self._leads

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back when this process begins or ceases to lead."""
        self._on_change.append(callback)

    async def run(self) -> None:
        """Watch the Lease, if there is one, until cancelled."""
        if self._lease:
            await self._reflector.run()

    def _changed(self, _: Lease | None, new: Lease | None) -> None:
        holder = "" if new is None else new.spec.holder_identity or ""
        leads = holder.startswith(self._prefix)
        if leads != self._leads:
            self._leads = leads
            structlog.get_logger().info("leads" if leads else "leads no longer", lease_holder=holder)
            for callback in self._on_change:
                callback()
