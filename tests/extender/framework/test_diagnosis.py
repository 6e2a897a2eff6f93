"""Refusals for all nodes, explanations of single GPUs, and reasons of placements, from the messages of the checks."""

import math
from dataclasses import replace

import msgspec
import pytest
from carpool_core.kube.nodes import Node, NodeConstraints, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from carpool_core.resources.node import MAX_REASON_LENGTH, Tenant
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.framework.diagnosis import (
    MAX_PART,
    MAX_SUMMARY,
    all_failures,
    explain_gpus,
    headroom,
    other_failures,
    outcome,
)
from carpool_extender.framework.filters import (
    CHECKS,
    HEALTH,
    LIMITS,
    MEMORY,
    MODE,
    SLOTS,
    SLOWDOWN,
    SUITABILITY,
    AdmissionLimits,
    Quantile,
)
from carpool_extender.framework.gang import infeasible_when_empty
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import filter_nodes, place_on_node
from carpool_extender.testing import A100, T4, cluster, device, gpu_node, node_of, pod_request, prediction, tenant
from carpool_predictor.models.slowdown import shipped
from evaluations import evaluate
from hypothesis import given
from hypothesis import strategies as st

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
GPU, OTHER = "GPU-a-0", "GPU-a-1"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}
HARD = {"prediction": prediction(util=100, sm=1.0), "max_slowdown": 5}
LARGE = {"prediction": prediction(memory_mib=15_500, util=100, sm=0.9)}
HALF = {"prediction": prediction(util=60, sm=0.5)}
NOTHING, GROUP = {"prediction": None}, {"namespace": "alpha", "tenancy_group": "g"}
SICK = {"health": DeviceHealth.UNHEALTHY, "health_message": "Xid 79"}


def evaluated(*nodes, slots=8, limits=None, **wants):
    config = SchedulerConfig(find_policy("least-slowdown"), slots, limits or AdmissionLimits())
    return evaluate(cluster(*nodes), pod_request(**wants), config)


def refusal(*nodes, offered=(), limits=None, **wants):
    """The one message for all nodes, without its prefix; None if the pod fits."""
    names = [*(node.metadata.name for node in nodes), *offered]
    found = filter_nodes(evaluated(*nodes, limits=limits, **wants), names)
    messages = {*found.refused.values(), *found.unsuitable.values()}
    assert len(messages) <= 1
    return messages.pop().removeprefix("NoGpuFits: ") if messages else None


def on_gpus(*tenants, node="a", count=None):
    """A node; each tenant is on the GPU of its position."""
    held = [tenant(f"y{i}", [f"GPU-{node}-{i}"], **has) for i, has in enumerate(tenants)]
    return gpu_node(node, count or max(1, len(held)), held)


def having(name, *values):
    """Tenants that differ in one field."""
    return [{name: value} for value in values]


def active(*ratios):
    """Tenants with these SM activities."""
    return having("prediction", *(prediction(util=40, sm=sm) for sm in ratios))


