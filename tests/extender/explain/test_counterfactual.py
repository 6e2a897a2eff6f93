"""What would have to change for a job to have a place: each change in the advice was tried and works."""

import re

import numpy as np
import pytest
from carpool_core.kube.api import NODES
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode, Tenancy
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.explain.counterfactual import NO_ADVICE, Scenario, advice
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation
from carpool_extender.testing import (
    T4,
    cluster,
    demand,
    device,
    gpu_node,
    node_of,
    pod_request,
    prediction,
    seed_node,
    tenant,
)
from explain_world import OPTIONS, RULES, job_of, predicted, what_if

TURNS, ALONE = SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
GPU, OTHER = "GPU-a-0", "GPU-a-1"
A100 = "NVIDIA A100-SXM4-40GB"
BUSY = {"prediction": prediction(util=100, sm=0.9)}
UPPER = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(quantile=Quantile.UPPER))
PREFIX = "it would have a place "
ONCE = "once GPU 0 of a is free (default/y is there)"


def of(nodes, rules=RULES, **wants):
    """Advice for a job of one worker."""
    return advice(Scenario(pod_request(**wants), rules, cluster(*nodes)))


def one_gpu(**has):
    return [gpu_node("a", 1, [tenant("y", [GPU], **has)])]


def busy(accepts):
    """A GPU with a busy tenant that accepts such a slowdown."""
    return one_gpu(**BUSY, max_slowdown=accepts)


def asks(accepts):
    """A busy job that accepts such a slowdown."""
    return BUSY | {"max_slowdown": accepts}


FULL, IDLE, LIMIT = one_gpu(memory_limit_mib=40000), [gpu_node("a", 1)], {"memory_limit_mib": 4000}
FOUR_GPUS = [gpu_node("a", 4, [tenant("y", [GPU], ALONE)])]
TWO = [gpu_node("a", 2, [tenant("y", [GPU], memory_limit_mib=39000), tenant("z", [OTHER], memory_limit_mib=38000)])]
TWO_ALONE = [gpu_node("a", 2, [tenant("y", [GPU], ALONE), tenant("z", [OTHER], ALONE)])]
ONE_T4 = [gpu_node("a", [device(0, product=T4)])]
TWO_BUSY = [gpu_node("a", 1, [tenant(f"y{i}", [GPU], **BUSY, max_slowdown=2.5) for i in range(2)])]
BY_TURNS = one_gpu(memory_limit_mib=40000, mode=TURNS)
WIDER = {"prediction": prediction(memory_mib=4000, unenforced_mib=5200)}
LESS, WHOLE = "with {} MiB less".format, "without one it counts with the whole GPU"
FIRST_RUN = "its first run counts with 5,200 MiB, because time-slicing enforces no limit"
EACH = "for each worker (spec.gpusPerWorker)"
NOTHING = {"prediction": None}
ACCEPTED = "accepted 2.80 instead of 2.50"
CASES = {
    "its own limit of memory": (FULL, LIMIT, f"{LESS('3,040')} (spec.memory.limit is 4,000 MiB), or {ONCE}"),
    "predicted memory": (FULL, {}, f"{LESS('3,040')} (its predicted bound is 4,000 MiB), or {ONCE}"),
    "memory of a first run": (BY_TURNS, WIDER, f"{LESS('4,240')} ({FIRST_RUN}), or {ONCE}"),
    "GPU that lacks least": (TWO, {}, f"{LESS('1,040')} (its predicted bound is 4,000 MiB), or {ONCE}"),
    "no prediction": (one_gpu(), NOTHING, f"with a spec.memory.limit of 36,960 MiB or less ({WHOLE}), or {ONCE}"),
    "untrusted prediction": (
        one_gpu(),
        {"prediction": prediction(memory_mib=36_000, trusted=False)},
        f"with a spec.memory.limit of 36,960 MiB ({WHOLE}; predicted are 36,000 MiB, at most 36,000), or {ONCE}",
    ),
    "limit below the prediction": (one_gpu(), {"prediction": prediction(memory_mib=37_000, trusted=False)}, ONCE),
    "larger than every GPU": (
        IDLE, {"memory_limit_mib": 204800}, f"{LESS('163,840')} (spec.memory.limit is 204,800 MiB)",
    ),
    "used alone": (one_gpu(mode=ALONE), {}, ONCE),
    "limit of a co-tenant": (busy(1.1), asks(2), f"if default/y accepted 1.90 instead of 1.10, or {ONCE}"),
    "its own slowdown limit": (
        busy(3), asks(1.1), f"if it accepted 1.90 instead of 1.10 (spec.sharing.maxSlowdown), or {ONCE}",
    ),
    "both slowdown limits": (busy(1.1), asks(1.1), ONCE),
    "limits of two co-tenants": (
        TWO_BUSY, asks(5),
        f"if default/y0 {ACCEPTED} and default/y1 {ACCEPTED}, or once GPU 0 of a is free (2 jobs are there)",
    ),
    "one GPU of four": (FOUR_GPUS, {"gpus": 4}, f"{ONCE}, or with 3 GPUs {EACH}"),
    "more GPUs than a node has": ([gpu_node("a", 4)], {"gpus": 9}, f"with 4 GPUs {EACH}"),
    "two GPUs of two": (TWO_ALONE, {"gpus": 2}, "once GPUs 0, 1 of a are free (2 jobs are there)"),
    "another product": (ONE_T4, {"product": "A100"}, f"without spec.gpu.product, on {T4}"),
    "a smaller GPU": (IDLE, {"min_memory_mib": 81920}, f"without spec.gpu.minMemory, on {A100}"),
    "an older GPU": (IDLE, {"min_compute_capability": "9.0"}, f"without spec.gpu.minComputeCapability, on {A100}"),
    "mode of the tenants": (
        one_gpu(), {"mode": RequestedMode.TIME_SLICING}, f"{ONCE}, or by MPS with spec.sharing.mode Auto",
    ),
    "another namespace that shares": (
        one_gpu(mode=TURNS, namespace="other", tenancy=Tenancy.CLUSTER), {},
        "once GPU 0 of a is free (other/y is there), or with spec.sharing.tenancy Cluster",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "wants", "expected"), CASES.values(), ids=CASES)
