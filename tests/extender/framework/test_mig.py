"""MIG instances: the smallest that holds a job, beside those that are there, and refusals with numbers."""

import msgspec
import pytest
from carpool_core.products import nvml_table
from carpool_core.resources.node import GpuNodeSpec
from carpool_core.values import RequestedMode, SharingMode, Tenancy
from carpool_extender.cache import ledger
from carpool_extender.cache.gpu_table import mig_capacity, mig_profile, mig_profiles, mig_slices, smallest_mig_profile
from carpool_extender.framework.diagnosis import headroom
from carpool_extender.framework.selection import CachedEvaluation, best_place, filter_nodes, place_on_node
from carpool_extender.testing import cluster, device, gpu_node, pod_request, prediction, tenant
from evaluations import RULES, evaluate
from hypothesis import given
from hypothesis import strategies as st

A100 = ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"]
MODES = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS, SharingMode.MIG]
GPU = "GPU-a-0"


def divisible(*held, count=1):
    return gpu_node("a", [device(i, modes=MODES, mig_profiles=A100) for i in range(count)], held)


def instance(name, profile, gpu=GPU):
    return msgspec.structs.replace(tenant(name, [gpu], SharingMode.MIG, memory_limit_mib=100), mig_profile=profile)


def wanting(memory_mib=4000, sm=0.1, **more):
    return pod_request(mode=RequestedMode.MIG, prediction=prediction(memory_mib=memory_mib, sm=sm), **more)


@pytest.mark.parametrize(
    ("need_mib", "sm", "expected"),
    [
        pytest.param(4000, 0.1, "1g.5gb", id="the smallest"),
        pytest.param(4500, 0.1, "1g.10gb", id="more memory than the name promises for sure"),
        pytest.param(4000, 0.3, "3g.20gb", id="as many SMs as it fills"),
        pytest.param(4000, 0.25, "2g.10gb", id="no more than that"),
        pytest.param(20000, 1.0, "7g.40gb", id="the whole"),
        pytest.param(None, 0.1, "7g.40gb", id="nothing bounds its memory"),
        pytest.param(40000, 0.1, None, id="none holds it"),
    ],
)
def test_the_smallest_profile_that_holds_a_job(need_mib, sm, expected):
    found = smallest_mig_profile(A100, need_mib, sm)
    assert (found.name if found else None) == expected


def test_only_plain_profiles_are_placed():
    assert [p.name for p in mig_profiles(A100)] == ["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"]
    assert mig_capacity(A100) == (8, 7)
    assert mig_capacity([]) == (0, 0)
    assert mig_profile("1c.2g.10gb") is mig_profile(None) is mig_profile("g.5gb") is None


PUBLISHED = [gpu.mig for gpu in nvml_table().gpus if gpu.mig]


@pytest.mark.parametrize("names", PUBLISHED, ids=lambda names: names[-1])
def test_a_gpu_has_room_for_as_many_instances_as_nvidia_lists(names):
    """Regression: the fourth 1g.24gb of an H100 NVL, 1g.47gb of a GB200 and 1g.70gb of a GB300 were refused."""
    room = [7, 4, 3, 2, 1, 1] if names[-1].startswith("7g") else [4, 2, 1]
    node = gpu_node("a", [device(0, modes=MODES, mig_profiles=names)], [])
    for profile, most in zip(names, room, strict=True):
        spec, found = GpuNodeSpec(), []
        for number in range(most + 1):
            found.append(ledger.reserve(spec, instance(f"p{number}", profile), ledger.capacity_of(node, 8)))
            spec = spec if isinstance(found[-1], ledger.Rejected) else found[-1]
        assert [isinstance(one, ledger.Rejected) for one in found] == [False] * most + [True], profile


def test_a_place_names_the_profile_and_limits_nothing_else():
    chosen = place_on_node(evaluate(divisible(), wanting()), "a")
    assert (chosen.mode, chosen.mig_profile) == (SharingMode.MIG, "1g.5gb")
    assert (chosen.memory_limit_mib, chosen.thread_percentage, chosen.expected_slowdown) == (None, None, 1.0)
    assert "MIG as the job asks" in chosen.reason


def test_instances_share_a_gpu_until_slices_or_memory_run_out():
    node = divisible(instance("x", "4g.20gb"), instance("y", "2g.10gb"))
    assert place_on_node(evaluate(node, wanting()), "a").mig_profile == "1g.5gb"
    refused = filter_nodes(evaluate(node, wanting(sm=0.3)), ["a"]).refused
    sentence = "its MIG instances take 6 of 7 compute slices and 6 of 8 memory slices, which leave no room for 3g.20gb"
    assert refused == {"a": f"NoGpuFits: 1 GPU: {sentence}"}


def test_headroom_of_an_instance_names_taken_slices_and_memory():
    evaluation = evaluate(divisible(instance("x", "3g.20gb")), wanting(sm=0.25)).evaluation
    assert headroom(evaluation, 0) == [
        "tenant 2 of at most 8",
        "2g.10gb beside 3 of 7 compute slices and 4 of 8 memory slices taken",
    ]


def test_a_shared_gpu_is_not_divided():
    shared = cluster(divisible(tenant("x", [GPU]))).snapshot()
    assert filter_nodes(CachedEvaluation(wanting(), RULES, shared), ["a"]).fits == []