class TestRefusal:
    """One message for all nodes names what is missing, with numbers."""

    def test_full_nodes_differ_from_unsuitable_ones(self):
        nodes = (
            gpu_node("a", 1, [tenant("x", ["GPU-a-0"], memory_limit_mib=31840)]),
            gpu_node("b", 1, [tenant("y", ["GPU-b-0"], **BUSY)]),
            gpu_node("c", [device(0, "c", product=T4)]),
        )
        found = filter_nodes(evaluated(*nodes, **LARGE), ["a", "b", "c", "d"])
        message = (
            "NoGpuFits: needs 15,500 MiB; freest Tesla T4 has 15,360 MiB total, "
            "another NVIDIA A100-SXM4-40GB has 9,120 MiB free; "
            "1 GPU: would slow default/y to 1.90 of 1.50; 1 node: no GPUs reported"
        )
        assert found.fits == []
        assert found.refused == dict.fromkeys("ab", message)
        assert found.unsuitable == dict.fromkeys("cd", message)

    FULL = gpu_node("a", 2, [tenant(f"x{i}", [f"GPU-a-{i}"], memory_limit_mib=31840 + i) for i in range(2)])
    USED, TAKEN = gpu_node("a", 1, [tenant("x", [GPU])]), gpu_node("a", 1, [tenant("x", [GPU], ALONE)])
    BOTH_USED = gpu_node("a", 2, [tenant("x", [GPU], ALONE), tenant("z", [OTHER], **BUSY)])
    WITHOUT_MPS = gpu_node("a", [device(modes=[ALONE, TURNS])], [tenant("x", [GPU])])
    QUIET = gpu_node("a", 1, [tenant("x", [GPU], prediction=prediction(util=10, sm=0.05))])
    ONE_T4, *MANY_T4 = (gpu_node(f"n{i}", [device(0, f"n{i}", product=T4)]) for i in range(21))
    UNKNOWN = "1 GPU: in use, and the job must be alone: {}, so it counts with the whole GPU".format
    UNMEASURED = "too little was measured on such GPUs to rely on its prediction"
    DIED = "earlier runs of this model (other jobs' too) died of memory on such GPUs, or took nearly all"
    WITHDRAWN = "1 GPU: shared by MPS, which its agent does not offer to other jobs"
    IN_USE = "1 GPU: used exclusively by default/x; 1 GPU: in use, and the job wants a GPU of its own"
    FREEST = "needs 16,000 MiB; freest Tesla T4 has 15,360 MiB total, freest NVIDIA A100-SXM4-40GB has 9,120 MiB free"

    @pytest.mark.parametrize(
        ("nodes", "wants", "expected"),
        [
            pytest.param([], {}, "no node offered reports GPUs; is the node agent running there?", id="no GPUs"),
            pytest.param(MANY_T4, {"product": "A100"}, "20 nodes: wrong product", id="wrong product"),
            pytest.param(
                [*MANY_T4, USED],
                {"product": "A100", **NOTHING},
                f"{UNKNOWN('nothing is known of its memory')}; 20 nodes: wrong product",
                id="GPUs that could hold it come first",
            ),
            pytest.param([TAKEN], NOTHING, "1 GPU: used exclusively by default/x", id="exclusive"),
            pytest.param([USED], NOTHING, UNKNOWN("nothing is known of its memory"), id="unknown memory"),
            pytest.param([USED], {"prediction": prediction(trusted=False)}, UNKNOWN(UNMEASURED), id="untrusted"),
            pytest.param(
                [USED], {"prediction": prediction(trusted=False, learned_runs=2)}, UNKNOWN(DIED), id="it died of memory"
            ),
            pytest.param([WITHOUT_MPS], {}, WITHDRAWN, id="mode that is no longer offered"),
            pytest.param([BOTH_USED], {"mode": RequestedMode.EXCLUSIVE}, IN_USE, id="memory is not what is missing"),
            pytest.param([QUIET], {"max_slowdown": 1.1, "prediction": prediction(util=100, sm=1)}, None, id="it fits"),
            pytest.param([FULL, ONE_T4], {"prediction": prediction(memory_mib=16000)}, FREEST, id="each product"),
        ],
    )
    def test_names_the_check(self, nodes, wants, expected):
        offered = [] if nodes else ["a"]
        assert refusal(*nodes, offered=offered, **wants) == expected

    def test_products_that_need_different_amounts_have_their_own(self):
        both = prediction(memory_mib=39000)
        small = msgspec.structs.replace(both.products[1], memory=prediction(memory_mib=15500).products[1].memory)
        needs = msgspec.structs.replace(both, products=[both.products[0], small])
        assert refusal(self.USED, gpu_node("b", [device(0, "b", product=T4)]), prediction=needs) == (
            f"needs 15,500 to 39,000 MiB; freest {A100} has 36,960 MiB free, needs 39,000, "
            f"freest {T4} has 15,360 MiB total, needs 15,500"
        )

    SM, SM_OR_JOBS = AdmissionLimits(max_sm_active=0.2), AdmissionLimits(max_sm_active=0.2, max_jobs=1)
    FREE_OR_JOBS = AdmissionLimits(min_free_mib=10000, max_jobs=1)
    STRICT = AdmissionLimits(max_sm_active=0.2, min_free_mib=40000, max_jobs=1)
    SM_ACTIVITY = "SM activity 0.30, the site's limit is 0.20"
    FREE = "free memory 39,960 MiB, the site's limit is 40,000 MiB"
    TWO_JOBS = "jobs on a GPU 2, the site's limit is 1"
    SERVER = "its MPS server belongs to"

    @pytest.mark.parametrize(
        ("tenants", "limits", "expected"),
        [
            pytest.param(active(0.6, 0.3, 0.9), SM, f"3 GPUs: at best {SM_ACTIVITY}", id="others are worse"),
            pytest.param(active(0.5, 0.05), SM_OR_JOBS, f"2 GPUs: for example {TWO_JOBS}", id="another limit"),
            pytest.param(having("memory_limit_mib", 1000, 2000), FREE_OR_JOBS, f"2 GPUs: {TWO_JOBS}", id="one limit"),
            pytest.param([active(0.3)[0] | {"memory_limit_mib": 1000}], STRICT,
                         f"1 GPU: {SM_ACTIVITY} and {FREE} and {TWO_JOBS}", id="one GPU fails several limits"),
            pytest.param([BUSY | limit for limit in having("max_slowdown", 1.1, 1.8, 1.2)], None,
                         "3 GPUs: at best would slow default/y1 to 2.00 of 1.80", id="the closest slowdown"),
            pytest.param(
                2 * [HARD | {"max_slowdown": 1.1}],
                None,
                "2 GPUs: at best would slow default/y0 to 2.00 of 1.10",
                id="equal slowdowns of different jobs",
            ),
            pytest.param(
                having("namespace", "alpha", "beta"), None, f"2 GPUs: for example {SERVER} namespace alpha", id="spaces"
            ),
            pytest.param(2 * [GROUP], None, f"2 GPUs: {SERVER} tenancy group g", id="tenancy group"),
        ],
    )  # fmt: skip
    def test_message_of_a_group_says_whether_it_holds_for_all(self, tenants, limits, expected):
        """Regression: the number of the closest GPU was given for all GPUs of the group."""
        assert refusal(on_gpus(*tenants), limits=limits, **HARD) == expected

    def test_no_node_affinity_hides_that_every_gpu_is_too_small(self):
        """With autoscaling the operator excludes the nodes of such GPUs by an affinity."""
        avoided = NodeSelectorRequirement(key="product", operator="NotIn", values=("t4",))
        affinity = NodeSelector(node_selector_terms=(NodeSelectorTerm(match_expressions=(avoided,)),))
        known = cluster(gpu_node("a", [device(0, product=T4)]))
        known.set_kube_node("a", msgspec.convert(node_of("a", labels={"product": "t4"}), Node))
        request = replace(pod_request(prediction=prediction(20_000)), constraints=NodeConstraints(required=affinity))
        cached = evaluate(known, request, SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits()))
        message = "NoGpuFits: needs 20,000 MiB; freest Tesla T4 has 15,360 MiB total"
        assert filter_nodes(cached, ["a"]).unsuitable == {"a": message}
        assert "node affinity" in explain_gpus(cached.evaluation, ["a"])[0].text

    def test_job_on_both_gpus_is_named_for_both(self):
        both = gpu_node("a", 2, [tenant("y0", [GPU, OTHER], TURNS, **HARD | {"max_slowdown": 1.1})])
        assert refusal(both, **HARD) == "2 GPUs: would slow default/y0 to 2.00 of 1.10"

    @pytest.mark.parametrize(
        ("messages", "expected"),
        [(("Xid a", "Xid b"), "2 nodes: for example unhealthy: Xid a"), (("Xid", "Xid"), "2 nodes: unhealthy: Xid")],
    )
    def test_health_of_one_node_is_an_example_if_others_differ(self, messages, expected):
        nodes = [
            gpu_node(name, [device(0, name, health="Unhealthy", health_message=message)])
            for name, message in zip("ab", messages, strict=True)
        ]
        assert refusal(*nodes) == expected

    @pytest.mark.parametrize(("least_mib", "may_fit_later"), [(40960, True), (40961, False)])
    def test_limit_that_no_empty_gpu_meets_is_final(self, least_mib, may_fit_later):
        """Regression: a job had to wait for more free memory than any GPU has."""
        cached = evaluated(gpu_node("a", 1, [tenant("x", [GPU])]), limits=AdmissionLimits(min_free_mib=least_mib))
        assert (infeasible_when_empty(cached.evaluation, 1) is None) is may_fit_later
        found = filter_nodes(cached, ["a"])
        assert (bool(found.refused), bool(found.unsuitable)) == (may_fit_later, not may_fit_later)


