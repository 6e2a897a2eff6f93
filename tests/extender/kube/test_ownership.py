"""A pod gets GPUs only as a recorded worker of an active job."""

import asyncio

import msgspec
import pytest
from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MODE
from carpool_core.kube.api import GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Invalid
from carpool_core.kube.pods import Pod
from carpool_core.values import JobUid, SharingMode
from carpool_extender.extender_api import BindingArgs, ExtenderArgs
from carpool_extender.testing import gpu_node, pod_of, seed_job, seed_node, seed_pod, tenant, until
from extender_world import NAMES, args, background, filtering, named, record


async def test_a_pod_without_a_job_is_refused_with_a_sentence(world):
    world.add("x")
    async with world.extender() as extender:
        pod = msgspec.convert({"metadata": {"name": "p", "namespace": "default", "uid": "u"}}, Pod)
        found = await extender.service.filter(ExtenderArgs(pod=pod, node_names=list(NAMES)))
    assert named(found) == []
    assert set(found.failed_and_unresolvable_nodes.values()) == {
        "NotAJob: pod default/p asks for carpool.dev/gpu but no GpuTrainingJob controls it; "
        "create a GpuTrainingJob with this pod's spec as its template"
    }


async def test_a_pod_that_names_another_jobs_uid_is_refused(world):
    world.add("x")
    async with world.extender() as extender:
        forged = pod_of("x")
        forged["metadata"]["ownerReferences"][0]["uid"] = "job-of-another"
        found = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(forged, Pod), node_names=list(NAMES)))
    assert found.failed_and_unresolvable_nodes["a"] == (
        "NotAdmitted: expected pod default/x-worker-0-1 to be admitted by Carpool's queue, found no prediction of its "
        "job x; let the operator create the job's pods"
    )


async def test_a_reference_that_leads_to_another_object_is_refused(world):
    """The object is decoded as a job, so its kind is checked."""
    world.add("x")
    world.kube.seed(GPU_TRAINING_JOBS, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "y", "uid": "job-y"}})
    seed_pod(world.kube, "y")
    async with world.extender() as extender:
        assert "and there is none in its namespace" in (await extender.service.bind(args("y"))).error
        world.kube.fail_next("get", GPU_TRAINING_JOBS, Invalid("expected a name without /"))
        assert (await extender.service.bind(args("y"))).error == (
            "NotAJob: the job that pod default/y-worker-0-1 names cannot be read: expected a name without /"
        )


async def test_a_pod_that_asks_for_more_than_its_job_is_refused(world):
    world.add("x")
    async with world.extender() as extender:
        found = await extender.service.filter(filtering(gpus=2))
    assert "asks for 2 carpool.dev/gpu, its job's gpusPerWorker is 1" in found.failed_and_unresolvable_nodes["a"]


@pytest.mark.parametrize("name", ["x", "x-worker-0", "x-worker-0-1-1", "x-worker-1-1", "x-worker-00-1", "z-worker-0-1"])
async def test_a_pod_that_is_not_called_as_a_worker_of_its_job_is_refused(world, name):
    world.add("x")
    forged = pod_of("x")
    forged["metadata"]["name"] = name
    async with world.extender() as extender:
        found = await extender.service.filter(ExtenderArgs(pod=msgspec.convert(forged, Pod), node_names=list(NAMES)))
    assert found.failed_and_unresolvable_nodes["a"] == (
        "NotAWorker: expected a pod of job x to be called x-worker-INDEX-ATTEMPT with an index below 1, "
        f"found default/{name}; let the operator create the job's pods"
    )


