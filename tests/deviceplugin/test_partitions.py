"""Planning the steps of one GPU."""

from dataclasses import replace
from typing import Any

import pytest
from agent_world import reservation
from carpool_core.resources.node import Reservation, TenantProfile
from carpool_core.values import GpuUuid, PodUid
from carpool_deviceplugin.gpu import (
    CreateInstance,
    DestroyInstance,
    GpuActual,
    Limits,
    MigInstance,
    SetLimits,
    SetMode,
    StartMps,
    StopMps,
)
from carpool_deviceplugin.mig import Instance, MigTable, OccupiedSlices, Placement, occupied
from carpool_deviceplugin.partitions import divide, plan
from carpool_deviceplugin.testing.gpus import A30, A100_40
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import EXCLUSIVE, IDLE, MIG, MPS, SHARED, SLICED, TIME_SLICING, A, B

ALONE, SLICE = [("a", EXCLUSIVE, {})], [("a", TIME_SLICING, {})]
OF_A, OF_B = ("a", MPS, {"memory_limit_mib": 10_000}), ("b", MPS, {})
HALF = ("a", MPS, {"memory_limit_mib": 10_000, "thread_percentage": 50})
NEW_DAEMON = (StopMps(), StartMps(), SetLimits(B, Limits()))


def shared(**changes: Any) -> GpuActual:
    """A GPU in mode MPS on which pod A has limits."""
    return replace(SHARED, **changes)


def used(**changes: Any) -> GpuActual:
    """The same with a process of pod A."""
    return shared(tenants=frozenset({A}), **changes)


@pytest.mark.parametrize(
    ("actual", "wanted", "steps"),
    [
        pytest.param(IDLE, [], (), id="idle-stays-idle"),
        pytest.param(IDLE, ALONE, (SetMode(EXCLUSIVE),), id="first-tenant"),
        pytest.param(SLICED, SLICE, (), id="nothing-to-do"),
        pytest.param(SLICED, [], (SetMode(None),), id="returned"),
        pytest.param(SLICED, ALONE, (SetMode(EXCLUSIVE),), id="empty-changes-mode"),
        pytest.param(IDLE, [HALF], (SetMode(MPS), StartMps(), SetLimits(A, Limits(10_000, 50))), id="mps-from-idle"),
        pytest.param(used(), [OF_A, OF_B], (SetLimits(B, Limits()),), id="second-mps-tenant-joins"),
        pytest.param(shared(), [OF_B], NEW_DAEMON, id="mps-tenant-replaced"),
        pytest.param(shared(limits={}), [OF_B], NEW_DAEMON, id="mps-daemon-without-limits"),
        pytest.param(shared(mps_daemon=False), [OF_B], NEW_DAEMON, id="tenant-replaced-behind-a-daemon-that-died"),
        pytest.param(shared(), [OF_A, OF_B], (SetLimits(B, Limits()),), id="second-joins-before-the-first-runs"),
        pytest.param(shared(), [OF_A], (), id="mps-nothing-to-do"),
        pytest.param(shared(), [], (StopMps(), SetMode(None)), id="mps-returned"),
        pytest.param(used(), [], (), id="mps-returned-under-its-client"),
        pytest.param(shared(), ALONE, (StopMps(), SetMode(EXCLUSIVE)), id="mps-to-exclusive"),
        pytest.param(shared(mps_daemon=False), [OF_A], (StartMps(),), id="daemon-died"),
        pytest.param(used(mps_daemon=False, mps_servers_left=True), [OF_A], (), id="daemon-died-under-its-clients"),
        pytest.param(shared(mps_hung=True), [OF_A], (StopMps(), StartMps(), SetLimits(A, Limits(10_000, None))),
                     id="daemon-hangs-without-clients"),
        pytest.param(used(mps_hung=True), [OF_A], (), id="daemon-hangs-under-its-clients"),
        pytest.param(replace(IDLE, mode=MPS, mps_servers_left=True), ALONE, (StopMps(), SetMode(EXCLUSIVE)),
                     id="daemon-died-and-its-server-did-not"),
        pytest.param(replace(SLICED, mps_servers_left=True), SLICE, (StopMps(),), id="server-of-an-earlier-mode"),
        pytest.param(replace(IDLE, mps_servers_left=True), [], (StopMps(),), id="server-on-an-idle-gpu"),
        pytest.param(replace(IDLE, mode=MPS, mps_cleanup_pending=True), [], (StopMps(), SetMode(None)),
                     id="stop-of-mps-begun-and-not-ended"),
        pytest.param(replace(SLICED, mps_cleanup_pending=True), SLICE, (StopMps(),), id="stop-begun-before-this-mode"),
    ],
)  # fmt: skip
def test_shortest_steps(reserve, actual, wanted, steps) -> None:
    reservations = [reserve(pod, mode=mode, **more) for pod, mode, more in wanted]
    planned = plan(actual, reservations)
    assert planned.steps == steps
    assert sorted(planned.ready) == sorted(r.pod_uid for r in reservations)
    assert not planned.refused
    assert not planned.waiting


