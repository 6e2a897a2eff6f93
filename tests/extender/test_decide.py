"""Checks, modes, policies and refusals, over tables of GPUs and their tenants."""

import msgspec
import numpy as np
import pytest
from carpool_core.resources.node import LONGEST_REASON
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode, Tenancy
from carpool_extender.assessments import Assessment
from carpool_extender.checks import PASSED, Check, examine
from carpool_extender.decide import explain, filter_nodes, place, score_nodes
from carpool_extender.policies import POLICIES, UnknownPolicyError, find_policy
from carpool_extender.rules import Rules
from carpool_extender.testing import A100, T4, applicant, cluster, device, gpu_node, prediction, tenant
from hypothesis import given
from hypothesis import strategies as st

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
RULES = Rules(find_policy("least-slowdown"), slots=8)
GPU = "GPU-a-0"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}
NO_MPS = [ALONE, TURNS]


def scored(assessment, names):
    return dict(zip(names, score_nodes(assessment, names).tolist(), strict=True))


def verdict_on(node, slots=8, **changes):
    return examine(cluster(node).view(), applicant(**changes), slots)


CASES = [
    pytest.param(gpu_node(), {}, None, MPS, id="an idle GPU takes a known job by MPS"),
    pytest.param(gpu_node(), {"prediction": None}, None, ALONE, id="an unknown job gets the whole GPU"),
    pytest.param(
        gpu_node(),
        {"prediction": prediction(products=[T4])},
        None,
        ALONE,
        id="a job that is unknown on this product gets the whole GPU",
    ),
    pytest.param(
        gpu_node(), {"prediction": None, "memory_limit_mib": 9000}, None, MPS, id="the user's own limit is known"
    ),
    pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, None, TURNS, id="turns where the device cannot do better"),
    pytest.param(gpu_node("a", [device(modes=[ALONE])]), {}, None, ALONE, id="alone where the device can do nothing"),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU])]), {}, None, MPS, id="MPS beside MPS"),
    pytest.param(
        gpu_node("a", 2), {"gpus": 2}, None, TURNS, id="a process of several GPUs reaches only one MPS daemon"
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]), {"gpus": 2}, Check.MODE, None, id="nor does it join others by MPS"
    ),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], TURNS)]), {}, None, TURNS, id="turns beside turns"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], ALONE)]), {}, Check.MODE, None, id="nobody beside an exclusive tenant"
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"prediction": None},
        Check.MODE,
        None,
        id="an unknown job beside nobody",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"mode": RequestedMode.TIME_SLICING},
        Check.MODE,
        None,
        id="no turns beside MPS",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU])]),
        {"mode": RequestedMode.EXCLUSIVE},
        Check.MODE,
        None,
        id="no exclusive use beside a tenant",
    ),
    pytest.param(gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)]), {}, Check.HEALTH, None, id="an unhealthy GPU"),
    pytest.param(gpu_node(), {"product": "T4"}, Check.SUITABLE, None, id="the wrong product"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], namespace="other")]), {}, Check.TENANCY, None, id="another namespace"
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {},
        Check.TENANCY,
        None,
        id="the newcomer keeps to its namespace",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other")]),
        {"tenancy": Tenancy.CLUSTER},
        Check.TENANCY,
        None,
        id="the neighbour keeps to its namespace",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {"tenancy": Tenancy.CLUSTER},
        None,
        TURNS,
        id="both are willing",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], MPS, namespace="other", tenancy=Tenancy.CLUSTER)]),
        {"tenancy": Tenancy.CLUSTER},
        Check.TENANCY,
        None,
        id="never one MPS server for two namespaces",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant(f"t{i}", [GPU], memory_limit_mib=1) for i in range(8)]),
        {},
        Check.SLOTS,
        None,
        id="all places taken",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], memory_limit_mib=37000)]), {}, Check.MEMORY, None, id="memory is taken"
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], memory_limit_mib=36960)]), {}, None, MPS, id="memory fits exactly"
    ),
    pytest.param(
        gpu_node("a", [device(reserved_mib=1)], [tenant("x", [GPU], memory_limit_mib=36960)]),
        {},
        Check.MEMORY,
        None,
        id="the reserve is nobody's",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], TURNS, prediction=None)]),
        {"mode": RequestedMode.TIME_SLICING},
        Check.MEMORY,
        None,
        id="a neighbour of unknown memory holds the whole GPU",
    ),
    pytest.param(gpu_node("a", 1, [tenant("x", [GPU], **BUSY)]), BUSY, Check.SLOWDOWN, None, id="both are too busy"),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], **BUSY, max_slowdown=1.1)]),
        {"max_slowdown": 10.0},
        Check.SLOWDOWN,
        None,
        id="the neighbour's own limit counts",
    ),
    pytest.param(
        gpu_node("a", 1, [tenant("x", [GPU], **BUSY, max_slowdown=10.0)]),
        BUSY | {"max_slowdown": 2.0},
        None,
        MPS,
        id="both accept it",
    ),
]


