"""Any history of binds, replays, releases and races between two schedulers over one GpuNode keeps every promise."""

from dataclasses import replace

import msgspec
from carpool_core.resources.node import GpuNodeSpec, Reservation, Tenant, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.peaks import StablePeak, peaks_of, use_measured_peak
from carpool_extender.testing import device, tenant
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

USABLE_MIB, SLOTS = 9000, 3
GPUS = [GpuUuid(f"GPU-a-{i}") for i in range(3)]
CAPACITY = ledger.Capacity(
    {one.uuid: one for one in (device(i, memory_mib=USABLE_MIB + 1000, reserved_mib=1000) for i in range(3))}, SLOTS
)
wishes = st.builds(
    lambda pod, gpus, mode, memory, namespace, provisional: msgspec.structs.replace(
        tenant(f"p{pod}", [GPUS[g] for g in gpus], mode, namespace=namespace, prediction=None),
        tenant=TenantProfile(memory_mib=memory, provisional=provisional and mode is not SharingMode.EXCLUSIVE),
    ),
    st.integers(0, 6),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.sampled_from([SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE]),
    st.one_of(st.none(), st.integers(0, 2 * USABLE_MIB), st.just(2**62)),
    st.sampled_from(["default", "other"]),
    st.booleans(),
)


def _counted(one: Reservation, uuid: GpuUuid, peaks: dict[tuple[PodUid, GpuUuid], int]) -> int | None:
    """Return a pod's expected memory: its measured peak while it holds, otherwise its reserved bound."""
    peak, measured = peaks.get((one.pod_uid, uuid), 0), one.tenant.measured_mib
    if measured is None:
        return one.tenant.memory_mib
    if peak <= measured:
        return measured
    return None if one.tenant.memory_mib is None else max(peak, one.tenant.memory_mib)


