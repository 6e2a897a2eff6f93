"""A GPU's counters under DCGM's names and in DCGM's units; what is not known is left out."""

from collections.abc import Mapping

from carpool_deviceplugin.nvml.values import GpmMetrics, Identity, Telemetry


def dcgm_values(known: Identity, telemetry: Telemetry, gpm: GpmMetrics | None) -> dict[str, float]:
    """Return what can be said of a GPU now, by DCGM's field names."""
    values: dict[str, float | None] = {
        "DCGM_FI_DEV_GPU_UTIL": telemetry.gpu_util_percent,
        "DCGM_FI_DEV_MEM_COPY_UTIL": telemetry.memory_util_percent,
        # NVML's first version counts what the driver keeps as used.
        "DCGM_FI_DEV_FB_USED": max(0, telemetry.memory_used_mib - known.reserved_mib),
        "DCGM_FI_DEV_FB_FREE": telemetry.memory_free_mib,
        "DCGM_FI_DEV_FB_RESERVED": known.reserved_mib,
        "DCGM_FI_DEV_POWER_USAGE": telemetry.power_w,
        "DCGM_FI_DEV_GPU_TEMP": telemetry.temperature_c,
        "DCGM_FI_DEV_SM_CLOCK": telemetry.sm_clock_mhz,
        "DCGM_FI_DEV_MEM_CLOCK": telemetry.memory_clock_mhz,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": telemetry.rows_remapped_uncorrectable,
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": telemetry.rows_remapped_correctable,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": telemetry.remap_failed,
        **_activity(gpm or GpmMetrics()),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def dcgm_of_part(memory_mib: tuple[int, int] | None, gpm: GpmMetrics | None) -> dict[str, float]:
    """Return what can be said of a MIG instance now: its memory (used, free) and its activity."""
    used, free = memory_mib or (None, None)
    values = {"DCGM_FI_DEV_FB_USED": used, "DCGM_FI_DEV_FB_FREE": free, **_activity(gpm or GpmMetrics())}
    return {name: float(value) for name, value in values.items() if value is not None}


def activity_of(counters: Mapping[str, float]) -> GpmMetrics | None:
    """Read what DCGM says of a GPU's activity; None where it says nothing of its SMs."""
    if "DCGM_FI_PROF_SM_ACTIVE" not in counters:
        return None
    return GpmMetrics(*(counters.get(name) for name in _activity(GpmMetrics())))


def _activity(gpm: GpmMetrics) -> dict[str, float | None]:
    return {
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": gpm.graphics,
        "DCGM_FI_PROF_SM_ACTIVE": gpm.sm,
        "DCGM_FI_PROF_SM_OCCUPANCY": gpm.occupancy,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": gpm.tensor,
        "DCGM_FI_PROF_DRAM_ACTIVE": gpm.dram,
    }