@pytest.mark.parametrize(("node", "wants", "failed", "mode"), CASES)
def test_checks(node, wants, failed, mode):
    found = verdict_on(node, **wants)
    assert found.ok[0] == (failed is None)
    assert found.found.failed[0] == (PASSED if failed is None else failed)
    if failed is not None:
        assert found.margins(failed, np.array([0]))[0] < 0
    else:
        assert all(found.margins(check, np.array([0]))[0] >= -1e-6 for check in Check)
        chosen = place(Assessment(found.applicant, RULES, found.view), "a")
        assert chosen.mode is mode
        assert chosen.gpu_uuids[0] == GPU
        assert len(chosen.gpu_uuids) == wants.get("gpus", 1)


def test_an_mps_newcomer_is_held_to_what_it_fills_and_the_first_is_not():
    first = place(Assessment(applicant(), RULES, cluster(gpu_node()).view()), "a")
    later = place(Assessment(applicant(), RULES, cluster(gpu_node("a", 1, [tenant("x", [GPU])])).view()), "a")
    assert (first.memory_limit_mib, first.thread_percentage) == (4000, 100)
    assert (later.memory_limit_mib, later.thread_percentage) == (4000, 60)  # 0.3 of the SMs in half of the time


@pytest.mark.parametrize(
    ("util", "sm", "expected"), [(100, 0.3, 30), (100, 0.301, 35), (50, 0.3, 60), (10, 0.3, 100), (100, 0.0, 5)]
)
def test_thread_percentage_is_never_below_the_prediction(util, sm, expected):
    facts = applicant(prediction=prediction(util=util, sm=sm)).facts(cluster(gpu_node()).view().classes[0])
    assert facts.thread_percentage == expected


@pytest.mark.parametrize("mode", [RequestedMode.TIME_SLICING, RequestedMode.EXCLUSIVE])
def test_no_limits_where_nothing_enforces_them(mode):
    chosen = place(Assessment(applicant(mode=mode), RULES, cluster(gpu_node()).view()), "a")
    assert (chosen.memory_limit_mib, chosen.thread_percentage) == (None, None)


@pytest.mark.parametrize(
    ("node", "wants", "expected"),
    [
        pytest.param(gpu_node(), {}, "MPS as memory is limited and kernels run side by side", id="MPS"),
        pytest.param(gpu_node(), {"mode": RequestedMode.TIME_SLICING}, "TimeSlicing as the job asks", id="asked for"),
        pytest.param(
            gpu_node("a", 1, [tenant("x", [GPU], TURNS)]), {}, "TimeSlicing as its tenants have it", id="there"
        ),
        pytest.param(gpu_node(), {"prediction": None}, "Exclusive as nothing bounds its memory", id="unknown"),
        pytest.param(gpu_node("a", [device(modes=NO_MPS)]), {}, "TimeSlicing as the device has no MPS", id="no MPS"),
        pytest.param(
            gpu_node("a", [device(modes=[ALONE])]), {}, "Exclusive as the device can do nothing else", id="nothing else"
        ),
        pytest.param(
            gpu_node("a", 2),
            {"gpus": 2},
            "TimeSlicing as a process of several GPUs reaches only one MPS daemon",
            id="several GPUs",
        ),
    ],
)
def test_the_reason_says_why_this_mode(node, wants, expected):
    assert expected in place(Assessment(applicant(**wants), RULES, cluster(node).view()), "a").reason.split("; ")


def test_the_reason_says_that_the_policy_wants_every_job_alone():
    chosen = place(Assessment(applicant(), fit("exclusive"), cluster(gpu_node()).view()), "a")
    assert "Exclusive as the policy gives every job a GPU of its own" in chosen.reason