def used_by(name, pods, held=(), **changes):
    """A node of one GPU on which some pods use memory, and others have reservations."""
    node = gpu_node(name, [device(0, name, **changes)], held)
    seen = [Tenant(pod_uid=pod, gpu_uuid=node.status.devices[0].uuid, memory_mib=1) for pod in pods]
    return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=seen))


class TestLength:
    """Messages fit into an event, reasons into the reservation."""

    def test_rarest_reasons_are_left_out_of_a_long_message_and_counted(self):
        """Regression: an event holds 1,024 characters, and the end of the message was lost."""
        pods, far = [f"{i:02}{'p' * 90}" for i in range(40)], "n" * 240
        sick = {"health": DeviceHealth.UNHEALTHY, "health_message": "Xid 79, " * 250}
        nodes = (
            *(gpu_node(f"s{i}", [device(0, f"s{i}", **sick)]) for i in range(4)),
            *(used_by(f"u{i}", pods) for i in range(3)),
            *(gpu_node(f"{far}{i}", [device(0, uuid=GPU)]) for i in range(2)),
            gpu_node("m", [device(0, "m", uuid=f"GPU-{'m' * 400}"), device(1, "m", uuid=f"GPU-{'m' * 400}")]),
        )
        message = refusal(*nodes, offered=["without"])
        assert message.startswith(f"4 nodes: unhealthy: {'Xid 79, ' * 14}Xid 79,…; 3 nodes: 40 MiB are used ")
        assert message.endswith("; 1 node: no GPUs reported; and 1 more reason for 2 GPUs")
        assert len(message) <= MAX_SUMMARY
        names = [node.metadata.name for node in nodes]
        texts = " ".join(one.text for one in explain_gpus(evaluated(*nodes).evaluation, names))
        assert f"{far}0 and {far}1" in texts
        assert f"GPU-{'m' * 400}" in texts, "explanations are complete"

    @pytest.mark.parametrize(("length", "expected"), [(4, "default/a004, and 51 more; "), (900, "…")])
    def test_reason_fits_into_the_reservation(self, length, expected):
        """Regression: with many neighbours of long names the reservation could never be written."""
        names = [f"{'abcdefg'[i % 7]}{'0' * (length - 2)}{i // 7}" for i in range(56)]
        small = prediction(100, util=1, sm=0.01, dram=0.01)
        crowd = [tenant(name, [f"GPU-a-{i % 8}"], TURNS, prediction=small) for i, name in enumerate(names)]
        wants = {"gpus": 8, "max_slowdown": 9, "prediction": prediction(100, util=1)}
        found = place_on_node(evaluated(gpu_node("a", 8, crowd), mode=RequestedMode.TIME_SLICING, **wants), "a")
        assert expected in found.reason
        assert len(found.reason) <= MAX_REASON_LENGTH

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
    tenants = st.tuples(
        st.sampled_from([MPS, TURNS, ALONE]), st.none() | st.just(7), st.integers(1, 63), st.integers(1, 9999)
    )
    crowds = st.lists(
        st.tuples(gpus, st.lists(uids, max_size=6), st.lists(tenants, max_size=4)), min_size=1, max_size=12
    )
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
    def test_message_is_never_longer_than_an_event(self, crowd, wants, length):
        nodes = []
        for i, (changes, pods, tenants) in enumerate(crowd):
            name = f"{i}{'n' * length}"
            uuid = changes.get("uuid", f"GPU-{name}-0")
            held = []
            for place, (mode, user, letters, mib) in enumerate(tenants):
                has = {"memory_limit_mib": mib, "max_slowdown": 1.1, "prediction": prediction(util=90, sm=0.9)}
                job, namespace = f"{'j' * letters}{place}", f"{'j' * letters}{place % 3}"
                held.append(tenant(job, [uuid], mode, user=user, namespace=namespace, **has))
            nodes.append(used_by(name, set(pods), held, **changes))
        message = refusal(*nodes, offered=["without"], **wants)
        assert len(message) + len("NoGpuFits: ") <= MAX_SUMMARY < 1024
        assert all(len(part) <= MAX_PART for part in message.split("; "))


