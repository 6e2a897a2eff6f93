"""What is said where nothing fits, and of each GPU."""

import msgspec
import pytest
from carpool_core.resources.node import MAX_REASON_LENGTH, Tenant
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.framework.admission_limits import AdmissionLimits, Quantile
from carpool_extender.framework.diagnosis import MAX_PART, MAX_SUMMARY, explain_gpus
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import filter_nodes, place_on_node
from carpool_extender.testing import A100, T4, cluster, device, gpu_node, pod_request, prediction, tenant
from hypothesis import given
from hypothesis import strategies as st

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
GPU = "GPU-a-0"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}


def test_one_sentence_for_all_nodes_with_numbers():
    known = cluster(
        gpu_node("a", 1, [tenant("x", ["GPU-a-0"], memory_limit_mib=31840)]),
        gpu_node("b", 1, [tenant("y", ["GPU-b-0"], **BUSY)]),
        gpu_node("c", [device(0, "c", product=T4)]),
    )
    newcomer = pod_request(prediction=prediction(memory_mib=15500, util=100, sm=0.9))
    found = filter_nodes(CachedEvaluation(newcomer, RULES, known.snapshot()), ["a", "b", "c", "d"])
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
    newcomer = pod_request(product=None, min_compute_capability="7.5", prediction=prediction(memory_mib=16000))
    found = filter_nodes(CachedEvaluation(newcomer, RULES, known.snapshot()), ["a", "c"])
    assert found.refused["a"] == (
        "NoGpuFits: needs 16,000 MiB; freest Tesla T4 has 15,360 MiB total, "
        "freest NVIDIA A100-SXM4-40GB has 9,120 MiB free"
    )


def test_memory_is_not_called_short_where_it_is_not_what_is_missing():
    """Regression: of GPUs that others have for themselves it was said that they have 0 MiB free."""
    alone = [tenant("x", ["GPU-a-0"], mode=ALONE), tenant("z", ["GPU-a-1"], **BUSY)]
    known = cluster(gpu_node("a", 2, alone))
    newcomer = pod_request(mode=RequestedMode.EXCLUSIVE, prediction=prediction(memory_mib=3338))
    (sentence,) = filter_nodes(CachedEvaluation(newcomer, RULES, known.snapshot()), ["a"]).refused.values()
    assert "MiB" not in sentence
    assert "1 GPU: used exclusively by default/x" in sentence
    assert "1 GPU: in use, and the job wants a GPU of its own" in sentence


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
        "1 GPU: in use, and the job must be alone: nothing is known of its memory, so it counts with the whole GPU",
        id="must be alone",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU])])],
        {"prediction": prediction(trusted=False)},
        "1 GPU: in use, and the job must be alone: too little was measured on such GPUs to rely on its prediction, so "
        "it counts with the whole GPU",
        id="must be alone, as its prediction is not relied on",
    ),
    pytest.param(
        [gpu_node("a", 1, [tenant("x", [GPU])])],
        {"prediction": prediction(trusted=False, learned_runs=2)},
        "1 GPU: in use, and the job must be alone: earlier runs of this model (other jobs' too) died of memory on "
        "such GPUs, or took nearly all, so it counts with the whole GPU",
        id="must be alone, as it died before",
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
    found = filter_nodes(CachedEvaluation(pod_request(**wants), RULES, cluster(*nodes).snapshot()), names)
    told = set({**found.refused, **found.unsuitable}.values())
    assert told == (set() if expected is None else {f"NoGpuFits: {expected}"})


def test_explain_names_the_check_and_the_margin_of_every_gpu():
    node = gpu_node(
        "a", 3, [tenant("x", ["GPU-a-0"], memory_limit_mib=40000), tenant("y", ["GPU-a-1"], **BUSY, max_slowdown=1.1)]
    )
    assert [
        str(one) for one in explain_gpus(CachedEvaluation(pod_request(**BUSY), RULES, cluster(node).snapshot()), ["a"])
    ] == [
        f"GPU 0 of a ({A100}): needs 4,000 MiB, has 960 MiB free (3,040 MiB short)",
        f"GPU 1 of a ({A100}): would slow default/y to 1.90 of 1.10 (0.80 beyond)",
        f"GPU 2 of a ({A100}): fits by MPS, leaves 36,960 MiB, expected slowdown 1.00; tenant 1 of at most 8",
    ]


HALF = {"prediction": prediction(util=60, sm=0.5)}


@pytest.mark.parametrize(
    ("limits", "rules", "said"),
    [
        pytest.param([], RULES, "expected slowdown 1.00", id="nobody"),
        pytest.param([1.5], RULES, "beside default/y0 1.12 of 1.50", id="one"),
        pytest.param([1.5, 4], RULES, "beside default/y0 1.42 of 1.50, default/y1 1.42 of 4.00", id="two"),
        pytest.param(
            [5, 4, 3, 6],
            RULES,
            "beside default/y2 2.02 of 3.00, 3 others further from their limits",
            id="more than are named",
        ),
        pytest.param(
            [4],
            SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(quantile=Quantile.UPPER)),
            "beside default/y0 2.05 of 4.00 (expected 1.12)",
            id="by the upper quantile",
        ),
    ],
)
def test_of_a_gpu_that_fits_it_is_told_what_each_neighbour_would_suffer(limits, rules, said):
    tenants = [tenant(f"y{i}", ["GPU-a-0"], **HALF, max_slowdown=limit) for i, limit in enumerate(limits)]
    wants = pod_request(**HALF, max_slowdown=9)
    cached_evaluation = CachedEvaluation(wants, rules, cluster(gpu_node("a", 1, tenants)).snapshot())
    (told,) = explain_gpus(CachedEvaluation(wants, rules, cached_evaluation.evaluation.snapshot), ["a"])
    assert told.fits
    assert told.text.endswith(f"{said}; tenant {len(limits) + 1} of at most 8")
    if limits:  # the check found the same of whoever is closest to its limit
        least = min(one.limit - one.slowdown for one in cached_evaluation.evaluation.members(0))
        assert cached_evaluation.evaluation.results.slowdown_margin[0] == pytest.approx(least, abs=1e-6)