def test_an_idle_gpu_that_is_in_the_mode_already_is_taken_before_one_that_has_to_change():
    node = gpu_node("a", [device(0, mode=TURNS), device(1, mode=MPS), device(2, mode=TURNS)])
    known = cluster(node)
    assert place(Assessment(applicant(), RULES, known.view()), "a").gpu_uuids == ["GPU-a-1"]
    slicing = applicant(mode=RequestedMode.TIME_SLICING, gpus=2)
    assert place(Assessment(slicing, RULES, known.view()), "a").gpu_uuids == ["GPU-a-0", "GPU-a-2"]


# Policies


def fit(policy="least-slowdown"):
    return Rules(find_policy(policy), slots=8)


def test_a_job_that_disturbs_nobody_joins_the_gpu_with_the_least_left():
    known = cluster(
        gpu_node("a", 3, [tenant("x", ["GPU-a-1"], memory_limit_mib=8000), tenant("y", ["GPU-a-2"])]),
    )
    assert place(Assessment(applicant(), fit(), known.view()), "a").gpu_uuids == ["GPU-a-1"]
    assert place(Assessment(applicant(), fit("most-available-memory"), known.view()), "a").gpu_uuids == ["GPU-a-0"]


def test_a_job_that_would_disturb_takes_an_idle_gpu_and_the_reason_says_so():
    known = cluster(gpu_node("a", 2, [tenant("x", [GPU], **BUSY, max_slowdown=1.2)]))
    chosen = place(Assessment(applicant(**BUSY), fit(), known.view()), "a")
    assert chosen.gpu_uuids == ["GPU-a-1"]
    assert "passed over 1 GPU that had the memory: GPU 0 of a" in chosen.reason
    assert "would slow default/x to 1.90 of 1.20" in chosen.reason


def test_of_several_that_were_passed_over_the_closest_is_told():
    busy = [tenant(f"x{i}", [f"GPU-a-{i}"], **BUSY, max_slowdown=1.2 + i / 10) for i in range(2)]
    chosen = place(Assessment(applicant(**BUSY), fit(), cluster(gpu_node("a", 3, busy)).view()), "a")
    assert "passed over 2 GPUs that had the memory: the closest was GPU 1 of a" in chosen.reason


def test_several_gpus_of_one_worker_are_on_one_node_in_one_mode():
    known = cluster(
        gpu_node("a", 2, [tenant("x", ["GPU-a-0"], ALONE)]),
        gpu_node("b", 2, [tenant("y", ["GPU-b-1"], TURNS)]),
    )
    found = filter_nodes(Assessment(applicant(gpus=2), fit(), known.view()), ["a", "b"])
    assert found.fits == ["b"]
    chosen = place(Assessment(applicant(gpus=2), fit(), known.view()), "b")
    assert len(set(chosen.gpu_uuids)) == 2
    assert "GPU-b-1" in chosen.gpu_uuids


def test_modes_are_not_mixed_for_one_worker():
    node = gpu_node("a", [device(0, modes=[ALONE]), device(1)])
    found = filter_nodes(Assessment(applicant(gpus=2), fit(), cluster(node).view()), ["a"])
    assert found.fits == []
    assert found.refused["a"] == "NoGpuFits: needs 2 GPUs on one node in one mode, the best node has 1"


def test_scores_are_integers_from_0_to_10_and_the_best_gets_10():
    known = cluster(
        gpu_node("idle", 1),
        gpu_node("used", 1, [tenant("x", ["GPU-used-0"], memory_limit_mib=20000)]),
        gpu_node("busy", 1, [tenant("y", ["GPU-busy-0"], **BUSY)]),
        gpu_node("full", 1, [tenant("z", ["GPU-full-0"], ALONE)]),
    )
    names = ["idle", "used", "busy", "full", "elsewhere"]
    found = scored(Assessment(applicant(), fit(), known.view()), names)
    assert found["used"] == 10
    assert 6 <= found["idle"] < 10
    assert found["busy"] < 6
    assert found["full"] == found["elsewhere"] == 0
    assert scored(Assessment(applicant(), fit("most-available-memory"), known.view()), names)["idle"] == 10


def test_an_unknown_policy_names_the_choices():
    with pytest.raises(UnknownPolicyError, match="choose one of least-slowdown, most-available-memory"):
        find_policy("best")


gpus = st.lists(
    st.tuples(st.lists(st.integers(0, 30000), max_size=3), st.sampled_from([MPS, TURNS])), min_size=1, max_size=4
)


