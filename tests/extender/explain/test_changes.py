"""What would have to change for a job to have a place: each was tried on paper, and what is told of it does."""

import numpy as np
import pytest
from asking_world import OPTIONS, RULES, explain_job, job_of, predicted, what_if
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode, Tenancy
from carpool_extender.explain.counterfactual import Scenario, advice
from carpool_extender.framework.admission_limits import AdmissionLimits, Quantile
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import T4, cluster, device, gpu_node, pod_request, prediction, seed_job, seed_node, tenant

MPS, TURNS, ALONE = SharingMode.MPS, SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
GPU, OTHER = "GPU-a-0", "GPU-a-1"
BUSY = {"prediction": prediction(util=100, sm=0.9)}
UPPER = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(quantile=Quantile.UPPER))
PREFIX = "it would have a place "
ONCE = "once GPU 0 of a is free (default/y is there)"


def of(nodes, rules=RULES, **wants):
    """What is told of a job of one worker where every node is offered."""
    return advice(Scenario(pod_request(**wants), rules, cluster(*nodes)))


def one_gpu(**has):
    return [gpu_node("a", 1, [tenant("y", [GPU], **has)])]


@pytest.mark.parametrize(
    ("nodes", "wants", "said"),
    [
        pytest.param(
            one_gpu(memory_limit_mib=40000),
            {"memory_limit_mib": 4000},
            f"with 3,040 MiB less (spec.memory.limit is 4,000 MiB), or {ONCE}",
            id="its own number",
        ),
        pytest.param(
            one_gpu(memory_limit_mib=40000),
            {},
            f"with 3,040 MiB less (its predicted bound is 4,000 MiB), or {ONCE}",
            id="predicted",
        ),
        pytest.param(
            one_gpu(memory_limit_mib=40000, mode=SharingMode.TIME_SLICING),
            {"prediction": prediction(memory_mib=4000, unenforced_mib=5200)},
            "with 4,240 MiB less (its first run counts with 5,200 MiB, because time-slicing enforces no limit), "
            f"or {ONCE}",
            id="its first run by turns",
        ),
        pytest.param(
            [
                gpu_node(
                    "a", 2, [tenant("y", [GPU], memory_limit_mib=39000), tenant("z", [OTHER], memory_limit_mib=38000)]
                )
            ],
            {},
            f"with 1,040 MiB less (its predicted bound is 4,000 MiB), or {ONCE}",
            id="where the least is lacking",
        ),
        pytest.param(
            one_gpu(),
            {"prediction": None},
            f"with a spec.memory.limit of 36,960 MiB or less (without one it counts with the whole GPU), or {ONCE}",
            id="nothing known",
        ),
        pytest.param(
            one_gpu(),
            {"prediction": prediction(memory_mib=36_000, trusted=False)},
            "with a spec.memory.limit of 36,960 MiB (without one it counts with the whole GPU; "
            f"predicted are 36,000 MiB, at most 36,000), or {ONCE}",
            id="not relied on",
        ),
        pytest.param(
            one_gpu(),
            {"prediction": prediction(memory_mib=37_000, trusted=False)},
            ONCE,
            id="a limit that it is predicted to exceed",
        ),
        pytest.param(
            [gpu_node("a", 2)],
            {"memory_limit_mib": 204800},
            "with 163,840 MiB less (spec.memory.limit is 204,800 MiB)",
            id="no GPU is that large",
        ),
        pytest.param(one_gpu(mode=ALONE), {}, ONCE, id="used alone"),
        pytest.param(
            one_gpu(**BUSY, max_slowdown=1.1),
            BUSY | {"max_slowdown": 2},
            f"if default/y accepted 1.90 instead of 1.10, or {ONCE}",
            id="a neighbour's limit",
        ),
        pytest.param(
            one_gpu(**BUSY, max_slowdown=3),
            BUSY | {"max_slowdown": 1.1},
            f"if it accepted 1.90 instead of 1.10 (spec.sharing.maxSlowdown), or {ONCE}",
            id="its own limit",
        ),
        pytest.param(one_gpu(**BUSY, max_slowdown=1.1), BUSY | {"max_slowdown": 1.1}, ONCE, id="both limits"),
        pytest.param(
            [gpu_node("a", 1, [tenant(f"y{i}", [GPU], **BUSY, max_slowdown=2.5) for i in range(2)])],
            BUSY | {"max_slowdown": 5},
            "if default/y0 accepted 2.80 instead of 2.50 and default/y1 accepted 2.80 instead of 2.50, or once GPU 0 "
            "of a is free (2 jobs are there)",
            id="limits of several",
        ),
        pytest.param(
            [gpu_node("a", 4, [tenant("y", [GPU], ALONE)])],
            {"gpus": 4},
            f"{ONCE}, or with 1 GPU less for each worker (spec.gpusPerWorker)",
            id="one GPU is missing of four",
        ),
        pytest.param(
            [gpu_node("a", 4)],
            {"gpus": 9},
            "with 5 GPUs less for each worker (spec.gpusPerWorker)",
            id="more GPUs than a node has",
        ),
        pytest.param(
            [gpu_node("a", 2, [tenant("y", [GPU], ALONE), tenant("z", [OTHER], ALONE)])],
            {"gpus": 2},
            "once GPUs 0, 1 of a are free (2 jobs are there)",
            id="two GPUs are missing",
        ),
        pytest.param(
            [gpu_node("a", [device(0, product=T4)])],
            {"product": "A100"},
            f"without spec.gpu.product, on {T4}",
            id="another product",
        ),
        pytest.param(
            [gpu_node("a", 1)],
            {"min_memory_mib": 81920},
            "without spec.gpu.minMemory, on NVIDIA A100-SXM4-40GB",
            id="a smaller GPU",
        ),
        pytest.param(
            [gpu_node("a", 1)],
            {"min_compute_capability": "9.0"},
            "without spec.gpu.minComputeCapability, on NVIDIA A100-SXM4-40GB",
            id="an older GPU",
        ),
        pytest.param(
            one_gpu(),
            {"mode": RequestedMode.TIME_SLICING},
            f"{ONCE}, or by MPS with spec.sharing.mode Auto",
            id="the mode that its tenants have",
        ),
        pytest.param(
            one_gpu(mode=TURNS, namespace="other", tenancy=Tenancy.CLUSTER),
            {},
            "once GPU 0 of a is free (other/y is there), or with spec.sharing.tenancy Cluster",
            id="a willing stranger",
        ),
    ],
)
def test_what_would_do_is_told_with_its_numbers(nodes, wants, said):
    assert of(nodes, **wants) == [PREFIX + said]


