"""Any history of binds, replays, releases and races between two schedulers over one GpuNode keeps every promise."""

import msgspec
from carpool_core.resources.node import GpuNodeSpec, Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_extender import ledger
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
    lambda pod, gpus, mode, memory, namespace: msgspec.structs.replace(
        tenant(f"p{pod}", [GPUS[g] for g in gpus], mode, namespace=namespace, prediction=None),
        tenant=TenantProfile(memory_mib=memory),
    ),
    st.integers(0, 6),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.sampled_from([SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE]),
    st.one_of(st.none(), st.integers(0, 2 * USABLE_MIB), st.just(2**62)),
    st.sampled_from(["default", "other"]),
)


class Histories(RuleBasedStateMachine):
    """Two schedulers that read, decide and write by compare-and-swap, in any order, with answers lost on the way."""

    read = Bundle("read")
    decided = Bundle("decided")

    @initialize()
    def begin(self) -> None:
        self.spec, self.version = GpuNodeSpec(), 0
        self.first: dict[PodUid, Reservation] = {}

    @rule(target=read)
    def look(self) -> tuple[int, GpuNodeSpec]:
        return self.version, self.spec

    @rule(target=decided, seen=read, wanted=wishes)
    def reserve(self, seen: tuple[int, GpuNodeSpec], wanted: Reservation) -> object:
        version, spec = seen
        found = ledger.reserve(spec, wanted, CAPACITY)
        if isinstance(found, ledger.Rejected):
            assert found.reason
            return multiple()
        assert ledger.reserve(found, wanted, CAPACITY) is found
        return version, found

    @rule(target=decided, seen=read, pod=st.integers(0, 6))
    def release(self, seen: tuple[int, GpuNodeSpec], pod: int) -> tuple[int, GpuNodeSpec]:
        version, spec = seen
        found = ledger.release(spec, PodUid(f"pod-p{pod}"))
        assert ledger.held(found, PodUid(f"pod-p{pod}")) is None
        assert ledger.release(found, PodUid(f"pod-p{pod}")) is found
        return version, found

    @rule(target=decided, seen=read, pod=st.integers(0, 6))
    def prolong(self, seen: tuple[int, GpuNodeSpec], pod: int) -> tuple[int, GpuNodeSpec]:
        version, spec = seen
        found = ledger.prolong(spec, PodUid(f"pod-p{pod}"), "2026-01-31T12:00:20Z")
        assert [r.gpu_uuids for r in found.reservations] == [r.gpu_uuids for r in spec.reservations]
        return version, found

    @rule(write=consumes(decided))
    def write(self, write: tuple[int, GpuNodeSpec]) -> None:
        self._write(*write)

    @rule(write=decided)
    def write_and_lose_the_answer(self, write: tuple[int, GpuNodeSpec]) -> None:
        """Whoever wrote does not know it, and writes the same again."""
        self._write(*write)
        self._write(*write)

    def _write(self, version: int, spec: GpuNodeSpec) -> None:
        if version == self.version and spec is not self.spec:  # the API server refuses the others
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
            amounts = [r.tenant.memory_mib for r in here]
            assert None not in amounts or len(here) == 1
            assert sum(amount or 0 for amount in amounts) <= USABLE_MIB
            assert ledger.promised_mib(here, USABLE_MIB) <= USABLE_MIB


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