@pytest.mark.parametrize("policy", POLICIES)
@given(layout=st.lists(gpus, min_size=1, max_size=3), wanted=st.integers(1, 3), memory=st.integers(1, 50000))
def test_every_policy_keeps_the_promises(policy, layout, wanted, memory):
    nodes = [
        gpu_node(
            f"n{n}",
            len(row),
            [
                tenant(f"{n}-{g}-{t}", [f"GPU-n{n}-{g}"], mode, memory_limit_mib=m)
                for g, (tenants, mode) in enumerate(row)
                for t, m in enumerate(tenants)
            ],
        )
        for n, row in enumerate(layout)
    ]
    view, names = cluster(*nodes).view(), [node.metadata.name for node in nodes]
    newcomer = applicant(gpus=wanted, prediction=prediction(memory_mib=memory))
    found = filter_nodes(Assessment(newcomer, fit(policy), view), names)
    told = {**found.refused, **found.unsuitable}
    assert sorted([*found.fits, *told]) == sorted(names)
    assert len(set(told.values())) <= 1
    assert all(text.startswith("NoGpuFits: ") for text in told.values())
    scores = scored(Assessment(newcomer, fit(policy), view), names)
    assert all(0 <= score <= 10 for score in scores.values())
    assert bool(found.fits) == (max(scores.values()) == 10)
    for name in names:
        chosen = place(Assessment(newcomer, fit(policy), view), name)
        assert isinstance(chosen, str) == (name not in found.fits)
        if not isinstance(chosen, str):
            assert len(set(chosen.gpu_uuids)) == wanted
            mine = [int(np.flatnonzero(view.columns.uuid == uuid)[0]) for uuid in chosen.gpu_uuids]
            taken = view.columns.memory_mib.sum(axis=1)
            assert all(taken[row] + memory <= view.columns.usable_mib[row] for row in mine)


# Refusals


def test_one_sentence_for_all_nodes_with_numbers():
    known = cluster(
        gpu_node("a", 1, [tenant("x", ["GPU-a-0"], memory_limit_mib=31840)]),
        gpu_node("b", 1, [tenant("y", ["GPU-b-0"], **BUSY)]),
        gpu_node("c", [device(0, "c", product=T4)]),
    )
    newcomer = applicant(prediction=prediction(memory_mib=15500, util=100, sm=0.9))
    found = filter_nodes(Assessment(newcomer, fit(), known.view()), ["a", "b", "c", "d"])
    sentence = (
        "NoGpuFits: needs 15,500 MiB; freest Tesla T4 has 15,360 MiB total, "
        "another NVIDIA A100-SXM4-40GB has 9,120 MiB free; "
        "1 GPU: would slow default/y to 1.90 of 1.50; 1 node: no GPUs reported"
    )
    assert found.fits == []
    assert found.unsuitable == {"c": sentence, "d": sentence}
    assert found.refused == {"a": sentence, "b": sentence}


def test_the_freest_gpu_of_each_product():
    known = cluster(
        gpu_node("a", 2, [tenant(f"x{i}", [f"GPU-a-{i}"], memory_limit_mib=31840 + i) for i in range(2)]),
        gpu_node("c", [device(0, "c", product=T4)]),
        *(gpu_node(f"l{i}", [device(0, f"l{i}", product="NVIDIA L4")]) for i in range(3)),
    )
    newcomer = applicant(product=None, min_compute_capability="7.5", prediction=prediction(memory_mib=16000))
    found = filter_nodes(Assessment(newcomer, fit(), known.view()), ["a", "c"])
    assert found.refused["a"] == (
        "NoGpuFits: needs 16,000 MiB; freest Tesla T4 has 15,360 MiB total, "
        "freest NVIDIA A100-SXM4-40GB has 9,120 MiB free"
    )


