"""What explain says of a job of several workers of which some have no place, or have succeeded."""

import msgspec
import pytest
from asking_world import OPTIONS, RULES, asks, explain_job, job_of, on_a_node, predicted, what_if
from carpool_core.kube.api import GPU_NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid, SharingMode
from carpool_extender.explain.dry_run import MAX_DRY_RUN_WORKERS
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import gpu_node, pod_of, prediction, seed_job, seed_node, tenant

ALONE = {"sharing": {"mode": "Exclusive"}}
NOW = "decided now with policy least-slowdown"
KEEPS = f"it keeps its place; {NOW} it would"
LIGHT = {"memory_mib": 100, "util": 1, "sm": 0.01, "dram": 0.01}


def held(number, *gpus, mode=SharingMode.EXCLUSIVE, **wants):
    """The reservation of a worker of job x."""
    one = tenant("x", gpus, mode, **wants)
    return msgspec.structs.replace(one, pod_uid=PodUid(f"pod-{number}"), pod_name=f"x-worker-{number}-1")


def seed_workers(kube, *phases, job="x", **spec):
    """The pods of a job's workers, by their phases."""
    for number, phase in enumerate(phases):
        pod = pod_of(job, uid=f"pod-{number}" if job == "x" else f"{job}-{number}", **spec)
        pod["metadata"]["name"] = f"{job}-worker-{number}-1"
        kube.seed(PODS, pod | {"status": {"phase": phase}})


def a_job(workers, gpus, *reservations, phases=(), spec=ALONE, **predicts):
    """Job x, the pods of its workers, and a node of so many GPUs with these reservations."""
    kube = FakeKube()
    assert seed_job(kube, "x", spec={"workers": workers, **spec}, **predicts) == "job-x"
    seed_node(kube, gpu_node("a", gpus, reservations))
    seed_workers(kube, *phases)
    return kube


async def told_of(kube, policy="least-slowdown"):
    """What is said of job x after its places, and before the ranking."""
    found = (await explain_job(kube, "x", "default", SchedulerConfig(find_policy(policy), 8), OPTIONS)).lines
    return [line for line in found if " has a place on " not in line]


async def test_a_worker_without_a_place_goes_where_the_others_left_room():
    """Regression: the whole job would go elsewhere, because one of two workers had one GPU and both would have two."""
    told = await told_of(a_job(2, 2, held(0, "GPU-a-0"), phases=("Running", "Pending")))
    assert told[0] == "1 of 2 workers has no place: x-worker-1-1 waits"
    assert told[1].startswith(f"{NOW} it would go to a (")
    assert "Exclusive on GPU 1 of a alone" in told[1]
    assert told[2].startswith("places by least-slowdown")
    assert not any("it is here" in line for line in told), "told of the one that waits, to which the other is a tenant"


async def test_who_has_its_place_is_not_said_to_wait_because_another_worker_does():
    """Regression: it was said of the worker that had the only GPU."""
    told = await told_of(a_job(2, 1, held(0, "GPU-a-0"), phases=("Running", "Pending")))
    assert told[0] == "1 of 2 workers has no place: x-worker-1-1 waits"
    assert told[1] == f"{NOW} it would have to wait: 1 GPU: used exclusively by default/x"


async def test_of_several_that_wait_it_is_told_for_how_many_there_is_room():
    told = await told_of(a_job(4, 3, held(0, "GPU-a-0"), phases=("Running", "Pending", "Pending", "Pending")))
    assert told[0] == "3 of 4 workers have no place: x-worker-1-1 and x-worker-2-1 and x-worker-3-1 wait"
    only = "only 2 of 3 workers would get places now; 1 worker would have to wait"
    assert told[1] == f"{NOW} of these {only}"
    assert told[2].startswith("  2 workers would go to a (")
    assert "GPU 1 and 2 of a alone" in told[2]
    told = await told_of(a_job(3, 1, held(0, "GPU-a-0"), phases=("Running", "Pending", "Pending")))
    assert told[1] == f"{NOW} they would have to wait: 1 GPU: used exclusively by default/x"


