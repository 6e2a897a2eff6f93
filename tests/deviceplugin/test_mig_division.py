"""Who gets which MIG instance, decided without a GPU: whatever is there, and whatever is wanted."""

from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode
from carpool_deviceplugin.devices.gpu import CreateInstance, DestroyInstance, GpuActual, Part
from carpool_deviceplugin.mig.layout import Instance, Occupied, Placement, occupied
from carpool_deviceplugin.mig.profiles import MigTable
from carpool_deviceplugin.partitions.division import divide
from carpool_deviceplugin.testing.mig_tables import A30, A100_40
from hypothesis import given, settings
from hypothesis import strategies as st

PODS = [PodUid(f"uid-{name}") for name in "abcde"]


def wanted(pod: PodUid, profile: str) -> Reservation:
    return Reservation(
        pod_uid=pod,
        pod_namespace="default",
        pod_name=pod,
        job_uid=JobUid(pod),
        job_name=pod,
        gpu_uuids=[GpuUuid("GPU-1")],
        mode=SharingMode.MIG,
        mig_profile=profile,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[MigTable, list[Part], list[Reservation]]:
    """A GPU with some instances, and reservations in the order in which they count."""
    table = draw(st.sampled_from([A100_40, A30]))
    places = [Placement(p, start) for p in table.profiles for start in p.starts]
    parts, taken, owners = [], Occupied(), draw(st.permutations(PODS))
    for number, place in enumerate(draw(st.lists(st.sampled_from(places), max_size=6))):
        if not taken.fits(place):
            continue
        taken = taken.plus(place)
        is_ours, is_used = draw(st.booleans()), draw(st.booleans())
        pod = owners.pop() if is_ours and owners and draw(st.booleans()) else None
        users = frozenset({pod} if is_used and pod else ())
        parts.append(Part(Instance(number, place), is_ours, pod, users, is_used))
    pods = draw(st.lists(st.sampled_from(PODS), unique=True, max_size=5))
    names = st.sampled_from([p.name for p in table.profiles])
    return table, parts, [wanted(pod, draw(names)) for pod in pods]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_everybody_gets_one_answer_and_nothing_is_taken_from_anybody(case) -> None:
    table, parts, granted = case
    actual = GpuActual(GpuUuid("GPU-1"), 1, frozenset(), parts=tuple(parts), mig_table=table)
    found = divide(actual, table, granted)
    answers = [*found.ready, *found.waiting, *found.refused]
    assert sorted(answers) == sorted(r.pod_uid for r in granted), "one answer for each"
    there = {p.instance.placement: p for p in parts}
    given_to = {p.pod_uid: p.instance.placement for p in parts if p.is_ours and p.pod_uid}
    for step in found.steps:
        if isinstance(step, DestroyInstance):
            gone = there.pop(step.placement)
            assert gone.is_ours
            assert not gone.is_used
            assert gone.pod_uid not in found.ready or given_to[gone.pod_uid] == gone.instance.placement
            given_to.pop(gone.pod_uid, None)
        else:
            assert isinstance(step, CreateInstance)
            if step.placement not in there:
                assert occupied(there).fits(step.placement), "the steps can be taken in this order"
            elif (old := there[step.placement]).pod_uid != step.pod_uid:
                assert not old.is_used or step.pod_uid in old.users
            there[step.placement] = Part(Instance(99, step.placement), True, step.pod_uid)
            given_to[step.pod_uid] = step.placement
    occupied(there)
    profiles = {r.pod_uid: r.mig_profile for r in granted}
    for pod in found.ready:
        assert given_to[pod].profile.name == profiles[pod]
        assert given_to[pod] in there
    assert len({given_to[pod] for pod in found.ready}) == len(found.ready), "no two share an instance"
    for reason in (*found.waiting.values(), *found.refused.values()):
        assert "GPU GPU-1" in reason
    mine = [p for p in there.values() if p.is_ours and not p.is_used]
    assert {p.instance.placement for p in mine} <= {given_to[pod] for pod in found.ready}, "nothing idle is kept"