class Histories(RuleBasedStateMachine):
    """Two schedulers that read, decide and write by compare-and-swap, in any order, with answers lost on the way.

    Meanwhile pods grow, and count with what they were measured to take once that seems to stand still.
    """

    read = Bundle("read")
    decided = Bundle("decided")

    @initialize()
    def begin(self) -> None:
        self.spec, self.version = GpuNodeSpec(), 0
        self.first: dict[PodUid, Reservation] = {}
        self.peaks: dict[tuple[PodUid, GpuUuid], int] = {}
        self.void: set[PodUid] = set()
        """Pods that others joined by a measure which did not hold: they have their whole promise again."""

    @property
    def capacity(self) -> ledger.Capacity:
        return replace(CAPACITY, peaks=dict(self.peaks))

    @rule(target=read)
    def look(self) -> tuple[int, GpuNodeSpec]:
        return self.version, self.spec

    @rule(target=decided, seen=read, wanted=wishes)
    def reserve(self, seen: tuple[int, GpuNodeSpec], wanted: Reservation) -> object:
        version, spec = seen
        found = ledger.reserve(spec, wanted, self.capacity)
        if isinstance(found, ledger.Rejected):
            assert found.reason
            return multiple()
        elsewhere = msgspec.structs.replace(wanted, gpu_uuids=GPUS[:1])
        assert ledger.reserve(found, wanted, self.capacity) is ledger.reserve(found, elsewhere, self.capacity) is found
        assert ledger.release(found, wanted.pod_uid) == ledger.release(spec, wanted.pod_uid)
        if found is not spec:
            for uuid in wanted.gpu_uuids:
                counted = [_counted(one, uuid, self.peaks) for one in ledger.on_gpu(found, uuid)]
                assert None not in counted or len(counted) == 1
                assert sum(mib or 0 for mib in counted) <= USABLE_MIB
        return version, found

    @rule(target=decided, seen=read, pod=st.integers(0, 6))
    def release(self, seen: tuple[int, GpuNodeSpec], pod: int) -> tuple[int, GpuNodeSpec]:
        version, spec = seen
        found = ledger.release(spec, PodUid(f"pod-p{pod}"))
        assert ledger.held(found, PodUid(f"pod-p{pod}")) is None
        assert ledger.release(found, PodUid(f"pod-p{pod}")) is found
        return version, found

    @rule(target=decided, seen=read, pod=st.integers(0, 6))
    def take_over(self, seen: tuple[int, GpuNodeSpec], pod: int) -> tuple[int, GpuNodeSpec]:
        version, spec = seen
        found = ledger.take_over(spec, PodUid(f"pod-p{pod}"), 20)
        assert [r.gpu_uuids for r in found.reservations] == [r.gpu_uuids for r in spec.reservations]
        return version, found

    @rule(mib=st.integers(1, USABLE_MIB), chosen=st.integers(0, 20))
    def grow(self, mib: int, chosen: int) -> None:
        """A pod takes more memory, on all of its GPUs."""
        held = self.spec.reservations
        for uuid in held[chosen % len(held)].gpu_uuids if held else ():
            place = held[chosen % len(held)].pod_uid, uuid
            self.peaks[place] = max(mib, self.peaks.get(place, 0))

    @rule(target=decided, seen=read, margins=st.dictionaries(st.integers(0, 6), st.sampled_from([1.1, 1.5])))
    def count_peaks(self, seen: tuple[int, GpuNodeSpec], margins: dict[int, float]) -> tuple[int, GpuNodeSpec]:
        version, spec = seen
        tenants = {
            (pod, gpu): Tenant(pod_uid=pod, gpu_uuid=gpu, memory_mib=mib, peak_memory_mib=mib)
            for (pod, gpu), mib in self.peaks.items()
        }
        peaks = {one.pod_uid: peaks_of(one, tenants) or () for one in spec.reservations}
        pods = {PodUid(f"pod-p{pod}"): StablePeak(peaks.get(f"pod-p{pod}", ()), by) for pod, by in margins.items()}
        found = use_measured_peak(spec, tenants, pods)
        assert use_measured_peak(found, tenants, pods) is found
        for before, after in zip(spec.reservations, found.reservations, strict=True):
            taken = max(self.peaks.get((before.pod_uid, uuid), 0) for uuid in before.gpu_uuids)
            counts = before.tenant.counted_mib(0)
            if before.tenant.provisional and counts is not None and taken > counts:
                assert after.tenant == msgspec.structs.replace(before.tenant, provisional=False, measured_mib=None)
            else:
                assert ledger.promised_mib([after], USABLE_MIB) <= ledger.promised_mib([before], USABLE_MIB)
        return version, found

    @rule(write=consumes(decided))
    def write(self, write: tuple[int, GpuNodeSpec]) -> None:
        self._write(*write)

    @rule(write=decided)
    def write_and_lose_the_answer(self, write: tuple[int, GpuNodeSpec]) -> None:
        """The writer gets no answer, and writes the same again."""
        self._write(*write)
        self._write(*write)

    def _write(self, version: int, spec: GpuNodeSpec) -> None:
        if version == self.version and spec is not self.spec:  # the API server refuses the others
            before = {one.pod_uid: one.tenant for one in self.spec.reservations}
            held = {one.pod_uid: one.tenant for one in spec.reservations}
            void = {
                uid for uid, of in held.items() if uid in before and before[uid].measured_mib and not of.measured_mib
            }
            self.void = (self.void & held.keys()) | void
            self.spec, self.version = spec, version + 1

    @invariant()
    def each_pod_has_one_reservation_and_keeps_it(self) -> None:
        held = {r.pod_uid: r for r in self.spec.reservations}
        assert len(held) == len(self.spec.reservations)
        for uid, reservation in held.items():
            before = self.first.get(uid, reservation)
            assert (reservation.gpu_uuids, reservation.mode) == (before.gpu_uuids, before.mode)
        self.first = held

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        for uuid in GPUS:
            here = ledger.on_gpu(self.spec, uuid)
            assert len(here) <= SLOTS
            assert len({r.mode for r in here}) <= 1
            if here and here[0].mode is SharingMode.EXCLUSIVE:
                assert len(here) == 1
            if here and here[0].mode is SharingMode.MPS:
                assert len({r.pod_namespace for r in here}) == 1
            if not self.void & {r.pod_uid for r in here}:
                amounts = [_counted(r, uuid, {}) for r in here]
                assert None not in amounts or len(here) == 1
                assert sum(amount or 0 for amount in amounts) <= USABLE_MIB
            assert ledger.promised_mib(here, USABLE_MIB) <= USABLE_MIB


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