def explained(node, **wants):
    """Evaluation and explanation of the first GPU of a node."""
    cached = evaluated(node, **wants)
    return cached.evaluation, explain_gpus(cached.evaluation, ["a"])[0]


def crowded(**accepts):
    return gpu_node("a", 1, [tenant(f"x{i}", [GPU], memory_limit_mib=14_000, **BUSY, **accepts) for i in range(2)])


class TestExplanation:
    """A single GPU is explained by every check that fails there, or by the room that it leaves."""

    def test_every_gpu_has_its_check_and_its_margin(self):
        has = [{"memory_limit_mib": 40000}, BUSY | {"max_slowdown": 1.1}]
        assert [str(one) for one in explain_gpus(evaluated(on_gpus(*has, count=3), **BUSY).evaluation, ["a"])] == [
            f"GPU 0 of a ({A100}): needs 4,000 MiB, has 960 MiB free (3,040 MiB short)",
            f"GPU 1 of a ({A100}): would slow default/y1 to 1.90 of 1.10 (0.80 beyond)",
            f"GPU 2 of a ({A100}): fits by MPS, leaves 36,960 MiB, expected slowdown 1.00; tenant 1 of at most 8",
        ]

    def test_all_failing_checks_are_named_the_first_one_first(self):
        evaluation, one = explained(crowded(), slots=2, limits=AdmissionLimits(max_sm_active=0.8), **LARGE)
        assert other_failures(evaluation, 0) == [MEMORY, LIMITS, SLOWDOWN]
        assert one.text.split("; besides, ") == [
            "has 2 tenants, the most allowed is 2",
            "needs 15,500 MiB, has 12,960 MiB free (2,540 MiB short)",
            "SM activity 1.80, the site's limit is 0.80",
            "would slow default/x0 to 2.80 of 1.50 (1.30 beyond)",
        ]

    @pytest.mark.parametrize(
        ("tenants", "wants", "others"),
        [
            pytest.param([], {}, [], id="nothing else"),
            pytest.param([], {"product": T4}, [SUITABILITY], id="product"),
            pytest.param([tenant("x", [GPU], ALONE)], {}, [MODE], id="exclusive: its memory does not matter"),
            pytest.param([tenant("x", [GPU], memory_limit_mib=30_000)], {}, [MEMORY], id="memory"),
            pytest.param([tenant("x", [GPU], **BUSY)], {}, [SLOWDOWN], id="slowdown"),
        ],
    )
    def test_unhealthy_gpu_has_its_other_failures(self, tenants, wants, others):
        evaluation, one = explained(gpu_node("a", [device(0, **SICK)], tenants), **LARGE, **wants)
        assert evaluation.results.failed[0] == HEALTH.number
        assert other_failures(evaluation, 0) == others
        assert one.text.startswith("unhealthy: Xid 79")
        assert one.text.count("; besides, ") == len(others)

    def test_named_checks_are_those_that_fail_alone(self):
        """Each check is made to pass; the others stay."""
        limits = AdmissionLimits(max_sm_active=0.8)
        small = {"prediction": prediction(memory_mib=9_000, util=100, sm=0.9)}
        cases = {
            SLOTS: explained(crowded(), slots=8, limits=limits, **LARGE),
            LIMITS: explained(crowded(), slots=2, **LARGE),
            MEMORY: explained(crowded(), slots=2, limits=limits, **small),
            SLOWDOWN: explained(crowded(max_slowdown=9.0), slots=2, limits=limits, **LARGE, max_slowdown=9.0),
        }
        for passing, (evaluation, _) in cases.items():
            failing = {CHECKS[int(evaluation.results.failed[0])], *other_failures(evaluation, 0)}
            assert failing == set(cases) - {passing}

    LIMITED = AdmissionLimits(max_sm_active=0.8, max_joint_sm_active=0.9, min_free_mib=5120, max_jobs=3)

    @pytest.mark.parametrize(
        ("node", "slots", "wants", "expected"),
        [
            pytest.param(gpu_node("a", 1), 8, {}, ["tenant 1 of at most 8"], id="idle"),
            pytest.param(gpu_node("a", 1), 8, {"mode": RequestedMode.EXCLUSIVE}, [], id="a GPU of its own"),
            pytest.param(
                on_gpus({"memory_limit_mib": 10_000, "prediction": prediction(util=20, sm=0.3)}),
                8,
                {"limits": LIMITED, "prediction": prediction(util=20, sm=0.25)},
                [
                    "tenant 2 of at most 3",
                    "SM activity 0.30 of at most 0.80",
                    "joint SM activity 0.55 of at most 0.90",
                    "free memory 30,960 MiB of at least 5,120 MiB",
                ],
                id="limits of the site",
            ),
            pytest.param(
                on_gpus({"prediction": prediction(util=20, sm=0.3)}), 2, {}, ["tenant 2 of at most 2"], id="slots"
            ),
        ],
    )
    def test_gpu_that_fits_has_its_headroom(self, node, slots, wants, expected):
        evaluation, one = explained(node, slots=slots, **wants)
        assert one.fits
        assert headroom(evaluation, 0) == expected
        parts = [outcome(evaluation, 0), ", ".join(expected)]
        assert one.text == all_failures(evaluation, 0) == "; ".join(part for part in parts if part)

    UPPER = AdmissionLimits(quantile=Quantile.UPPER)
    HALF_UPPER = 1.12 * math.exp(0.6 * shipped().mps_factor)

    @pytest.mark.parametrize(
        ("accepted", "limits", "expected"),
        [
            pytest.param([], None, "expected slowdown 1.00", id="no tenant"),
            pytest.param([1.5], None, "beside default/y0 1.12 of 1.50", id="one"),
            pytest.param([1.5, 4], None, "beside default/y0 1.42 of 1.50, default/y1 1.42 of 4.00", id="two"),
            pytest.param(
                [5, 4, 3, 6], None, "beside default/y2 2.02 of 3.00, 3 others further from their limits", id="4"
            ),
            pytest.param([4], UPPER, f"y0 {HALF_UPPER:.2f} of 4.00 (expected 1.12)", id="upper quantile"),
        ],
    )
    def test_gpu_that_fits_has_the_slowdowns_of_its_tenants(self, accepted, limits, expected):
        held = [tenant(f"y{i}", [GPU], **HALF, max_slowdown=limit) for i, limit in enumerate(accepted)]
        evaluation, one = explained(gpu_node("a", 1, held), limits=limits, **HALF, max_slowdown=9)
        assert one.text.endswith(f"{expected}; tenant {len(accepted) + 1} of at most 8")
        if accepted:
            least = min(member.limit - member.slowdown for member in evaluation.members(0))
            assert evaluation.results.slowdown_margin[0] == pytest.approx(least, abs=1e-6)

    def test_refused_slowdown_differs_from_its_limit_as_printed(self):
        """Regression: `1.90 of 1.90 (0.00 beyond)` was the reason for a refusal."""
        _, one = explained(on_gpus(BUSY | {"max_slowdown": 1.899}), **BUSY, max_slowdown=2.0)
        assert one.text == "would slow default/y0 to 1.900 of 1.899 (0.001 beyond)"
