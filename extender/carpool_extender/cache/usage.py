"""Measured beats predicted: what an agent saw of running tenants takes the place of what was predicted of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from carpool_core.clock import parse_rfc3339
from carpool_core.resources.node import GpuNode, Reservation, Tenant, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_predictor.models.slowdown import TenantActivity, is_saturated, slowdowns
from msgspec import structs

MOMENTS = 4096
"""Moments that are remembered as read: each write of a node asks for those of all its reservations again."""
CROWDS = 4096
"""Crowds of tenants of which it is remembered how much they slow each other down: each report tells of them again."""
SETTLED_S = 90.0
"""Age from which a tenant's activity counts as measured, in seconds: before, it loads, and its mean is of little."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What is known of one tenant of one GPU."""

    memory_mib: int | None
    """What was promised, or what was measured where that is more, or instead of it; None where nothing was promised."""
    util: float
    """GPU utilization alone, 0..1."""
    sm: float
    """SM activity alone, 0..1."""
    dram: float
    """DRAM activity alone, 0..1."""


def counted_tenants(node: GpuNode) -> Mapping[tuple[PodUid, GpuUuid], Tenant]:
    """Return what counts of a node's measures, by pod and GPU: memory at once, activity where it is old enough."""
    if not node.status.tenants:
        return {}
    now = epoch_seconds(node.status.heartbeat_time or "")
    since = {r.pod_uid: epoch_seconds(r.reserved_at) for r in node.spec.reservations}

    def is_settled(pod: PodUid) -> bool:
        return bool(now and since[pod]) and now - since[pod] >= SETTLED_S

    return {
        (tenant.pod_uid, tenant.gpu_uuid): tenant if is_settled(tenant.pod_uid) else _without_activity(tenant)
        for tenant in node.status.tenants
        if tenant.pod_uid in since
    }


def _without_activity(young: Tenant) -> Tenant:
    return structs.replace(young, gpu_util_percent=None, sm_active_ratio=None)


def usage_of(reservations: Sequence[Reservation], measured: Sequence[Tenant | None]) -> list[TenantUsage]:
    """Combine promise and measure for the tenants of one GPU.

    What a tenant is measured to do beside neighbours is less than what it would do alone, by its slowdown: measured
    times predicted slowdown is its activity alone, and on a GPU that is used up, where each gets what the others leave,
    no less than was promised. A promise of memory is taken back only in the reservation itself; what is used beyond it
    counts.
    """
    expected = [reserved_usage(one.tenant, peak_mib(of)) for one, of in zip(reservations, measured, strict=True)]
    if not any(measured):
        return expected
    stretch = _stretch(reservations[0].mode, tuple((one.util, one.sm, one.dram) for one in expected))
    together = [_together(one, tenant, by) for one, tenant, by in zip(expected, measured, stretch, strict=True)]
    floors = is_saturated(reservations[0].mode, together)
    return [
        one if tenant is None else _combined(one, tenant, by, only_raises=floors)
        for one, tenant, by in zip(expected, measured, stretch, strict=True)
    ]


@lru_cache(maxsize=CROWDS)
def _stretch(mode: SharingMode, alone: tuple[tuple[float, float, float], ...]) -> list[float]:
    """Predict the slowdowns of the tenants of one GPU from what each does alone: utilization, SM and DRAM activity."""
    util, sm, dram = np.array(alone, np.float64).T[:, None, :]
    found: list[float] = slowdowns(mode, util, sm, dram, np.ones(util.shape, np.bool_))[0].tolist()
    return found


def _together(reserved_usage: TenantUsage, tenant: Tenant | None, slowdown: float) -> TenantActivity:
    """Return what a tenant is measured to do beside its neighbours; where that is not known, what is predicted."""
    util = None if tenant is None else tenant.gpu_util_percent
    sm = None if tenant is None else tenant.sm_active_ratio
    return TenantActivity(
        reserved_usage.util / slowdown if util is None else _share(util / 100),
        reserved_usage.sm / slowdown if sm is None else _share(sm),
        reserved_usage.dram,
    )


def _combined(reserved_usage: TenantUsage, tenant: Tenant, slowdown: float, *, only_raises: bool) -> TenantUsage:
    util, sm = tenant.gpu_util_percent, tenant.sm_active_ratio
    alone = TenantUsage(
        memory_mib=reserved_usage.memory_mib,
        util=reserved_usage.util if util is None else _share(util / 100 * slowdown),
        sm=reserved_usage.sm if sm is None else _share(sm * slowdown),
        dram=reserved_usage.dram,
    )
    if not only_raises:
        return alone
    return replace(alone, util=max(alone.util, reserved_usage.util), sm=max(alone.sm, reserved_usage.sm))


def _share(found: float) -> float:
    """Return a share of a GPU, 0..1, whatever an agent tells: less than nothing would make room for others."""
    return min(1.0, max(0.0, found))


def peak_mib(measured: Tenant | None) -> int:
    """Return the most memory that a tenant was measured to take, in MiB; 0 where nothing was measured of it."""
    return 0 if measured is None else max(measured.peak_memory_mib, measured.memory_mib)


def reserved_usage(profile: TenantProfile, peak_mib: int = 0) -> TenantUsage:
    """Return what was predicted of a tenant, and the memory that counts with such a peak."""
    return TenantUsage(
        memory_mib=profile.counted_mib(peak_mib),
        util=profile.gpu_util_percent / 100,
        sm=profile.sm_active_ratio,
        dram=profile.dram_active_ratio,
    )


@lru_cache(maxsize=MOMENTS)
def epoch_seconds(moment: str) -> float:
    """Seconds since 1970; 0 where nobody said when, or said it in a way that nobody understands."""
    try:
        return parse_rfc3339(moment).timestamp() if moment else 0.0
    except ValueError:
        return 0.0