async def seed_attempts(kube, attempts):
    """Pods with the names of attempts of one worker, all of them recorded."""
    for attempt in range(1, attempts + 1):
        pod = pod_of("x", uid=f"pod-x-{attempt}")
        pod["metadata"]["name"] = f"x-worker-0-{attempt}"
        kube.seed(PODS, pod)
    await record(kube, "x", 1, *(f"pod-x-{attempt}" for attempt in range(1, attempts + 1)))
    return [
        BindingArgs(pod_name=f"x-worker-0-{n}", pod_namespace="default", pod_uid=f"pod-x-{n}", node=NAMES[n % 2])
        for n in range(1, attempts + 1)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"status": {"attempts": []}}, "NotRecorded: ", id="not recorded"),
        pytest.param({"status": {"attempts": [{"number": 1, "podUids": ["other"]}]}}, "NotRecorded: ", id="a stranger"),
        pytest.param({"spec": {"runPolicy": {"suspend": True}}}, "but it is suspended", id="to be suspended"),
        pytest.param({"status": {"state": "Suspended"}}, "but it is Suspended", id="suspended"),
        pytest.param({"status": {"state": "Failed"}}, "but it is Failed", id="failed"),
        pytest.param({"status": {"state": "Complete"}}, "but it is Complete", id="complete"),
        pytest.param(
            {"metadata": {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["test/keep"]}},
            "but it is being deleted",
            id="being deleted",
        ),
    ],
)
async def test_only_recorded_pods_of_an_active_job_get_a_gpu(world, changes, expected):
    """Regression: a pod with a worker's name, created by a user, held GPUs of a suspended or failed job for days."""
    world.add("x")
    job = world.kube.dump(GPU_TRAINING_JOBS, "x", "")
    world.kube.seed(GPU_TRAINING_JOBS, job | {part: job[part] | change for part, change in changes.items()})
    async with world.extender() as extender:
        found = await extender.service.filter(filtering())
        assert expected in found.failed_and_unresolvable_nodes["a"]
        assert expected in (await extender.service.bind(args())).error
        if expected == "NotRecorded: ":
            await record(world.kube, "x", 1, "pod-x")
            await until(lambda: extender.informers.job(JobUid("job-x")).status.latest_attempt.pod_uids == ["pod-x"])
            assert named(await extender.service.filter(filtering())) == NAMES
    assert world.held() == {}


async def test_filter_refuses_a_job_that_became_inactive_after_its_prediction_was_read(world):
    """The watch drops the prediction of a job that runs or has ended; filter uses the request that it remembers."""
    world.add("x")
    async with world.extender() as extender:
        assert named(await extender.service.filter(filtering())) == NAMES
        failed = {"status": {"state": "Failed"}}
        await world.kube.patch(GPU_TRAINING_JOBS, "x", failed, namespace="default", subresource="status")
        await until(lambda: extender.informers.job(JobUid("job-x")).status.state == "Failed")
        found = await extender.service.filter(filtering())
    assert "but it is Failed" in found.failed_and_unresolvable_nodes["a"]


async def test_a_pod_that_the_watched_status_lacks_is_read_to_bind_it(world):
    """The operator records a pod before it is scheduled, so a status without it is old."""
    world.add("x")
    await record(world.kube, "x", 1)
    async with world.extender() as extender, background(world.agent.serve("a")):
        await until(lambda: extender.informers.job(JobUid("job-x")) is not None)
        world.kube.end_watches()
        await record(world.kube, "x", 1, "pod-x")
        assert (await extender.service.bind(args())).error == ""


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_job_has_no_more_reservations_than_workers(world, workers):
    world.hold("here_1")
    for name in NAMES:
        seed_node(world.kube, gpu_node(name))
    seed_job(world.kube, "x", spec={"workers": workers})
    asked = await seed_attempts(world.kube, 4)
    world.hold("here_1")  # only the leader collects reservations
    async with world.extender() as extender, background(world.agent.serve("a")), background(world.agent.serve("b")):
        answers = await asyncio.gather(*(extender.service.bind(one) for one in asked))
        assert [bool(answer.error) for answer in answers] == [False] * workers + [True] * (4 - workers)
        expected = (
            f"TooManyWorkers: job default/x has spec.workers {workers}, and {workers} of its pods have reservations "
            "already; this one is tried again when one of them has ended"
        )
        assert answers[-1].error == expected
        late = msgspec.convert(world.kube.dump(PODS, "x-worker-0-4", "default"), Pod)
        found = await extender.service.filter(ExtenderArgs(pod=late, node_names=list(NAMES)))
        assert found.failed_nodes == dict.fromkeys(NAMES, expected)
        await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
        await until(lambda: sum(map(len, world.held().values())) == workers - 1)
        free = msgspec.structs.replace(asked[-1], node="b")  # each worker has GPUs of its own
        assert (await extender.service.bind(free)).error == ""


