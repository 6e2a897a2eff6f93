"""Simulated GPUs of the agent; only `CARPOOL_SIMULATED_GPUS` enables them."""

import uuid as uuids
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
from carpool_core.keys import SIMULATED_PREFIX
from carpool_core.products import GpuProduct, UnknownProductError, find_product
from carpool_core.resources.node import Device
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_simulated.device import Device as SimulatedDevice
from carpool_simulated.device import Reading as SimulatedReading
from carpool_simulated.state import IDLE, Claim, Facts, Limit, SimulatedGpuError

from carpool_deviceplugin.gpu import (
    CONTAINER_MPS,
    FRAGMENTATION_MIB,
    Access,
    DeviceError,
    GpuActual,
    Limits,
    Mount,
    NoDevicesError,
    ProcessUsage,
    Reading,
    SetLimits,
    SetMode,
    StartMps,
    Step,
    StopMps,
)
from carpool_deviceplugin.quoting import quoted

CONTAINER_GPUS = "/run/carpool/gpus"
MODES = (SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS)

_NAMESPACE = uuids.UUID("6d2f9d0e-3c1d-5f0e-9d0a-6b1f4d2a7c11")
_DRIVER_MIB, _DRIVER_SHARE = 300, 0.008
"""Memory that the driver reserves: a constant and a share of the total. An A100-40GB shows PyTorch's 39.39 GiB."""
_CONTEXT_MIB = 420
"""A CUDA context with cuDNN and cuBLAS loaded takes 400 to 500 MiB."""


def parse_inventory(text: str) -> list[GpuProduct]:
    """Read `PRODUCT:COUNT[,PRODUCT:COUNT…]`, one product for each GPU.

    Raises:
        NoDevicesError: The text is invalid or names an unknown product.
    """
    products: list[GpuProduct] = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not count.isdecimal() or len(count) > 2 or not 1 <= int(count) <= 64:
            raise NoDevicesError(
                f"CARPOOL_SIMULATED_GPUS: expected PRODUCT:COUNT with a count from 1 to 64, found "
                f'{quoted(part.strip())}; write it as in "NVIDIA A100-SXM4-40GB:4"'
            )
        try:
            products += [find_product(name.strip())] * int(count)
        except UnknownProductError as e:
            raise NoDevicesError(f"CARPOOL_SIMULATED_GPUS: {e}") from e
    return products


@contextmanager
def _as_device_error() -> Iterator[None]:
    try:
        yield
    except (SimulatedGpuError, OSError, ValueError) as e:
        raise DeviceError(str(e)) from e


