"""What is told of a job's place in the queue."""

import msgspec
import pytest
from asking_world import CLOCK, RULES, explain_job, job_of, predicted, what_if
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden, Invalid
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, PodUid
from carpool_extender.explain.explain import Options
from carpool_extender.queue.order import QueueOrder
from carpool_extender.testing import gpu_node, pod_of, seed_job, seed_node, seed_pod, tenant
from carpool_extender.workloads import ANNOTATION_POLICY

BEFORE = "; those before it are served first where there is a place for them, too"


def a_queue(**lengths):
    """A full GPU, and jobs that wait: by name, minute of arrival and steps."""
    kube = FakeKube()
    taken = msgspec.structs.replace(tenant("first", ["GPU-a-0"]), job_uid=JobUid("job-first"))
    seed_node(kube, gpu_node("a", 1, [taken]))
    seed_job(kube, "first")
    for name, (minute, steps) in lengths.items():
        created = f"2026-01-01T00:{minute:02}:00Z"
        seed_job(kube, name, spec={"training": {"steps": steps}, "sharing": {"mode": "Exclusive"}}, created=created)
        seed_pod(kube, name)
    return kube


async def turn(kube, job, order=QueueOrder.ALTERNATE):
    told = (await explain_job(kube, job, "default", RULES, Options(CLOCK, order=order))).lines
    return [line for line in told if "turn" in line.partition(":")[0] or "not told" in line]


LENGTHS = {
    "a": "1 s long",
    "b": "1,157 d long",
    "c": "28 h long",
    "d": "60 min long (it says no spec.training.steps)",
    "e": "1,157 d long",
}
FIVE = {"a": (0, 10), "b": (1, 10**9), "c": (2, 10**6), "d": (3, None), "e": (30, 10**9)}


@pytest.mark.parametrize(
    ("order", "places"),
    [
        (QueueOrder.ARRIVAL, {"a": "1st", "b": "2nd", "c": "3rd", "d": "4th", "e": "5th"}),
        (QueueOrder.LONGEST_FIRST, {"b": "1st", "e": "2nd", "c": "3rd", "d": "4th", "a": "5th"}),
        (
            QueueOrder.ALTERNATE,
            {"a": "1st to 2nd", "b": "1st to 2nd", "c": "3rd to 4th", "d": "3rd to 4th", "e": "5th"},
        ),
    ],
)
async def test_a_job_that_waits_is_told_its_place(order, places):
    kube = a_queue(**FIVE)
    for name, place in places.items():
        rest = "" if place == "1st" else BEFORE
        counts = "" if order is QueueOrder.ARRIVAL else f", where it counts as {LENGTHS[name]}"
        said = f"its turn: {place} of 5 jobs that wait, by the order {order}{counts}{rest}"
        assert await turn(kube, name, order) == [said]


async def test_of_one_second_it_may_be_any():
    kube = a_queue(a=(0, 10), b=(0, 10), c=(0, 10), d=(1, 10))
    assert await turn(kube, "b", QueueOrder.ARRIVAL) == [
        f"its turn: 1st to 3rd of 4 jobs that wait, by the order Arrival{BEFORE}"
    ]


async def test_a_higher_priority_comes_first():
    kube = a_queue(a=(0, 10), b=(1, 10))
    seed_job(kube, "urgent", created="2026-01-01T02:00:00Z")
    seed_pod(kube, "urgent", priority=10)
    assert (await turn(kube, "a", QueueOrder.ARRIVAL))[0].startswith("its turn: 2nd of 3 jobs")
    assert await turn(kube, "urgent", QueueOrder.ARRIVAL) == ["its turn: 1st of 3 jobs that wait, by the order Arrival"]


async def test_before_its_pods_are_there_its_priority_is_not_known():
    kube = a_queue(a=(0, 10))
    asker = Options(CLOCK, order=QueueOrder.ARRIVAL)
    untold = "not told: how many jobs come before it (its pods are not there, which tell its priority)"
    named = job_of({"template": {"spec": {"priorityClassName": "high", "containers": []}}})
    assert untold in (await what_if(kube, named, RULES, predicted, asker)).lines
    plain = (await what_if(kube, job_of(), RULES, predicted, asker)).lines
    assert f"its turn: 2nd of 2 jobs that wait, by the order Arrival{BEFORE}" in plain
    seed_job(kube, "urgent")
    seed_pod(kube, "urgent", priority=10)
    assert untold in (await what_if(kube, job_of(), RULES, predicted, asker)).lines


async def test_whether_all_have_a_priority_by_default_is_not_known():
    """Regression: a new job was given that of those that wait, which may name their class."""
    kube = a_queue()
    seed_job(kube, "a")
    seed_pod(kube, "a", priority=10)
    told = (await what_if(kube, job_of(), RULES, predicted, Options(CLOCK))).lines
    assert "not told: how many jobs come before it (its pods are not there, which tell its priority)" in told


async def test_what_cannot_be_a_pod_is_left_to_whoever_says_so():
    """Regression: a traceback."""
    told = await what_if(a_queue(a=(0, 10)), job_of({"template": {"spec": []}}), RULES, predicted, Options(CLOCK))
    assert any(line.startswith("its turn: ") for line in told.lines)