SENTENCES = [
    pytest.param([], {}, "no node offered reports GPUs; is the node agent running there?", id="no GPUs"),
    pytest.param(
        [gpu_node(f"n{i}", [device(0, f"n{i}", product=T4)]) for i in range(20)],
        {"product": "A100"},
        "20 nodes: wrong product",
        id="wrong product",
    ),
    pytest.param(
        [gpu_node("a", 2)],
        {"min_memory_mib": 81920},
        "1 node: smaller than gpu.minMemory: wants a GPU of 81,920 MiB, has 40,960 MiB",
        id="a minimum that the user wrote down",
    ),
    pytest.param(
        [gpu_node("a", 1)],
        {"min_compute_capability": "9.0"},
        "1 node: compute capability 8.0, wants 9.0",
        id="too old",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU], ALONE)])],
        {"prediction": None},
        "1 GPU: used exclusively by default/x",
        id="exclusive",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU])])],
        {"prediction": None},
        "1 GPU: in use, and the job must be alone because its memory is not known",
        id="must be alone",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU], namespace="other")])],
        {},
        "1 GPU: its MPS server belongs to namespace other",
        id="MPS server",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant(f"t{i}", [GPU], memory_limit_mib=1) for i in range(8)])],
        {},
        "1 GPU: has 8 tenants, the most allowed is 8",
        id="places",
    ),
    pytest.param([gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)])], {}, "1 node: unhealthy", id="unhealthy"),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU], prediction=prediction(util=10, sm=0.05))])],
        BUSY | {"max_slowdown": 1.1, "prediction": prediction(util=100, sm=1.0)},
        None,
        id="joined without harm",
    ),
]


@pytest.mark.parametrize(("nodes", "wants", "expected"), SENTENCES)
def test_sentences(nodes, wants, expected):
    names = [node.metadata.name for node in nodes] or ["a"]
    found = filter_nodes(Assessment(applicant(**wants), RULES, cluster(*nodes).view()), names)
    told = set({**found.refused, **found.unsuitable}.values())
    assert told == (set() if expected is None else {f"NoGpuFits: {expected}"})


def test_explain_names_the_check_and_the_margin_of_every_gpu():
    node = gpu_node(
        "a", 3, [tenant("x", ["GPU-a-0"], memory_limit_mib=40000), tenant("y", ["GPU-a-1"], **BUSY, max_slowdown=1.1)]
    )
    assert [str(one) for one in explain(cluster(node).view(), applicant(**BUSY), ["a"], RULES)] == [
        f"GPU 0 of a ({A100}): needs 4,000 MiB, has 960 MiB free (3,040 MiB short)",
        f"GPU 1 of a ({A100}): would slow default/y to 1.90 of 1.10 (0.80 beyond)",
        f"GPU 2 of a ({A100}): fits by MPS, leaves 36,960 MiB, expected slowdown 1.00",
    ]


def test_a_slowdown_that_is_refused_never_looks_like_its_limit():
    """Regression: `1.90 of 1.90 (0.00 beyond)` was the reason for a refusal."""
    node = gpu_node("a", 1, [tenant("y", ["GPU-a-0"], **BUSY, max_slowdown=1.899)])
    (told,) = explain(cluster(node).view(), applicant(**BUSY, max_slowdown=2.0), ["a"], RULES)
    assert told.said == "would slow default/y to 1.900 of 1.899 (0.001 beyond)"


def test_products_that_need_different_amounts_are_told_each_with_its_own():
    both = prediction(memory_mib=39000)
    small = msgspec.structs.replace(both.products[1], memory=prediction(memory_mib=15500).products[1].memory)
    needs = msgspec.structs.replace(both, products=[both.products[0], small])
    known = cluster(gpu_node("a", 1, [tenant("x", [GPU])]), gpu_node("b", [device(0, "b", product=T4)]))
    found = filter_nodes(Assessment(applicant(prediction=needs), fit(), known.view()), ["a", "b"])
    assert found.refused["a"] == (
        f"NoGpuFits: needs 15,500 to 39,000 MiB; freest {A100} has 36,960 MiB free, needs 39,000, "
        f"freest {T4} has 15,360 MiB total, needs 15,500"
    )


@pytest.mark.parametrize(("length", "told"), [(4, "default/a004, and 51 more; "), (900, "…")])
def test_a_reason_is_never_longer_than_the_field_that_takes_it(length, told):
    """Regression: with many neighbours of long names the reservation could never be written."""
    names = [f"{'abcdefg'[i % 7]}{'0' * (length - 2)}{i // 7}" for i in range(56)]
    crowd = [
        tenant(name, [f"GPU-a-{i % 8}"], TURNS, prediction=prediction(100, util=1, sm=0.01, dram=0.01))
        for i, name in enumerate(names)
    ]
    asked = applicant(gpus=8, mode=RequestedMode.TIME_SLICING, max_slowdown=9, prediction=prediction(100, util=1))
    found = place(Assessment(asked, RULES, cluster(gpu_node("a", 8, crowd)).view()), "a")
    assert told in found.reason
    assert len(found.reason) <= LONGEST_REASON
