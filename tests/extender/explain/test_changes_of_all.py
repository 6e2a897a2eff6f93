"""What would have to change for all workers of a job to have a place."""

import msgspec
import pytest
from asking_world import OPTIONS, RULES, job_of, predicted, what_if
from carpool_core.testing.kube import FakeKube
from carpool_core.values import SharingMode
from carpool_extender.testing import gpu_node, prediction, seed_node, tenant

TURNS, ALONE = SharingMode.TIME_SLICING, SharingMode.EXCLUSIVE
GPU, OTHER = "GPU-a-0", "GPU-a-1"
PREFIX = "it would have a place "


@pytest.mark.parametrize(
    ("workers", "spec", "said"),
    [
        pytest.param(
            3,
            {"sharing": {"mode": "Exclusive"}},
            "with 1 worker less (spec.workers), or by MPS with spec.sharing.mode Auto",
            id="fewer, or shared",
        ),
        pytest.param(
            3, {"memory": {"limit": "30Gi"}}, "with 10,240 MiB less (spec.memory.limit is 30,720 MiB), or with 1 "
            "worker less (spec.workers)", id="less memory"
        ),
    ],
)  # fmt: skip
async def test_of_several_workers_it_is_tried_whether_all_of_them_fit(workers, spec, said):
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    told = (await what_if(kube, job_of({"workers": workers} | spec), RULES, predicted, OPTIONS)).lines
    assert told[2] == PREFIX + said


@pytest.mark.parametrize(
    ("workers", "gpus", "said"),
    [
        pytest.param(3, 1, "once GPU 0 of a is free (default/v is there)", id="one is missing"),
        pytest.param(4, 1, "once GPU 0 of a and GPU 0 of b are free (2 jobs are there)", id="two are missing"),
        pytest.param(2, 2, "once GPU 0 of a and GPU 0 of b are free (2 jobs are there)", id="of several each"),
        pytest.param(6, 1, None, id="too many"),
    ],
)
async def test_for_all_workers_as_few_gpus_are_freed_as_are_needed(workers, gpus, said):
    """Regression: of a job of several workers it was never told which GPUs would have to be free."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("v", [GPU], ALONE)]))
    seed_node(kube, gpu_node("b", 3, [tenant("w", ["GPU-b-1"], ALONE), tenant("z", ["GPU-b-0"], ALONE)]))
    spec = {"workers": workers, "gpusPerWorker": gpus, "sharing": {"mode": "Exclusive"}}
    told = (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines
    ways = told[2].removeprefix(PREFIX).split(", or ")
    if said is None:
        assert not any(way.startswith("once") for way in ways)
    else:
        assert ways[0] == said


async def test_nothing_is_advised_by_which_not_all_of_many_workers_would_find_a_place():
    """Regression: less memory was advice for 400 workers, of whom 200 would have found a place."""
    kube = FakeKube()
    for node in range(20):
        seed_node(kube, gpu_node(f"n{node}", 10))

    async def busy(wanted, products):
        status = msgspec.structs.replace(wanted.status, prediction=prediction(util=100, sm=0.9, products=products))
        return msgspec.structs.replace(wanted, status=status)

    spec = {"workers": 400, "memory": {"limit": "22Gi"}, "sharing": {"maxSlowdown": 1.2}}
    told = "\n".join((await what_if(kube, job_of(spec), RULES, busy, OPTIONS)).lines)
    assert "needs places for 400 workers" in told
    assert "MiB less" not in told


async def test_all_gpus_of_those_who_would_have_to_leave_are_named_up_to_a_few_nodes():
    """Regression: of a neighbour on two GPUs one was named, and both were needed."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 3, [tenant("v", [GPU, OTHER], ALONE)]))
    spec = {"workers": 3, "sharing": {"mode": "Exclusive"}}
    told = (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines
    assert told[2].startswith(f"{PREFIX}once GPUs 0, 1 of a are free (default/v is there)")
    for name in "bcd":
        seed_node(kube, gpu_node(name, 2, [tenant(name, [f"GPU-{name}-0", f"GPU-{name}-1"], ALONE)]))
    told = (await what_if(kube, job_of(spec | {"workers": 9}), RULES, predicted, OPTIONS)).lines
    assert told[2].startswith(f"{PREFIX}once 8 GPUs of 4 nodes are free, such as GPUs 0, 1 of a (4 jobs are there)")


async def test_gpus_that_are_not_needed_are_not_named():
    """Those with the fewest tenants are freed first, of which some are no use beside what the others leave."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2, [tenant("v", [GPU], ALONE), *turns("w", OTHER)]))
    seed_node(kube, gpu_node("b", 2, [tenant("x", ["GPU-b-0"], ALONE), tenant("z", ["GPU-b-1"], ALONE)]))
    seed_node(kube, gpu_node("c", 2))
    spec = {"workers": 2, "gpusPerWorker": 2, "sharing": {"mode": "Exclusive"}}
    told = (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines
    assert told[2].startswith(f"{PREFIX}once GPUs 0, 1 of b are free (2 jobs are there)")


def turns(name, gpu):
    """Two tenants that share a GPU."""
    return [tenant(f"{name}{number}", [gpu], TURNS) for number in range(2)]


@pytest.mark.parametrize("workers", [2, 3, 4])
async def test_what_became_free_for_one_trial_is_not_free_for_the_next(workers):
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    for name in "bcd":
        seed_node(kube, gpu_node(name, 1, [tenant(name, [f"GPU-{name}-0"], ALONE)]))
    spec = {"workers": workers, "sharing": {"mode": "Exclusive"}}
    told = (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines
    gpus = " and ".join(f"GPU 0 of {name}" for name in "bcd"[: workers - 1])
    assert told[2].startswith(f"{PREFIX}once {gpus} {'is' if workers == 2 else 'are'} free (")


async def test_also_for_very_many_workers_gpus_are_freed_and_fewer_tried():
    """Regression: beyond 128 workers nothing was told but that there was too little room."""
    kube = FakeKube()
    for node in range(20):
        seed_node(kube, gpu_node(f"n{node:02}", 10, [tenant(f"t{node}", [f"GPU-n{node:02}-0"], ALONE)] * (node < 2)))
    spec = {"workers": 200, "sharing": {"mode": "Exclusive"}}
    told = (await what_if(kube, job_of(spec), RULES, predicted, OPTIONS)).lines
    free = "once GPU 0 of n00 and GPU 0 of n01 are free (2 jobs are there)"
    assert told[2].startswith(f"{PREFIX}{free}, or with 2 workers less (spec.workers)")