TWO = [("a", EXCLUSIVE, {}), ("b", EXCLUSIVE, {})]
TWO_MODES = [("a", MPS, {}), ("b", TIME_SLICING, {})]
NAMESPACES = [("a", MPS, {}), ("b", MPS, {"pod_namespace": "other"})]
GROUPS = [
    ("a", MPS, {"tenancy_group": "research"}),
    ("b", MPS, {"pod_namespace": "other", "tenancy_group": "research"}),
    ("c", MPS, {"tenancy_group": "default"}),
]
TOO_MUCH = [("a", MPS, {"memory_limit_mib": 30_000}), ("b", MPS, {"memory_limit_mib": 10_001})]
LARGE = [("a", MPS, {"memory_limit_mib": 40_001})]
USED_BY_B = replace(SLICED, tenants=frozenset({B}))


@pytest.mark.parametrize(
    ("actual", "wanted", "held", "refused", "message"),
    [
        pytest.param(IDLE, TWO, [], B, "is Exclusive for default/a", id="two-exclusive"),
        pytest.param(IDLE, TWO_MODES, [], B, "is MPS for default/a", id="two-modes"),
        pytest.param(IDLE, TWO, [B], A, "is Exclusive for default/b", id="promised-first"),
        pytest.param(
            USED_BY_B, [*ALONE, ("b", TIME_SLICING, {})], [A], A, "is TimeSlicing for default/b", id="running-first"
        ),
        pytest.param(IDLE, NAMESPACES, [], B, "serves namespace default, found namespace other", id="mps-namespaces"),
        pytest.param(IDLE, GROUPS, [], "uid-c", "group research, found tenancy group default", id="mps-tenancy-groups"),
        pytest.param(IDLE, TOO_MUCH, [], B, "has 10,000 of 40,000 MiB", id="mps-overcommitted"),
        pytest.param(IDLE, [("a", MIG, {"mig_profile": "1g.5gb"})], [], A, "expected a mode out of", id="mig"),
        pytest.param(IDLE, LARGE, [], A, "expected a limit of at most 40,000", id="too-large"),
        pytest.param(replace(IDLE, problem="it is hot"), [("a", MPS, {})], [], A, "it is hot", id="unhealthy"),
    ],
)
def test_refusals(reserve, actual, wanted, held, refused, message) -> None:
    planned = plan(actual, [reserve(pod, mode=mode, **more) for pod, mode, more in wanted], frozenset(held))
    assert list(planned.refused) == [refused]
    assert message in planned.refused[refused]
    assert len(planned.ready) == len(wanted) - 1


def measured(reserve, measured_mib: int | None = 10_000) -> list[Reservation]:
    """A may take 30,000 MiB and was measured to take less; so B was let in, which may take 25,000."""
    tenant = TenantProfile(memory_mib=30_000, measured_mib=measured_mib)
    return [
        reserve("a", mode=MPS, memory_limit_mib=30_000, tenant=tenant),
        reserve("b", mode=MPS, memory_limit_mib=25_000),
    ]


def test_measured_peaks_count_for_new_pods(reserve) -> None:
    beside_a = used(limits={A: Limits(30_000, None)})
    held = frozenset({A})
    assert plan(beside_a, measured(reserve), held, {A: 9_000}).ready == (A, B)
    for found in (
        plan(beside_a, measured(reserve), held, {A: 10_001}),
        plan(beside_a, measured(reserve, None), held, {A: 9_000}),
    ):
        assert found.ready == (A,)
        assert "has 10,000 of 40,000 MiB that are not promised, found a limit of 25,000" in found.refused[B]


@pytest.mark.parametrize("there", [{A}, {B}, {A, B}, set()], ids=["a", "b", "both", "none"])
@pytest.mark.parametrize("peak_mib", [9_000, 20_000])
@pytest.mark.parametrize("is_agent_new", [True, False], ids=["next agent", "same agent"])
def test_admitted_pods_stay(reserve, there, peak_mib, is_agent_new) -> None:
    """Regression: while A had no process for a moment, B came first, and A's limits did not go beside it."""
    limits = {A: Limits(30_000, None), B: Limits(25_000, None)}
    before = shared(limits=limits, tenants=frozenset(there))
    held = frozenset(there if is_agent_new else limits)
    found = plan(before, measured(reserve), held, {A: peak_mib})
    if held == limits.keys():
        assert (set(found.ready), found.steps, found.refused) == ({A, B}, (), {})
    else:
        assert there <= set(found.ready)


