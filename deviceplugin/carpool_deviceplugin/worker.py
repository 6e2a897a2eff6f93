"""One GPU's steps, run one after the other, each with a deadline, and undone where one of them fails."""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import structlog
from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, PartitionState, PodUid

from carpool_deviceplugin.devices import Devices
from carpool_deviceplugin.gpu import DeviceError, GpuActual, Step
from carpool_deviceplugin.plan import Plan, plan, way_back

P = ParamSpec("P")
T = TypeVar("T")

READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far one GPU is for one reservation."""

    generation: int
    """Of the reservation."""
    state: PartitionState
    message: str = ""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often things are looked at, in seconds."""

    step_deadline_s: float = 10.0
    """How long one step of a GPU may take."""
    slow_s: float = 0.3
    """Steps that take longer are reported as Preparing in the meantime."""
    waiting_s: float = 1.0
    """How often a GPU is looked at that somebody must leave first."""
    resync_s: float = 10.0
    """How often a GPU is looked at anyhow."""
    sample_s: float = 1.0
    """How often the tenants' use is measured."""
    measures_s: float = 3.0
    """Status writes that only bring new measures keep this distance."""
    heartbeat_s: float = 60.0
    """After this time the status is written though nothing has changed."""
    retry_s: float = 1.0
    """After a failed call to the API server; doubled with each further failure, to 32 times this."""


class GpuWorker:
    """Brings one GPU to what its reservations want. GPUs have workers of their own: a stuck one holds up no other.

    Args:
        uuid: The GPU.
        devices: The node's GPUs.
        changed: Called when outcomes have changed.
        rhythm: Deadlines and intervals.
    """

    def __init__(self, uuid: GpuUuid, devices: Devices, changed: Callable[[], None], rhythm: Rhythm) -> None:
        self.uuid = uuid
        self.outcomes: Mapping[PodUid, Outcome] = {}
        self._devices, self._changed, self._rhythm = devices, changed, rhythm
        self._wanted: Sequence[Reservation] = ()
        self._awake = asyncio.Event()
        self._stuck: asyncio.Future[object] | None = None
        self._log = structlog.get_logger().bind(gpu=uuid)

    def want(self, reservations: Sequence[Reservation]) -> None:
        """Set the reservations that name this GPU."""
        if list(reservations) != list(self._wanted):
            self._wanted = reservations
            self._awake.set()

    def remember(self, outcomes: Mapping[PodUid, Outcome]) -> None:
        """Take over what an earlier agent had promised."""
        self.outcomes = outcomes

    async def run(self) -> None:
        """Keep the GPU as it is wanted, for ever."""
        while True:
            self._awake.clear()
            is_settled = await self.once()
            try:
                async with asyncio.timeout(self._rhythm.resync_s if is_settled else self._rhythm.waiting_s):
                    await self._awake.wait()
            except TimeoutError:
                continue

    async def once(self) -> bool:
        """Look, plan, act and look again; return False where somebody is waited for or something failed."""
        wanted = self._wanted
        held = frozenset(pod for pod, outcome in self.outcomes.items() if outcome.state is READY)
        try:
            actual = await self._call(self._devices.actual, self.uuid)
        except DeviceError as e:
            self._report({r.pod_uid: self._kept(r) or _outcome(r, FAILED, str(e)) for r in wanted})
            return False
        planned = plan(actual, wanted, held)
        failure = await self._act(planned, actual, wanted)
        self._report(_outcomes(planned, wanted, held, failure))
        is_leaving = not wanted and bool(actual.tenants)
        return not (failure or planned.waiting or is_leaving)

    def _kept(self, reservation: Reservation) -> Outcome | None:
        """What runs goes on running while its GPU cannot be read."""
        known = self.outcomes.get(reservation.pod_uid)
        return known if known and known.state is READY else None

    async def _act(self, planned: Plan, actual: GpuActual, wanted: Sequence[Reservation]) -> str:
        """Run the steps; return why they failed, or an empty text."""
        if not planned.steps:
            return ""
        preparing = {r.pod_uid: self._kept(r) or _outcome(r, PREPARING) for r in wanted}
        slow = asyncio.get_running_loop().call_later(self._rhythm.slow_s, self._report, preparing)
        done: list[Step] = []
        try:
            for step in planned.steps:
                done.append(step)  # a step that fails half-way is undone too
                await self._call(self._devices.apply, self.uuid, step)
            found = await self._call(self._devices.actual, self.uuid)
            if left := plan(found, wanted, frozenset(planned.ready)).steps:
                raise DeviceError(f"read back, the GPU still needs {', '.join(map(str, left))}")
            self._log.info("gpu prepared", steps=[str(step) for step in done])
        except DeviceError as e:
            back = await self._undo(done, actual)
            self._log.warning("gpu not prepared", failed=str(done[-1]), error=str(e), way_back=back)
            return f"{done[-1]} failed: {e}; {back}"
        finally:
            slow.cancel()
        return ""

    async def _undo(self, done: Sequence[Step], before: GpuActual) -> str:
        try:
            for step in way_back(done, before):
                await self._call(self._devices.apply, self.uuid, step)
        except DeviceError as e:
            return f"undoing it failed as well: {e}"
        return "it was undone"

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call in a thread, with the deadline; a GPU whose last call never came back is not touched again."""
        if self._stuck is not None and not self._stuck.done():
            raise DeviceError(f"GPU {self.uuid}: an earlier call has not come back yet; look at the GPU's driver")
        call = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args, **kwargs))
        done, _ = await asyncio.wait({call}, timeout=self._rhythm.step_deadline_s)
        if not done:
            self._stuck = call  # type: ignore[assignment]  # only whether it is done matters
            raise DeviceError(f"GPU {self.uuid}: no answer within {self._rhythm.step_deadline_s:g} s")
        return call.result()

    def _report(self, outcomes: Mapping[PodUid, Outcome]) -> None:
        if outcomes != self.outcomes:
            self.outcomes = outcomes
            self._changed()


def _outcome(reservation: Reservation, state: PartitionState, message: str = "") -> Outcome:
    return Outcome(reservation.generation, state, message)


def _outcomes(
    planned: Plan, wanted: Sequence[Reservation], held: frozenset[PodUid], failure: str
) -> dict[PodUid, Outcome]:
    outcomes: dict[PodUid, Outcome] = {}
    for r in wanted:
        if r.pod_uid in (planned.refused or {}):
            outcomes[r.pod_uid] = _outcome(r, FAILED, (planned.refused or {})[r.pod_uid])
        elif r.pod_uid in (planned.waiting or {}):
            outcomes[r.pod_uid] = _outcome(r, PREPARING, (planned.waiting or {})[r.pod_uid])
        elif failure and r.pod_uid not in held:
            outcomes[r.pod_uid] = _outcome(r, FAILED, failure)
        else:
            outcomes[r.pod_uid] = _outcome(r, READY)
    return outcomes
