"""Reconciles one GPU with its reservations: reads, plans, applies steps with deadlines and reads back."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from carpool_core.resources.node import Partition, Reservation
from carpool_core.values import GpuUuid, PartitionState, PodUid

from carpool_deviceplugin.gpu import DeviceError, Devices, GpuActual, Step, changes_mig
from carpool_deviceplugin.partitions import Plan, plan
from carpool_deviceplugin.timeouts import Intervals, TimeLimitedCaller, wait_for_event

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED


async def _unchanged() -> bool:
    return False


class GpuWorker:
    """Reconciles one GPU. Each GPU has its own worker, so that a stuck GPU does not block others.

    `changed` is called when `partitions` has changed. `confirm` is called before MIG changes and returns whether the
    agent's permission to partition has changed. `peaks` returns the measured peak memory of each pod on the GPU, in
    MiB.
    """

    def __init__(
        self,
        uuid: GpuUuid,
        devices: Devices,
        changed: Callable[[], None],
        intervals: Intervals,
        confirm: Callable[[], Awaitable[bool]] = _unchanged,
        caller: TimeLimitedCaller | None = None,
        peaks: Callable[[], Mapping[PodUid, int]] = dict,
    ) -> None:
        self.uuid = uuid
        self.partitions: Mapping[PodUid, Partition] = {}
        self.ended: Mapping[PodUid, str] = {}
        """Pods that a fault of their MPS daemon has ended in the last minutes, with the reason."""
        self._devices, self._changed, self._intervals = devices, changed, intervals
        self._confirm, self._peaks = confirm, peaks
        self._wanted: Sequence[Reservation] = ()
        self._awake = asyncio.Event()
        self._promised: frozenset[PodUid] = frozenset()
        self._caller = caller or TimeLimitedCaller(f"GPU {uuid}", intervals.step_deadline_s)
        self._log = structlog.get_logger().bind(gpu=uuid)

    def want(self, reservations: Sequence[Reservation]) -> None:
        """Set the reservations that name this GPU."""
        if list(reservations) != list(self._wanted):
            self._wanted = reservations
            self._awake.set()

    def look_again(self) -> None:
        """Wake the worker, because the GPU may have changed."""
        self._awake.set()

    def remember(self, promised: frozenset[PodUid]) -> None:
        """Set the pods that an earlier agent reported ready; the next reconciliation verifies them."""
        self._promised = promised

    async def run(self) -> None:
        """Reconcile the GPU until cancelled."""
        while True:
            self._awake.clear()
            is_settled = await self.once()
            wait_s = self._intervals.resync_s if is_settled else self._intervals.blocked_retry_s
            await wait_for_event(self._awake, wait_s, self._intervals.sleep)

    async def once(self) -> bool:
        """Read, plan, apply and verify; return False if a step failed or a pod must wait."""
        wanted = self._wanted
        ready = {pod for pod, partition in self.partitions.items() if partition.state is READY}
        held = self._promised | ready
        try:
            actual, planned = await self._look(wanted, held)
            self._see_ended(actual.ended)
        except (DeviceError, OSError) as e:
            self._report({r.pod_uid: self._kept(r) or _partition(r, FAILED, str(e)) for r in wanted})
            return False
        failure = await self._act(planned, wanted)
        self._report(_partitions(planned, wanted, held, failure, actual.struck))
        self._promised &= {r.pod_uid for r in wanted}
        is_leaving = not wanted and bool(actual.tenants)
        return not (failure or planned.waiting or is_leaving)

    async def _look(self, wanted: Sequence[Reservation], held: frozenset[PodUid]) -> tuple[GpuActual, Plan]:
        actual = await self._caller.call(self._devices.actual, self.uuid)
        planned = plan(actual, wanted, held, self._peaks())
        if actual.mig_table is not None and any(map(changes_mig, planned.steps)) and await self._confirm():
            actual = await self._caller.call(self._devices.actual, self.uuid)
            planned = plan(actual, wanted, held, self._peaks())
        return actual, planned

    def _kept(self, reservation: Reservation) -> Partition | None:
        """Return READY for a pod that was ready before: it keeps running while its GPU cannot be read."""
        known = self.partitions.get(reservation.pod_uid)
        if known and known.state is READY:
            return known
        return _partition(reservation, READY) if reservation.pod_uid in self._promised else None

    async def _act(self, planned: Plan, wanted: Sequence[Reservation]) -> str:
        """Apply the steps; return the error message, empty on success.

        After a failed step, the next reconciliation plans from the state that the GPU has then.
        """
        if not planned.steps:
            return ""
        preparing = {r.pod_uid: self._kept(r) or _partition(r, PREPARING) for r in wanted}
        slow = asyncio.get_running_loop().call_later(self._intervals.progress_after_s, self._report, preparing)
        step: Step | None = None
        try:
            for step in planned.steps:
                await self._caller.call(self._devices.apply, self.uuid, step)
            found = await self._caller.call(self._devices.actual, self.uuid)
            if left := plan(found, wanted, frozenset(planned.ready), self._peaks()).steps:
                raise DeviceError(f"read back, the GPU still needs {', '.join(map(str, left))}")
            self._log.info("gpu prepared", steps=[str(step) for step in planned.steps])
        except (DeviceError, OSError) as e:
            self._log.warning("gpu not prepared", failed=str(step), error=str(e))
            return f"{step} failed: {e}"
        finally:
            slow.cancel()
        return ""

    def _see_ended(self, ended: Mapping[PodUid, str]) -> None:
        if ended != self.ended:
            self.ended = ended
            self._changed()

    def _report(self, partitions: Mapping[PodUid, Partition]) -> None:
        if partitions != self.partitions:
            self.partitions = partitions
            self._changed()


def _partition(reservation: Reservation, state: PartitionState, message: str = "") -> Partition:
    return Partition(pod_uid=reservation.pod_uid, generation=reservation.generation, state=state, message=message)


def _partitions(
    planned: Plan, wanted: Sequence[Reservation], held: frozenset[PodUid], failure: str, struck: Mapping[PodUid, str]
) -> dict[PodUid, Partition]:
    partitions: dict[PodUid, Partition] = {}
    for r in wanted:
        if r.pod_uid in planned.refused:
            partitions[r.pod_uid] = _partition(r, FAILED, planned.refused[r.pod_uid])
        elif r.pod_uid in planned.waiting:
            partitions[r.pod_uid] = _partition(r, PREPARING, planned.waiting[r.pod_uid])
        elif failure and r.pod_uid not in held:
            partitions[r.pod_uid] = _partition(r, FAILED, failure)
        else:
            partitions[r.pod_uid] = _partition(r, READY, struck.get(r.pod_uid, ""))
    return partitions