def short_of_cpu(*reservations, **predicts):
    """Job x of two workers, each of which takes most of the only node's CPU, and these reservations."""
    kube = on_a_node({})
    seed_job(kube, "x", spec={"workers": 2, "template": {"spec": asks(cpu="6")}}, **predicts)
    kube.seed(GPU_NODES, gpu_node("a", 2, reservations))
    seed_workers(kube, "Running", nodeName="a", **asks(cpu="6"))
    return kube


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        pytest.param(("Running",), "2 of 3 workers have no place: not all of their pods exist yet", id="none"),
        pytest.param(
            ("Running", "Pending"),
            "2 of 3 workers have no place: not all of their pods exist yet: x-worker-1-1",
            id="one",
        ),
        pytest.param(("Running", "Pending", "Succeeded"), "1 of 3 workers has no place: x-worker-1-1 waits", id="done"),
        pytest.param(
            ("Pending", "Succeeded", "Pending"), "1 of 3 workers has no place: x-worker-2-1 waits", id="starts"
        ),
        pytest.param(
            ("Running", "Failed", "Pending"),
            "2 of 3 workers have no place: not all of their pods exist yet: x-worker-2-1",
            id="failed",
        ),
    ],
)
async def test_who_waits_the_pods_say(phases, said):
    assert (await told_of(a_job(3, 3, held(0, "GPU-a-0"), phases=phases)))[0] == said


