"""The amounts, rejections and deadlines of the ledger; `test_ledger_histories` checks it in any order."""

from datetime import UTC, datetime, timedelta

import pytest
from carpool_core.resources.node import GpuNodeSpec, TenantProfile
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.cache import ledger
from carpool_extender.testing import cluster, device, gpu_node, tenant
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

GPUS = [GpuUuid(f"GPU-a-{i}") for i in range(3)]
CAPACITY = ledger.Capacity({d.uuid: d for d in (device(i, memory_mib=10000, reserved_mib=1000) for i in range(3))}, 3)
EMPTY = GpuNodeSpec()


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**62)), max_size=8))
def test_promised_memory_saturates(amounts):
    held = [replace(tenant("p", GPUS[:1]), tenant=TenantProfile(memory_mib=m)) for m in amounts]
    promised = ledger.promised_mib(held, 9000)
    assert promised == min(9000, sum(9000 if m is None else max(1, m) for m in amounts))


def full(name="x", mode=SharingMode.MPS, **changes):
    return replace(EMPTY, reservations=[tenant(name, GPUS[:1], mode, **changes)])


@pytest.mark.parametrize(
    ("spec", "wanted", "reason"),
    [
        pytest.param(EMPTY, tenant("n", ["GPU-z"]), "GPU-z: the node reports no such GPU", id="no such GPU"),
        pytest.param(EMPTY, tenant("n", GPUS[:1] * 2), "expected different GPUs", id="the same GPU twice"),
        pytest.param(full(), tenant("n", GPUS[:1], memory_limit_mib=6000), "needs 6,000 MiB, has 5,000", id="memory"),
        pytest.param(
            full(),
            tenant("n", GPUS[:1], SharingMode.TIME_SLICING),
            "wants it by TimeSlicing, it is used by MPS",
            id="mode",
        ),
        pytest.param(
            full(), tenant("n", GPUS[:1], namespace="o"), "its MPS server belongs to namespace default", id="namespace"
        ),
        pytest.param(
            full(user=1), tenant("n", GPUS[:1], user=2), "its MPS server serves user 1, not 2", id="another user"
        ),
        pytest.param(full(prediction=None), tenant("n", GPUS[:1]), "needs 4,000 MiB, has 0", id="unknown memory"),
    ],
)
def test_rejections_say_what_is_there(spec, wanted, reason):
    found = ledger.reserve(spec, wanted, CAPACITY)
    assert isinstance(found, ledger.Rejected)
    assert reason in found.reason


def test_a_reservation_is_taken_over_once_and_keeps_its_generation():
    held = replace(full().reservations[0], reserved_at="2026-01-31T12:00:00Z")
    spec = ledger.take_over(replace(EMPTY, reservations=[held]), held.pod_uid, timeout_s=10)
    assert [(r.deadline, r.generation) for r in spec.reservations] == [("2026-01-31T12:00:20.000000Z", 1)]
    assert ledger.take_over(spec, held.pod_uid, timeout_s=10) is spec
    assert ledger.take_over(full(), held.pod_uid, timeout_s=10) == full()
    [reservation] = spec.reservations
    deadline = datetime(2026, 1, 31, 12, 0, 20, tzinfo=UTC)
    assert not ledger.has_lapsed(reservation, deadline)
    assert ledger.has_lapsed(reservation, deadline + timedelta(seconds=1))
    assert not ledger.has_lapsed(reservation, deadline + timedelta(seconds=10), grace_s=10)
    assert not ledger.has_lapsed(full().reservations[0], datetime.max.replace(tzinfo=UTC))


@pytest.mark.parametrize("memory", [None, 0, 1, 9000, 2**29])
def test_the_arrays_count_what_the_ledger_counts(memory):
    held = replace(tenant("x", [GPUS[0]]), tenant=TenantProfile(memory_mib=memory))
    columns = cluster(gpu_node("a", [*CAPACITY.devices.values()], [held])).snapshot().gpus
    assert 9000 - columns.free_mib[0] == ledger.promised_mib([held], 9000)