async def test_worker_replaces_one_on_a_dead_node(world):
    """The reservation on the dead node stays, because the container may run there."""
    for name in NAMES:
        seed_node(world.kube, gpu_node(name))
    seed_job(world.kube, "x")
    first, second = await seed_attempts(world.kube, 2)
    async with world.extender() as extender, background(world.agent.serve("a")), background(world.agent.serve("b")):
        assert (await extender.service.bind(first)).error == ""
        lost = world.kube.dump(PODS, "x-worker-0-1", "default")
        lost["status"]["phase"] = "Running"
        lost["metadata"] |= {"deletionTimestamp": "2026-01-31T12:00:00Z", "finalizers": ["test/dead-node"]}
        world.kube.seed(PODS, lost)
        await until(lambda: not extender.informers.workers_with_reservation(JobUid("job-x")))
        assert (await extender.service.bind(second)).error == ""
        assert sum(map(len, world.held().values())) == 2


async def test_annotations_of_the_pod_change_nothing(world):
    world.add("x")
    forged = {"metadata": {"annotations": {ANNOTATION_GPUS: "GPU-b-0", ANNOTATION_MODE: "Exclusive"}}}
    await world.kube.patch(PODS, "x-worker-0-1", forged, namespace="default")
    async with world.extender() as extender, background(world.agent.serve("a")):
        assert (await extender.service.bind(args())).error == ""
    assert world.pod()["metadata"]["annotations"][ANNOTATION_GPUS] == "GPU-a-0"
    assert world.reservations("a")[0]["mode"] == SharingMode.MPS


def reads(world):
    return [call for call in world.kube.calls if call.verb == "get" and call.plural == GPU_TRAINING_JOBS.plural]


async def test_filter_and_prioritize_call_no_api(world):
    """Regression: a pod without a predicted job was an error that kube-scheduler retried forever, each with a read."""
    world.add("x")
    world.kube.seed(GPU_TRAINING_JOBS, {"metadata": {"name": "bare", "uid": "job-bare"}, "spec": {"template": {}}})
    async with world.extender() as extender:
        for job in ("x", "bare", "absent"):
            found = await extender.service.filter(filtering(job))
            assert found.error == ""
            assert bool(found.failed_and_unresolvable_nodes) is (job != "x")
            await extender.service.prioritize(filtering(job))
    assert reads(world) == []


async def test_a_job_that_the_watch_has_not_seen_is_read_to_bind_its_pod(world):
    world.add("x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        seed_job(world.kube, "late")
        seed_pod(world.kube, "late")
        assert (await extender.service.bind(args("late"))).error == ""


async def test_a_job_seen_before_its_prediction_is_read_again(world):
    seed_node(world.kube, gpu_node("a", 1, [tenant("y", ["GPU-a-0"])]))
    seed_job(world.kube, "y")
    seed_pod(world.kube, "y", nodeName="a")
    bare = {"metadata": {"name": "x", "uid": "job-x"}, "spec": {"template": {}}}
    world.kube.seed(GPU_TRAINING_JOBS, bare)
    seed_pod(world.kube, "x")
    async with world.extender() as extender, background(world.agent.serve("a")):
        seed_job(world.kube, "x")
        assert (await extender.service.bind(args())).error == ""