def test_a_slowdown_that_is_refused_never_looks_like_its_limit():
    """Regression: `1.90 of 1.90 (0.00 beyond)` was the reason for a refusal."""
    node = gpu_node("a", 1, [tenant("y", ["GPU-a-0"], **BUSY, max_slowdown=1.899)])
    (told,) = explain_gpus(
        CachedEvaluation(pod_request(**BUSY, max_slowdown=2.0), RULES, cluster(node).snapshot()), ["a"]
    )
    assert told.text == "would slow default/y to 1.900 of 1.899 (0.001 beyond)"


def test_products_that_need_different_amounts_are_told_each_with_its_own():
    both = prediction(memory_mib=39000)
    small = msgspec.structs.replace(both.products[1], memory=prediction(memory_mib=15500).products[1].memory)
    needs = msgspec.structs.replace(both, products=[both.products[0], small])
    known = cluster(gpu_node("a", 1, [tenant("x", [GPU])]), gpu_node("b", [device(0, "b", product=T4)]))
    found = filter_nodes(CachedEvaluation(pod_request(prediction=needs), RULES, known.snapshot()), ["a", "b"])
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
    asked = pod_request(gpus=8, mode=RequestedMode.TIME_SLICING, max_slowdown=9, prediction=prediction(100, util=1))
    found = place_on_node(CachedEvaluation(asked, RULES, cluster(gpu_node("a", 8, crowd)).snapshot()), "a")
    assert told in found.reason
    assert len(found.reason) <= MAX_REASON_LENGTH


def used_by(name, pods, held=(), **changes):
    """A node of one GPU on which some pods use memory, and others have reservations."""
    node = gpu_node(name, [device(0, name, **changes)], held)
    seen = [Tenant(pod_uid=pod, gpu_uuid=node.status.devices[0].uuid, memory_mib=1) for pod in pods]
    return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=seen))