def auto(memory_mib=4000, sm=0.1, **more):
    return pod_request(prediction=prediction(memory_mib=memory_mib, sm=sm), **more)


def stranger(name, profile):
    """A tenant of another namespace, in an instance."""
    made = tenant(name, [GPU], SharingMode.MIG, namespace="other", tenancy=Tenancy.CLUSTER, memory_limit_mib=100)
    return msgspec.structs.replace(made, mig_profile=profile)


def mode_of(node, wants):
    found = place_on_node(evaluate(node, wants), "a")
    return found if isinstance(found, str) else (found.mode, found.mig_profile)


CLUSTER = {"tenancy": Tenancy.CLUSTER}


@pytest.mark.parametrize(
    ("wants", "expected"),
    [
        pytest.param(auto(), (SharingMode.MPS, None), id="its own namespace: side by side"),
        pytest.param(auto(**CLUSTER), (SharingMode.MIG, "1g.5gb"), id="with any tenant: kept apart"),
        pytest.param(auto(sm=0.9, **CLUSTER), (SharingMode.MPS, None), id="an instance that leaves room for no other"),
        pytest.param(auto(gpus=2, **CLUSTER), (SharingMode.TIME_SLICING, None), id="several GPUs reach one instance"),
        pytest.param(pod_request(prediction=None, **CLUSTER), (SharingMode.EXCLUSIVE, None), id="nothing is known"),
    ],
)
def test_auto_divides_an_idle_gpu_for_jobs_that_share_with_other_namespaces(wants, expected):
    assert mode_of(divisible(count=2), wants) == expected


def test_tenants_of_two_namespaces_meet_in_instances_and_nowhere_else():
    first = place_on_node(evaluate(divisible(), auto(**CLUSTER)), "a")
    assert "MIG as other namespaces may join, each in an instance of its own" in first.reason
    second = place_on_node(evaluate(divisible(stranger("y", "1g.5gb")), auto(**CLUSTER)), "a")
    assert (second.mode, second.mig_profile, second.expected_slowdown) == (SharingMode.MIG, "1g.5gb", 1.0)
    assert "beside other/y" in second.reason
    assert "MIG as its tenants have it" in second.reason
    refused = mode_of(divisible(stranger("y", "1g.5gb")), auto())
    assert refused == "NoGpuFits: 1 GPU: used from namespace other, and not all are willing to share across namespaces"


@pytest.mark.parametrize(
    ("wants", "reason"),
    [
        pytest.param({}, None, id="an instance beside"),
        pytest.param({"memory_mib": 38000}, "divided by MIG, and no instance holds 38,000 MiB", id="too large"),
        pytest.param({"gpus": 2}, "shared by MIG, and a process of several GPUs reaches only one MIG instance", id="2"),
    ],
)
def test_a_divided_gpu_takes_each_job_that_an_instance_holds(wants, reason):
    node = divisible(instance("x", "1g.5gb"), instance("y", "1g.5gb", "GPU-a-1"), count=2)
    found = mode_of(node, auto(**wants))
    assert found == ((SharingMode.MIG, "1g.5gb") if reason is None else f"NoGpuFits: 2 GPUs: {reason}")


def test_changing_a_mode_comes_after_leaving_one_on_every_node():
    """Regression: of two idle GPUs on different nodes the first was taken, whatever mode it was in."""
    profiled = {"modes": MODES, "mig_profiles": A100}
    snapshot = cluster(
        gpu_node("a", [device(0, "a", mode=SharingMode.MIG, **profiled)]),
        gpu_node("b", [device(0, "b", mode=SharingMode.MPS, **profiled)]),
        gpu_node("c", [device(0, "c", **profiled)]),
    ).snapshot()
    assert best_place(CachedEvaluation(auto(), RULES, snapshot))[0] == "b"
    assert best_place(CachedEvaluation(auto(**CLUSTER), RULES, snapshot))[0] == "a"
    assert best_place(CachedEvaluation(pod_request(prediction=None), RULES, snapshot))[0] == "c"


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node("a"), {}, "offers no MIG instances", id="a GPU that cannot"),
        pytest.param(
            divisible(), {"memory_mib": 38000}, "no MIG profile holds 38,000 MiB, there are 1g.5gb", id="none"
        ),
        pytest.param(divisible(count=2), {"gpus": 2}, "its agent can prepare no sharing mode for this job", id="two"),
    ],
)
def test_what_can_never_be_is_refused_with_a_sentence(node, wants, expected):
    found = filter_nodes(evaluate(node, wanting(**wants)), ["a"])
    reasons = {**found.refused, **found.unsuitable}
    assert expected in reasons["a"]


PROFILES = st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", "9g.90gb", None])


@given(st.lists(st.tuples(st.integers(0, 9), PROFILES), max_size=20))
def test_the_ledger_never_promises_more_slices_or_memory_than_there_are(asked):
    spec, capacity = GpuNodeSpec(), ledger.capacity_of(divisible(), 8)
    for pod, profile in asked:
        found = ledger.reserve(spec, instance(f"p{pod}", profile), capacity)
        spec = spec if isinstance(found, ledger.Rejected) else found
        held = [mig_profile(r.mig_profile) for r in spec.reservations]
        assert None not in held
        assert sum(one.slices for one in held) <= 7
        assert sum(mig_slices(one, A100)[0] for one in held) <= 8