def test_advice_names_the_change_with_its_numbers(nodes, wants, expected):
    assert of(nodes, **wants) == [PREFIX + expected]


@pytest.mark.parametrize(
    ("config", "held", "wants", "limit", "step"),
    [
        pytest.param(RULES, BUSY | {"max_slowdown": 3}, BUSY, "max_slowdown", 0.01, id="slowdown"),
        pytest.param(UPPER, BUSY | {"max_slowdown": 9}, BUSY, "max_slowdown", 0.01, id="upper quantile"),
        pytest.param(RULES, {"memory_limit_mib": 40000}, {}, "memory_limit_mib", -1, id="memory"),
    ],
)
def test_change_that_is_named_is_the_least_that_suffices(config, held, wants, limit, step):
    wants = {"max_slowdown": 1.1, "memory_limit_mib": 4000} | wants
    (line,) = of(one_gpu(**held), config, **wants)
    number = float(re.search(r"[0-9.,]+", line)[0].replace(",", ""))
    least = number if limit == "max_slowdown" else int(4000 - number)
    snapshot = cluster(*one_gpu(**held)).snapshot()
    for value, fits in ((least, True), (least - step, False)):
        request = pod_request(**wants | {limit: value})
        assert CachedEvaluation(request, config, snapshot).evaluation.ok.any() == fits


def test_admission_limits_of_the_site_can_be_the_obstacle():
    rules = SchedulerConfig(find_policy("least-slowdown"), 8, AdmissionLimits(min_free_mib=10**6))
    expected = "without the site's admission limits (free memory ≥ 1,000,000 MiB)"
    assert of([gpu_node("a", 1)], rules) == [PREFIX + expected]


def test_without_a_working_change_the_attempts_are_named():
    sick = [gpu_node("a", [device(health=DeviceHealth.UNHEALTHY)])]
    assert of(sick, product="T4", mode=RequestedMode.EXCLUSIVE) == [NO_ADVICE]
    assert of([]) == [], "no GPU is known"


def test_gpu_of_another_worker_of_the_job_is_not_freed():
    """Regression: a worker without a place had to wait until the other one's GPU is free."""
    own = cluster(gpu_node("a", 1, [tenant("new", [GPU], ALONE)]))
    assert not any("once" in line for line in advice(Scenario(pod_request(), RULES, own)))


@pytest.mark.parametrize(
    ("changes", "helps"),
    [
        pytest.param({}, True, id="only the agent is missing"),
        pytest.param({"health": "Unhealthy", "health_message": "Xid 79"}, False, id="unhealthy"),
        pytest.param({"product": T4}, False, id="too small"),
    ],
)
async def test_agent_that_runs_again_is_advice_if_its_gpus_would_do(changes, helps):
    kube = FakeKube()
    seed_node(kube, gpu_node("b", [device(0, "b", **changes)]))
    kube.seed(NODES, node_of("b", slots=0))
    seed_node(kube, gpu_node("a", [device(0, product=T4)]))
    lines = (await what_if(kube, job_of({"memory": {"limit": "30Gi"}}), RULES, predicted, OPTIONS)).lines
    assert any(line.startswith(PREFIX) and "if the agent of b ran again" in line for line in lines) is helps