async def test_a_job_of_which_some_workers_have_places_waits_with_the_others():
    """Regression: it was left out, and a younger job was told to be the first."""
    kube = a_queue(b=(1, 10))
    seed_job(kube, "gang", spec={"workers": 2}, created="2026-01-01T00:00:00Z")
    for worker in range(2):
        seed_pod(kube, "gang", worker=worker)
    first = msgspec.structs.replace(tenant("gang", ["GPU-b-0"]), job_uid=JobUid("job-gang"), pod_uid=PodUid("pod-gang"))
    seed_node(kube, gpu_node("b", 1, [first]))
    assert (await turn(kube, "b", QueueOrder.ARRIVAL))[0].startswith("its turn: 2nd of 2 jobs")


@pytest.mark.parametrize("state", ["", "Suspended"])
async def test_a_job_without_a_pod_that_waits_is_told_no_turn(state):
    """Regression: nor that it is not known, where whoever asks may not list all pods."""
    kube = a_queue(a=(0, 10))
    seed_job(kube, "suspended")
    await kube.patch(
        GPU_TRAINING_JOBS, "suspended", {"status": {"state": state}}, namespace="default", subresource="status"
    )
    assert await turn(kube, "suspended") == []
    if state:
        for _ in range(2):
            kube.fail_next("list", PODS, Forbidden("no"))
        assert await turn(kube, "suspended") == []


async def test_a_job_or_pod_that_makes_no_sense_is_passed_over():
    """Regression: one that nobody can read, anywhere, ended explain for everybody with a traceback."""
    kube = a_queue(a=(0, 10), b=(1, 10))
    kube.seed(
        GPU_TRAINING_JOBS,
        {"metadata": {"name": "odd", "uid": "job-odd", "namespace": "other"}, "spec": {"sharing": {"mode": "Novel"}}},
    )
    seed_pod(kube, "odd")
    seed_pod(kube, "nobody", priority="high")
    assert (await turn(kube, "b", QueueOrder.ARRIVAL))[0].startswith("its turn: 2nd of 2 jobs")


async def test_a_list_that_fails_is_said_and_the_rest_is_told():
    kube = a_queue(a=(0, 10), b=(1, 10))
    kube.fail_next("list", GPU_TRAINING_JOBS, Invalid("of no use"))
    (told,) = await turn(kube, "a")
    assert told == "not told: how many jobs come before it (jobs of all namespaces cannot be listed: of no use)"


async def test_who_has_a_place_or_can_have_none_does_not_wait():
    kube = a_queue(a=(0, 10))
    seed_job(kube, "no-pod-yet", created="2025-01-01T00:00:00Z")
    seed_job(kube, "bound", created="2025-01-01T00:00:00Z")
    seed_pod(kube, "bound", nodeName="a")
    seed_pod(kube, "first")  # it has a reservation, and is being bound
    kube.seed(
        GPU_TRAINING_JOBS,
        {"metadata": {"name": "odd", "uid": "job-odd", "annotations": {ANNOTATION_POLICY: "best"}}, "spec": {}},
    )
    seed_pod(kube, "odd")
    assert await turn(kube, "a") == [], "nobody else waits"


async def test_what_may_not_be_listed_is_said():
    for what, kinds in (("pods", (PODS, PODS)), ("jobs", (GPU_TRAINING_JOBS,))):
        kube = a_queue(a=(0, 10), b=(1, 10))
        for kind in kinds:
            kube.fail_next("list", kind, Forbidden("no"))
        expected = f"not told: how many jobs come before it (you may not list {what} of all namespaces)"
        assert await turn(kube, "a") == [expected]


async def test_a_length_that_nobody_predicts_is_an_hour():
    kube = a_queue(a=(0, 10), b=(1, 10))
    told = await explain_job(kube, "b", "default", RULES, Options(CLOCK))
    assert any("it counts as 1 s long" in line for line in told.lines)
    await kube.patch(
        GPU_TRAINING_JOBS, "b", {"status": {"prediction": None}}, namespace="default", subresource="status"
    )
    told = await explain_job(kube, "b", "default", RULES, Options(CLOCK))
    assert any("it counts as 60 min long (the time of its steps is not predicted)" in line for line in told.lines)


async def test_a_job_that_is_not_there_would_come_after_those_that_wait():
    kube = a_queue(**FIVE)
    new = job_of({"training": {"steps": 10}})
    told = (await what_if(kube, new, RULES, predicted, Options(CLOCK, order=QueueOrder.ARRIVAL))).lines
    assert f"its turn: 6th of 6 jobs that wait, by the order Arrival{BEFORE}" in told


async def test_pods_that_are_being_deleted_do_not_wait():
    kube = a_queue(a=(0, 10), b=(1, 10))
    going = pod_of("a")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:05:00Z"
    kube.seed(PODS, going)
    assert await turn(kube, "b") == [], "nobody else waits"


@pytest.mark.parametrize("priorities", [(10, 0), (0, 10)])
async def test_a_job_is_served_by_the_highest_priority_of_its_pods(priorities):
    kube = a_queue(a=(0, 10))
    seed_job(kube, "b", created="2026-01-01T02:00:00Z", spec={"workers": 2})
    for worker, priority in enumerate(priorities):
        seed_pod(kube, "b", worker=worker, priority=priority)
    assert (await turn(kube, "b", QueueOrder.ARRIVAL))[0].startswith("its turn: 1st of 2 jobs")
