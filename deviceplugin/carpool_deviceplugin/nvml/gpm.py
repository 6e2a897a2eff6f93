"""GPU performance monitoring: how full the SMs were between two looks, of GPUs and MIG instances; Hopper and newer."""

import math
from dataclasses import dataclass, field

import pynvml
from carpool_core.values import GpuUuid

from carpool_deviceplugin.nvml.calls import Session
from carpool_deviceplugin.nvml.library import Handle
from carpool_deviceplugin.nvml.values import GpmMetrics

_METRICS = (
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


def _request() -> pynvml.c_nvmlGpmMetricsGet_t:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(_METRICS)
    for place, metric in enumerate(_METRICS):
        request.metrics[place].metricId = metric
    return request


def _ratio(metric: pynvml.c_nvmlGpmMetric_t) -> float | None:
    """Read one metric; where it could not be computed the driver's number is none, and would count as zero."""
    percent: float = metric.value
    if metric.nvmlReturn != pynvml.NVML_SUCCESS or not math.isfinite(percent):
        return None
    return min(1.0, max(0.0, percent / 100))


@dataclass
class _Pair:
    samples: tuple[Handle, Handle]
    filled: int = 0
    opening: int = field(default=0)
    request: pynvml.c_nvmlGpmMetricsGet_t = field(default_factory=_request)
    """Asked again and again."""


class Gpm:
    """Takes samples of GPUs and of their MIG instances, and says what happened between the last two."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._supported: dict[GpuUuid, bool] = {}
        self._pairs: dict[tuple[GpuUuid, int | None], _Pair] = {}

    def is_supported(self, uuid: GpuUuid) -> bool:
        """Whether this GPU and driver can say it."""
        if uuid not in self._supported:
            session = self._session
            found = session.ask(uuid, session.library.nvmlGpmQueryDeviceSupport, session.handle(uuid))
            self._supported[uuid] = found is not None and bool(found.isSupportedDevice)
        return self._supported[uuid]

    def sample(self, uuid: GpuUuid, instance: int | None = None) -> GpmMetrics | None:
        """Take a sample, and return what happened since the one before; None at first, and where unsupported.

        Args:
            uuid: The GPU.
            instance: A GPU instance ID; the whole GPU when None.

        Raises:
            NvmlError: The GPU cannot be read.
        """
        if not self.is_supported(uuid):
            return None
        session, key = self._session, (uuid, instance)
        handle = session.handle(uuid)
        pair = self._pairs.get(key)
        if pair is None or pair.opening != session.openings:
            allocate = session.library.nvmlGpmSampleAlloc
            samples = (session.call(uuid, allocate), session.call(uuid, allocate))
            pair = self._pairs[key] = _Pair(samples, opening=session.openings)
        before, now = pair.samples
        if instance is None:
            taken = session.ask(uuid, session.library.nvmlGpmSampleGet, handle, now)
        else:
            taken = session.ask(uuid, session.library.nvmlGpmMigSampleGet, handle, instance, now)
        if taken is None:
            return None
        pair.samples, pair.filled = (now, before), pair.filled + 1
        return self._between(uuid, before, now, pair.request) if pair.filled > 1 else None

    def _between(
        self, uuid: GpuUuid, before: Handle, now: Handle, request: pynvml.c_nvmlGpmMetricsGet_t
    ) -> GpmMetrics | None:
        request.sample1, request.sample2 = before, now
        if self._session.ask(uuid, self._session.library.nvmlGpmMetricsGet, request) is None:
            return None
        return GpmMetrics(*(_ratio(metric) for metric in request.metrics[: len(_METRICS)]))

    def forget(self, uuid: GpuUuid, instance: int | None = None) -> None:
        """Free the samples of what is gone."""
        pair = self._pairs.pop((uuid, instance), None)
        if pair is not None and pair.opening == self._session.openings:
            for sample in pair.samples:
                self._session.ask(uuid, self._session.library.nvmlGpmSampleFree, sample)