def test_attempts_change_nothing_that_decisions_depend_on():
    nodes = [gpu_node("a", 2, [tenant("y", [GPU], **BUSY, max_slowdown=1.1), tenant("z", [OTHER], ALONE)])]
    known, wants = cluster(*nodes), pod_request(**BUSY)
    names = ("count", "max_slowdown", "free_mib", "min_slowdown_limit", "tenants", "unavailable")
    before = {name: np.copy(getattr(known.snapshot().gpus, name)) for name in names}
    assert "once" in advice(Scenario(wants, RULES, known))[0]
    assert all((getattr(known.snapshot().gpus, name) == was).all() for name, was in before.items())
    assert known.nodes == {"a": nodes[0]}
    assert wants.demand == pod_request(**BUSY).demand


def gang(workers, gpus=1, *nodes, **wants):
    """Advice for all workers of a job together."""
    request = PodRequest(demand("new", gpus=gpus, **wants), workers=workers)
    return (advice(Scenario(request, RULES, cluster(*nodes), workers)) or [""])[0]


EXCLUSIVE = {"mode": RequestedMode.EXCLUSIVE}


def taken(node, gpus, *numbers, tenants=1, mode=ALONE):
    """A node on which each of some GPUs has tenants of its own."""
    held = [tenant(f"{node}{n}-{t}", [f"GPU-{node}-{n}"], mode) for n in numbers for t in range(tenants)]
    return gpu_node(node, gpus, held)


TWO_NODES = (taken("a", 2, 0), taken("b", 3, 0, 1))
PAIRS = (
    gpu_node("a", 2, [tenant("v", [GPU], ALONE), *[tenant(f"w{n}", [OTHER], TURNS) for n in range(2)]]),
    taken("b", 2, 0, 1),
    gpu_node("c", 2),
)
SPREAD = (gpu_node("a", 1), *(taken(name, 1, 0) for name in "bcd"))
MANY = [taken(f"n{node:02}", 10, *([0] if node < 2 else [])) for node in range(20)]
OF_ONE = gpu_node("a", 3, [tenant("v", [GPU, OTHER], ALONE)])
FOUR = [gpu_node(name, 2, [tenant(name, [f"GPU-{name}-0", f"GPU-{name}-1"], ALONE)]) for name in "bcd"]


GANGS = {
    "fewer workers": ((3, 1, gpu_node("a", 2)), EXCLUSIVE, "with 2 workers instead of 3 (spec.workers)"),
    "one GPU": ((3, 1, *TWO_NODES), EXCLUSIVE, "once GPU 0 of a is free (default/a0-0 is there)"),
    "two GPUs": ((4, 1, *TWO_NODES), EXCLUSIVE, "once GPU 0 of a and GPU 0 of b are free (2 jobs"),
    "pairs": ((2, 2, *TWO_NODES), EXCLUSIVE, "once GPU 0 of a and GPU 0 of b are free (2 jobs"),
    "only the GPUs that are needed": ((2, 2, *PAIRS), EXCLUSIVE, "once GPUs 0, 1 of b are free (2 jobs"),
    "one of three nodes": ((2, 1, *SPREAD), EXCLUSIVE, "once GPU 0 of b is free ("),
    "all three nodes": ((4, 1, *SPREAD), EXCLUSIVE, "once GPU 0 of b and GPU 0 of c and GPU 0 of d are free ("),
    "all GPUs of a tenant": ((3, 1, OF_ONE), EXCLUSIVE, "once GPUs 0, 1 of a are free (default/v is there)"),
    "GPUs of many nodes": (
        (9, 1, OF_ONE, *FOUR),
        EXCLUSIVE,
        "once 8 GPUs of 4 nodes are free, such as GPUs 0, 1 of a (4 jobs are there)",
    ),
    "very many workers": (
        (200, 1, *MANY),
        EXCLUSIVE,
        "once GPU 0 of n00 and GPU 0 of n01 are free (2 jobs are there), or with 198 workers instead of 200 "
        "(spec.workers)",
    ),
    "too many for empty GPUs": ((6, 1, *TWO_NODES), EXCLUSIVE, "with 2 workers instead of 6 (spec.workers)"),
}


@pytest.mark.parametrize(("job", "wants", "expected"), GANGS.values(), ids=GANGS)
def test_advice_for_a_gang_gives_all_workers_a_place(job, wants, expected):
    """Regression: no GPUs to free were named for several workers, or of a neighbour on two GPUs only one."""
    assert gang(*job, **wants).startswith(PREFIX + expected)


def test_change_that_helps_only_some_workers_is_no_advice():
    """Regression: less memory was advice for 400 workers, of whom 200 would have found a place."""
    busy = {"prediction": prediction(util=100, sm=0.9), "max_slowdown": 1.2, "memory_limit_mib": 22 * 1024}
    assert "MiB less" not in gang(400, 1, *(gpu_node(f"n{node}", 10) for node in range(20)), **busy)