class SimulatedDevices:
    """The simulated GPUs of a node. Containers see their directories through bind mounts.

    A GPU's UUID is derived from the node's name and its index, so it survives the loss of the state directory.
    """

    simulated = True
    unreadable: Sequence[str] = ()
    numa_nodes: Collection[int] = ()
    mps_problem = ""

    def __init__(self, products: Sequence[GpuProduct], node: str, state_dir: Path) -> None:
        self._mps = state_dir / "mps"
        self._log = structlog.get_logger().bind(node=node)
        self._logged: dict[GpuUuid, tuple[str, ...]] = {}
        self._readings: dict[GpuUuid, SimulatedReading] = {}
        self._facts: dict[GpuUuid, Facts] = {}
        self._products: dict[GpuUuid, GpuProduct] = {}
        self._devices: dict[GpuUuid, SimulatedDevice] = {}
        for index, product in enumerate(products):
            uuid = GpuUuid(f"GPU-{uuids.uuid5(_NAMESPACE, f'{node}/{index}')}")
            self._facts[uuid] = facts = _facts(uuid, product)
            self._products[uuid] = product
            self._devices[uuid] = device = SimulatedDevice(state_dir / "simulated" / uuid)
            device.create(facts)

    @property
    def uuids(self) -> Sequence[GpuUuid]:
        """The GPUs by index."""
        return list(self._facts)

    def describe(self, uuid: GpuUuid) -> Device:
        """Describe one GPU."""
        facts, product = self._facts[uuid], self._products[uuid]
        mode, problem = None, ""
        try:
            mode = self.actual(uuid).mode
        except DeviceError as e:
            problem = str(e)
        return Device(
            uuid=uuid,
            index=self.uuids.index(uuid),
            product=facts.product,
            memory_mib=facts.memory_mib,
            reserved_mib=facts.reserved_mib + FRAGMENTATION_MIB,
            compute_capability=product.compute_capability,
            mig_profiles=list(product.mig_profiles),
            modes=list(MODES),
            mode=mode,
            health=DeviceHealth.UNHEALTHY if problem else DeviceHealth.HEALTHY,
            health_message=problem,
        )

    def actual(self, uuid: GpuUuid) -> GpuActual:
        """Return the state of a GPU."""
        device = self._device(uuid)
        with _as_device_error():
            facts = device.facts()
            held, _ = device.held()
            mode = device.mode()
        return GpuActual(
            uuid=uuid,
            usable_mib=facts.memory_mib - facts.reserved_mib,
            modes=frozenset(MODES),
            mode=None if mode.mode == IDLE else SharingMode(mode.mode),
            mps_daemon=mode.mps_daemon,
            limits={PodUid(pod): Limits(x.memory_mib, x.thread_percentage) for pod, x in mode.limits.items()},
            tenants=frozenset(PodUid(h.claim.pod_uid) for h in held),
        )

    def _device(self, uuid: GpuUuid) -> SimulatedDevice:
        if uuid not in self._devices:
            raise DeviceError(f"GPU {uuid}: expected one of {', '.join(self._devices)}; it is not a GPU of this node")
        return self._devices[uuid]

    def apply(self, uuid: GpuUuid, step: Step) -> None:
        """Apply one step."""
        device, pipe = self._device(uuid), self._mps / uuid
        with _as_device_error():
            match step:
                case SetMode(mode):
                    device.set_mode(mode.value if mode else IDLE)
                case StartMps():
                    device.start_mps(pipe)
                case StopMps():
                    device.stop_mps(pipe)
                case SetLimits(pod_uid, None):
                    device.set_limit(pod_uid, None)
                case SetLimits(pod_uid, Limits(memory_mib, thread_percentage)):
                    device.set_limit(pod_uid, Limit(memory_mib, thread_percentage))
                case _:
                    raise DeviceError(f"GPU {uuid}: expected a step of a GPU without MIG, found {step}")

    def read(self, uuid: GpuUuid) -> Reading:
        """Read a GPU's counters."""
        facts = self._facts[uuid]
        with _as_device_error():
            self._device(uuid).tidy()
            reading = self._device(uuid).reading()
        self._log_problems(uuid, reading.problems)
        return Reading(
            at=reading.at,
            processes=self._usage(uuid, reading),
            power_w=reading.power_w,
            idle_power_w=facts.idle_power_w,
            power_limit_w=facts.power_limit_w,
            energy_j=reading.energy_j,
            sources=("simulated",),
        )

    def survey(self, uuid: GpuUuid) -> tuple[Device, Reading | DeviceError]:
        """Describe a GPU and read its counters."""
        try:
            return self.describe(uuid), self.read(uuid)
        except DeviceError as e:
            return self.describe(uuid), e

    def _usage(self, uuid: GpuUuid, now: SimulatedReading) -> tuple[ProcessUsage, ...]:
        """Return the use by each process since the last reading; claims contain its total use."""
        before, self._readings[uuid] = self._readings.get(uuid), now
        earlier = {held.id: held.claim for held in before.claims} if before else {}
        uses = []
        for held in now.claims:
            claim = held.claim
            was = earlier.get(held.id) or Claim(claim.pod_uid, claim.pid, claim.started, 0, 0)
            if before is None:  # its use before the start of the agent counts for nothing
                was = claim
            uses.append(
                ProcessUsage(
                    id=held.id,
                    pod_uid=PodUid(claim.pod_uid),
                    memory_mib=claim.memory_mib,
                    peak_memory_mib=claim.peak_memory_mib,
                    elapsed_s=min(now.at - before.at, now.at - claim.started) if before else 0.0,
                    busy_s=max(0.0, claim.busy_s - was.busy_s),  # a container may have written anything
                    sm_s=max(0.0, claim.sm_s - was.sm_s),
                    dram_s=max(0.0, claim.dram_s - was.dram_s),
                    energy_j=max(0.0, claim.energy_j - was.energy_j),
                    steps=max(0, claim.steps - was.steps),
                    steps_s=max(0.0, claim.steps_s - was.steps_s),
                )
            )
        return tuple(uses)

    def _log_problems(self, uuid: GpuUuid, problems: tuple[str, ...]) -> None:
        """Log invalid claims once; they do not change the GPU's health."""
        if problems != self._logged.get(uuid, ()):
            self._logged[uuid] = problems
            self._log.warning("claims ignored", gpu=uuid, count=len(problems), first=[*problems[:3]])

    def refresh_counters(self) -> None:
        """Do nothing: simulated GPUs have no other source."""

    def release(self, reason: str) -> None:
        """Do nothing: simulated GPUs have no driver."""

    def set_mig_manager(self, manager: str) -> None:
        """Do nothing: simulated GPUs have no MIG."""

    def access(self, uuid: GpuUuid, pod_uid: PodUid | None = None) -> Access:
        """Return the mounts and variables of the GPU; they are the same for every pod."""
        directory = self._device(uuid).directory
        return Access(
            env={"CARPOOL_SIMULATED_GPUS_DIR": CONTAINER_GPUS},
            mounts=(
                Mount(str(directory), f"{CONTAINER_GPUS}/{uuid}", read_only=True),
                Mount(str(directory / "claims"), f"{CONTAINER_GPUS}/{uuid}/claims"),
            ),
            mps_pipe=Mount(str(self._mps / uuid), CONTAINER_MPS, read_only=True),
        )


def _facts(uuid: GpuUuid, product: GpuProduct) -> Facts:
    return Facts(
        uuid=uuid,
        product=SIMULATED_PREFIX + product.name,
        memory_mib=product.memory_mib,
        reserved_mib=_DRIVER_MIB + round(_DRIVER_SHARE * product.memory_mib),
        context_mib=_CONTEXT_MIB,
        power_limit_w=float(product.power_limit_w),
        idle_power_w=float(product.idle_power_w),
    )