async def test_who_is_being_deleted_waits_for_nothing_and_others_pods_are_not_the_jobs():
    kube = a_job(2, 2, held(0, "GPU-a-0"), phases=("Running",))
    seed_workers(kube, "Succeeded", "Pending", job="y")
    leaving = pod_of("x", uid="pod-leaving")
    leaving["metadata"] |= {"name": "x-worker-1-0", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    kube.seed(PODS, leaving)
    assert (await told_of(kube))[0] == "1 of 2 workers has no place: not all of their pods exist yet"


async def test_whoever_may_not_read_pods_is_told_what_is_not_known():
    unread = "you may not list pods in namespace default"
    for workers, who in (
        (2, "1 of 2 workers has no place: it waits, or has"),
        (3, "2 of 3 workers have no place: they wait, or have"),
    ):
        kube = a_job(workers, 2, held(0, "GPU-a-0"), phases=("Running", "Succeeded"))
        kube.fail_next("list", PODS, Forbidden("no", status=403))
        assert (await told_of(kube))[0] == f"{who} succeeded ({unread})"
    kube = a_job(2, 1, phases=("Succeeded", "Pending"))
    kube.fail_next("list", PODS, Forbidden("no", status=403))
    told = await told_of(kube)
    assert "needs places for 2 workers of 1 GPU at once, there is room for 1" in told[1]
    assert told[2] == f"fewer, if some have succeeded already ({unread})"


async def test_workers_that_have_done_their_work_are_not_waited_for():
    """Regression: nobody counted them, so that a job was told to wait for places that it did not need any more."""
    told = await told_of(a_job(3, 1, phases=("Succeeded", "Succeeded", "Pending")))
    assert told[:2] == ["default/x has no place yet", (await told_of(a_job(1, 1)))[1]]
    told = await told_of(a_job(3, 1, phases=("Succeeded", "Pending", "Pending")))
    assert "needs places for 2 workers of 1 GPU at once, there is room for 1" in told[1]
    assert not told[2].startswith("fewer")
    told = await told_of(a_job(2, 1, phases=("Succeeded", "Succeeded")))
    assert told[:2] == ["default/x has no place yet", "all of its 2 workers have succeeded"]


async def test_workers_that_are_left_are_compared_without_those_that_have_done_their_work():
    both = (held(0, "GPU-a-0"), held(1, "GPU-a-1"))
    told = await told_of(a_job(3, 2, *both, phases=("Running", "Running", "Succeeded")))
    assert told[0] == f"{KEEPS} go there again"
    told = await told_of(a_job(2, 2, *both, phases=("Succeeded", "Running")))
    assert told[0] == f"{KEEPS} go there again", "all have their places, as far as the ledger goes"


async def test_a_place_that_a_worker_still_has_after_its_work_counts_once():
    told = await told_of(
        a_job(3, 3, held(0, "GPU-a-0"), held(1, "GPU-a-1"), phases=("Succeeded", "Running", "Pending"))
    )
    assert told[0] == "1 of 3 workers has no place: x-worker-2-1 waits"
    assert "Exclusive on GPU 2 of a alone" in told[1]
    told = await told_of(
        a_job(3, 2, held(0, "GPU-a-1"), held(1, "GPU-a-0"), phases=("Succeeded", "Running", "Succeeded"))
    )
    assert told[0] == f"{KEEPS} go there again"


async def test_more_places_than_workers_are_not_compared():
    three = [held(number, f"GPU-a-{number}") for number in range(3)]
    told = await told_of(a_job(2, 3, *three, phases=("Running", "Running", "Failed")))
    assert told[0].startswith("it has 3 places for 2 workers until an ended worker's reservation is released")


SHARED = SharingMode.MPS


@pytest.mark.parametrize(
    ("policy", "gpus", "said"),
    [
        pytest.param("best-fit", [0, 0, 1], "would go there again", id="there again"),
        pytest.param("best-fit", [1, 0, 0], "would go there again", id="whoever of them has which"),
        pytest.param("best-fit", [0, 1, 1], "would go elsewhere: all 3 workers", id="other numbers on the same"),
        pytest.param("best-fit", [0, 1, 2], "would go elsewhere: all 3 workers", id="on fewer"),
        pytest.param("worst-fit", [0, 0, 1], "would go elsewhere: all 3 workers", id="on more"),
    ],
)
async def test_places_are_the_same_where_each_worker_has_one_of_them(policy, gpus, said):
    takes = {"memory_mib": 15000, "util": 5, "sm": 0.05, "dram": 0.05}
    places = [
        held(number, f"GPU-a-{gpu}", mode=SHARED, prediction=prediction(**takes)) for number, gpu in enumerate(gpus)
    ]
    told = await told_of(a_job(3, 3, *places, phases=3 * ("Running",), spec={}, **takes), policy)
    assert told[0].startswith(f"it keeps its place; decided now with policy {policy} it {said}")


def many(workers):
    """A job of light workers, 8 to a GPU, all of which have their places on two nodes: one has room for 110 pods."""
    light = prediction(**LIGHT)
    places = [held(n, f"GPU-{'ab'[n // 72]}-{n // 8 % 9}", mode=SHARED, prediction=light) for n in range(workers)]
    kube = a_job(workers, 9, *places[:72], spec={}, **LIGHT)
    seed_node(kube, gpu_node("b", 9, places[72:]))
    return kube


async def test_more_workers_than_are_tried_are_not_compared():
    """Regression: the first of them stood for all, and so the job would have gone elsewhere."""
    told = await told_of(many(MAX_DRY_RUN_WORKERS + 2), "best-fit")
    best = "it keeps its place; decided now with policy best-fit it would"
    assert told[0] == f"{best} get places; not compared, a dry run places at most {MAX_DRY_RUN_WORKERS} workers"
    assert told[1].startswith("places by best-fit")
    assert (await told_of(many(MAX_DRY_RUN_WORKERS), "best-fit"))[0] == f"{best} go there again"


async def test_of_more_workers_than_are_tried_only_the_first_are_placed():
    async def light(wanted, products):
        status = msgspec.structs.replace(wanted.status, prediction=prediction(**LIGHT, products=products))
        return msgspec.structs.replace(wanted, status=status)

    kube = FakeKube()
    seed_node(kube, gpu_node("a", 9))
    seed_node(kube, gpu_node("b", 9))
    told = (await what_if(kube, job_of({"workers": MAX_DRY_RUN_WORKERS + 2}), RULES, light, OPTIONS)).lines
    assert (
        told[1] == f"the first {MAX_DRY_RUN_WORKERS} of {MAX_DRY_RUN_WORKERS + 2} workers would get places now; "
        "more were not tried"
    )


async def test_pods_are_read_only_where_the_answer_depends_on_them():
    """Pods of the queue, for a job that waits or is new."""

    def lists(kube):
        return [call for call in kube.calls if call.verb == "list" and call.plural == PODS.plural]

    waiting, place_workers = a_job(1, 1), a_job(2, 2, held(0, "GPU-a-0"), held(1, "GPU-a-1"))
    await told_of(waiting)
    assert len(lists(waiting)) == 1
    await told_of(place_workers)
    assert lists(place_workers) == []
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 2))
    await what_if(kube, job_of({"workers": 2}), RULES, predicted, OPTIONS)
    assert len(lists(kube)) == 1


def seed_again(kube, *phases):
    """The pods of job x's workers in its second attempt."""
    for number, phase in enumerate(phases):
        pod = pod_of("x", uid=f"again-{number}")
        pod["metadata"]["name"] = f"x-worker-{number}-2"
        kube.seed(PODS, pod | {"status": {"phase": phase}})


async def test_the_pods_of_the_attempt_before_tell_nothing_of_this_one():
    """Regression: a worker that had done its work in the attempt before needed no place, and none waited."""
    kube = a_job(3, 2, phases=("Succeeded", "Failed", "Failed"))
    seed_again(kube, "Pending", "Pending", "Pending")
    assert (await told_of(kube))[1].startswith("NoGpuFits: job default/x needs places for 3 workers of 1 GPU at once")
    one = msgspec.structs.replace(held(0, "GPU-a-0"), pod_uid=PodUid("again-0"), pod_name="x-worker-0-2")
    kube = a_job(2, 1, one, phases=("Failed", "Succeeded"))
    seed_again(kube, "Running", "Pending")
    assert (await told_of(kube))[0] == "1 of 2 workers has no place: x-worker-1-2 waits"