def test_what_is_told_of_a_limit_is_enough_and_less_is_not():
    """The numbers are the least that do, to as many digits as are told."""
    (node,) = one_gpu(**BUSY, max_slowdown=3)
    snapshot = cluster(node).snapshot()
    for limit, fits in ((1.9, True), (1.89, False)):
        assert CachedEvaluation(pod_request(**BUSY, max_slowdown=limit), RULES, snapshot).evaluation.ok.any() == fits
    (full,) = one_gpu(memory_limit_mib=40000)
    for limit, fits in ((960, True), (961, False)):
        evaluation = CachedEvaluation(pod_request(memory_limit_mib=limit), RULES, cluster(full).snapshot()).evaluation
        assert evaluation.ok.any() == fits


def test_where_the_upper_quantile_counts_so_it_does_on_paper():
    (told,) = of(one_gpu(**BUSY, max_slowdown=9), UPPER, **BUSY, max_slowdown=1.1)
    limit = float(told.removeprefix(f"{PREFIX}if it accepted ").partition(" ")[0])
    snapshot = cluster(*one_gpu(**BUSY, max_slowdown=9)).snapshot()
    fits = [
        CachedEvaluation(pod_request(**BUSY, max_slowdown=one), UPPER, snapshot).evaluation.ok.any()
        for one in (limit, limit - 0.01)
    ]
    assert (limit > 1.9, fits) == (True, [True, False])


def test_what_the_site_asks_besides_can_be_what_keeps_it_out():
    rules = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(min_free_mib=10**6))
    asked_for = "without the site's admission limits (free memory ≥ 1,000,000 MiB)"
    assert of([gpu_node("a", 1)], rules) == [PREFIX + asked_for]


def test_where_nothing_does_it_is_told_what_was_tried():
    sick = [gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)])]
    assert of(sick) == []
    assert of(sick, product="T4", mode=RequestedMode.EXCLUSIVE) == [
        "tried one at a time, and none would give it a place: no spec.gpu.product, sharing mode Auto"
    ]
    assert of([]) == []


def test_the_job_itself_is_not_waited_for():
    """Regression: a worker without a place was told to wait until the other one's GPU is free."""
    told = advice(Scenario(pod_request(), RULES, cluster(gpu_node("a", 1, [tenant("new", [GPU], ALONE)]))))
    assert not any("once" in line for line in told)


async def test_explain_tells_it_of_a_job_that_waits_and_what_if_of_one_that_could_never_run():
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1, [tenant("y", [GPU], ALONE)]))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[:2] == ["default/x has no place yet", PREFIX + ONCE]
    answer = await what_if(kube, job_of({"gpu": {"product": "T4"}}), RULES, predicted, OPTIONS)
    assert answer.is_infeasible
    assert answer.lines[2].startswith("tried one at a time, and none would give it a place: ")
    answer = await what_if(kube, job_of({"memory": {"limit": "200Gi"}}), RULES, predicted, OPTIONS)
    assert not any(PREFIX in line for line in answer.lines)


def test_trying_changes_nothing_of_what_decisions_are_made_on():
    of_one = cluster(*one_gpu(**BUSY, max_slowdown=1.1))
    snapshot = of_one.snapshot()
    before = {
        name: np.copy(getattr(snapshot.gpus, name))
        for name in ("count", "max_slowdown", "free_mib", "min_slowdown_limit")
    }
    wants = pod_request(**BUSY)
    advice(Scenario(wants, RULES, of_one))
    assert all((getattr(snapshot.gpus, name) == was).all() for name, was in before.items())
    assert wants.demand == pod_request(**BUSY).demand
    assert not CachedEvaluation(wants, RULES, snapshot).evaluation.ok.any()