def test_the_reasons_that_are_least_frequent_are_dropped_where_a_summary_gets_too_long_and_explain_has_them():
    """Regression: an event takes 1,024 characters, and what came after them was lost, how many it was, too."""
    pods, far = [f"{i:02}{'p' * 90}" for i in range(40)], "n" * 240
    sick = {"health": DeviceHealth.UNHEALTHY, "health_message": "Xid 79, " * 250}
    known = cluster(
        *(gpu_node(f"s{i}", [device(0, f"s{i}", **sick)]) for i in range(4)),
        *(used_by(f"u{i}", pods) for i in range(3)),
        *(gpu_node(f"{far}{i}", [device(0, uuid=GPU)]) for i in range(2)),
        gpu_node("m", [device(0, "m", uuid=f"GPU-{'m' * 400}"), device(1, "m", uuid=f"GPU-{'m' * 400}")]),
    )
    names = [*known.nodes, "without"]
    (sentence,) = set(filter_nodes(CachedEvaluation(pod_request(), RULES, known.snapshot()), names).refused.values())
    assert sentence.startswith(f"NoGpuFits: 4 nodes: unhealthy: {'Xid 79, ' * 14}Xid 79,…; 3 nodes: 40 MiB are used ")
    assert "; 1 node: its node tells of several GPUs by the UUID GPU-mmm" in sentence
    assert sentence.endswith("mmm…; 1 node: no GPUs reported; and 1 more reason for 2 GPUs")
    assert len(sentence) <= MAX_SUMMARY
    told = [one.text for one in explain_gpus(CachedEvaluation(pod_request(), RULES, known.snapshot()), names)]
    assert f"several nodes tell of a GPU by the UUID {GPU}: {far}0 and {far}1" in told
    assert f"its node tells of several GPUs by the UUID GPU-{'m' * 400}" in told


words = st.integers(0, 1500).map(lambda length: ("word " * 300)[:length]) | st.text(max_size=40)
uids = st.text("abc", min_size=1, max_size=3).map(lambda uid: uid * 40)
gpus = st.fixed_dictionaries(
    {},
    optional={
        "health_message": words,
        "health": st.sampled_from(DeviceHealth),
        "uuid": uids,
        "product": st.sampled_from([A100, T4, "NVIDIA L4"]),
        "memory_mib": st.integers(0, 10**6),
        "compute_capability": st.sampled_from(["8.0", "7.5"]),
    },
)


def held_by(place_on_node, who):
    mode, user, length, memory_mib, slowdown = who
    wants = {"memory_limit_mib": memory_mib, "max_slowdown": slowdown, "prediction": prediction(util=90, sm=0.9)}
    name = "j" * length
    return lambda uuid: tenant(
        f"{name}{place_on_node}", [uuid], mode, user=user, namespace=f"{name}{place_on_node % 3}", **wants
    )


tenants = st.tuples(
    st.sampled_from([MPS, TURNS, ALONE]), st.none() | st.just(7), st.integers(1, 63), st.integers(1, 9999), st.just(1.1)
)
crowds = st.lists(st.tuples(gpus, st.lists(uids, max_size=6), st.lists(tenants, max_size=4)), min_size=1, max_size=12)
demands = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.integers(1, 2),
        "product": st.sampled_from(["A100", "T4"]),
        "mode": st.sampled_from(RequestedMode),
        "min_memory_mib": st.integers(0, 10**6),
        "prediction": st.none() | st.builds(prediction, memory_mib=st.integers(1, 10**6)),
    },
)


@given(crowds, demands, st.integers(1, 250))
def test_a_summary_is_never_longer_than_an_event_takes(crowd, wants, length):
    """Regression: what agents say of GPUs went into it as it was, and the UIDs of all pods."""
    known = cluster()
    for i, (changes, pods, tenants) in enumerate(crowd):
        name = f"{i}{'n' * length}"
        uuid = changes.get("uuid", f"GPU-{name}-0")
        held = [held_by(place_on_node, who)(uuid) for place_on_node, who in enumerate(tenants)]
        known.apply(used_by(name, set(pods), held, **changes))
    found = filter_nodes(CachedEvaluation(pod_request(**wants), RULES, known.snapshot()), [*known.nodes, "without"])
    for sentence in {*found.refused.values(), *found.unsuitable.values()}:
        assert len(sentence) <= MAX_SUMMARY < 1024
        assert all(len(part) <= MAX_PART for part in sentence.removeprefix("NoGpuFits: ").split("; "))