def test_higher_limit_is_checked_again(reserve) -> None:
    before = shared(limits={A: Limits(5_000, None), B: Limits(25_000, None)}, tenants=frozenset({B}))
    found = plan(before, measured(reserve, None), frozenset({A, B}))
    assert (found.ready, list(found.refused)) == ((B,), [A])


@pytest.mark.parametrize(("mode", "one"), [(MPS, "MPS daemon"), (MIG, "MIG instance")])
def test_mps_and_mig_over_several_gpus_are_refused(reserve, mode, one: str) -> None:
    planned = plan(replace(IDLE, modes=IDLE.modes | {MIG}), [reserve("a", "GPU-1", "GPU-2", mode=mode)])
    assert f"expected one GPU with {mode}, found 2; a process reaches only one {one}, which" in planned.refused[A]


def test_unhealthy_gpu_keeps_its_pods(reserve) -> None:
    sick = replace(SLICED, problem="it is hot", tenants=frozenset({A}))
    planned = plan(sick, [reserve("a"), reserve("b")])
    assert (planned.ready, list(planned.refused)) == ((A,), [B])


@pytest.mark.parametrize("mode", [EXCLUSIVE, TIME_SLICING, MPS])
def test_new_pod_waits_for_leaving_pods(reserve, mode) -> None:
    planned = plan(replace(SLICED, tenants=frozenset({A})), [reserve("b", mode=mode)])
    assert (planned.steps, planned.ready) == ((), ())
    assert planned.waiting == {B: "waits for the processes of pod uid-a to leave GPU GPU-1"}


PODS = [PodUid(f"uid-{name}") for name in "abcde"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[MigTable, list[MigInstance], list[Reservation]]:
    """A GPU with some instances, and reservations in the order in which they count."""
    table = draw(st.sampled_from([A100_40, A30]))
    places = [Placement(p, start) for p in table.profiles for start in p.starts]
    mig_instances, taken, owners = [], OccupiedSlices(), draw(st.permutations(PODS))
    for number, place in enumerate(draw(st.lists(st.sampled_from(places), max_size=6))):
        if not taken.fits(place):
            continue
        taken = taken.plus(place)
        is_managed, is_used = draw(st.booleans()), draw(st.booleans())
        pod = owners.pop() if is_managed and owners and draw(st.booleans()) else None
        users = frozenset({pod} if is_used and pod else ())
        mig_instances.append(MigInstance(Instance(number, place), is_managed, pod, users, is_used))
    pods = draw(st.lists(st.sampled_from(PODS), unique=True, max_size=5))
    names = st.sampled_from([p.name for p in table.profiles])
    return table, mig_instances, [reservation(pod[4:], mode=MIG, mig_profile=draw(names)) for pod in pods]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_mig_division_answers_each_pod_and_takes_no_instance(case) -> None:
    table, mig_instances, granted = case
    actual = GpuActual(GpuUuid("GPU-1"), 1, frozenset(), mig_instances=tuple(mig_instances), mig_table=table)
    found = divide(actual, table, granted)
    answers = [*found.ready, *found.waiting, *found.refused]
    assert sorted(answers) == sorted(r.pod_uid for r in granted), "one answer for each"
    there = {p.instance.placement: p for p in mig_instances}
    given_to = {p.pod_uid: p.instance.placement for p in mig_instances if p.is_managed and p.pod_uid}
    for step in found.steps:
        if isinstance(step, DestroyInstance):
            gone = there.pop(step.placement)
            assert gone.is_managed
            assert not gone.is_used
            assert gone.pod_uid not in found.ready or given_to[gone.pod_uid] == gone.instance.placement
            given_to.pop(gone.pod_uid, None)
        else:
            assert isinstance(step, CreateInstance)
            if step.placement not in there:
                assert occupied(there).fits(step.placement), "the steps can be taken in this order"
            elif (old := there[step.placement]).pod_uid != step.pod_uid:
                assert not old.is_used or step.pod_uid in old.users
            there[step.placement] = MigInstance(Instance(99, step.placement), True, step.pod_uid)
            given_to[step.pod_uid] = step.placement
    occupied(there)
    profiles = {r.pod_uid: r.mig_profile for r in granted}
    for pod in found.ready:
        assert given_to[pod].profile.name == profiles[pod]
        assert given_to[pod] in there
    assert len({given_to[pod] for pod in found.ready}) == len(found.ready), "no two share an instance"
    for reason in (*found.waiting.values(), *found.refused.values()):
        assert "GPU GPU-1" in reason
    mine = [p for p in there.values() if p.is_managed and not p.is_used]
    assert {p.instance.placement for p in mine} <= {given_to[pod] for pod in found.ready}, "nothing idle is kept"
