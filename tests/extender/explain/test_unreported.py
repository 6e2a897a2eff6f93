"""GPUs that no GpuNode tells of: which nodes should have some, and what can still be said of jobs that run there."""

from datetime import timedelta

import msgspec
import pytest
from asking_world import CLOCK, OPTIONS, RULES, explain_job, job_of, predicted
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, NODES, PODS
from carpool_core.kube.errors import Forbidden
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid
from carpool_extender.explain.explain import Options
from carpool_extender.explain.explain import what_if as answer_what_if
from carpool_extender.testing import T4, device, gpu_node, pod_of, seed_job, seed_node, tenant

ASK = "is the node agent running there?"
UNSAID = "no GPUs of b are reported now"


def seed_host(kube, name, labels=(), **allocatable):
    room = {"cpu": "8", "memory": "64Gi", "pods": "10"} | allocatable
    kube.seed(NODES, {"metadata": {"name": name, "labels": dict(labels)}, "status": {"allocatable": room}})


async def what_if(kube, asker=OPTIONS, **spec):
    return (await answer_what_if(kube, job_of(spec), RULES, predicted, asker)).lines


async def tell(kube, job="x"):
    return (await explain_job(kube, job, "default", RULES, OPTIONS)).lines


MANAGED = {"carpool.dev/node": "managed"}


@pytest.mark.parametrize(
    ("labels", "allocatable", "is_told"),
    [
        pytest.param(MANAGED, {}, True, id="labelled for Carpool"),
        pytest.param({"pool": "training"}, {"nvidia.com/gpu": "8"}, False, id="another GPU stack"),
        pytest.param({}, {}, False, id="no GPUs at all"),
    ],
)
async def test_a_labelled_node_without_gpus_is_named(labels, allocatable, is_told):
    """Regression: a node whose GpuNode was deleted was missing in the answer."""
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    seed_host(kube, "b", labels, **allocatable)
    told = await what_if(kube)
    assert told[1].startswith("would go to a")
    assert [line for line in told if "reports no GPUs" in line] == ([f"  b reports no GPUs: {ASK}"] if is_told else [])


async def test_a_gpunode_without_devices_is_named_by_explain_and_also_where_nodes_may_not_be_listed():
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1))
    seed_node(kube, gpu_node("b", 0))
    assert (await tell(kube))[-1] == f"  b reports no GPUs: {ASK}"
    kube.fail_next("list", NODES, Forbidden("no", status=403))
    assert f"  b reports no GPUs: {ASK}" in await tell(kube)
    kube.seed(GPU_NODES, msgspec.to_builtins(gpu_node("b", 1)) | {"status": {"devices": 7}})
    told = await tell(kube)  # of which that is said
    assert told[-1].startswith("left out: GpuNode b is invalid")
    assert not any("reports no GPUs" in line for line in told)


async def test_several_nodes_without_gpus_stand_on_one_line():
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    for number in range(5):
        seed_host(kube, f"b{number}", MANAGED)
    assert (await what_if(kube))[-1] == f"  5 nodes report no GPUs (b0, b1, b2 and 2 more): {ASK}"
    told = await what_if(kube, Options(CLOCK, each_gpu=True))
    assert told[-5:] == [f"  b{number} reports no GPUs: {ASK}" for number in range(5)]


async def running(kube, *, pod="Running", workers=1, **node):
    """A job with a place by its status on node b, of which there is no GpuNode, and another node."""
    uid = JobUid(seed_job(kube, "x", spec={"workers": workers, "memory": {"limit": "200Gi"}}))
    seed_node(kube, gpu_node("a", 1, **node))
    if pod:
        kube.seed(PODS, pod_of("x", uid="u", nodeName="b") | {"status": {"phase": pod}})
    place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "b", "gpuUuids": ["GPU-b-0"], "product": T4}
    placement = [place | {"mode": "MPS", "reason": "least-slowdown: MPS on GPU 0 of b alone"}]
    condition = {"type": "Running", "status": "True", "reason": "Running", "message": "1 of 1 workers run, attempt 1"}
    status = {"state": "Running", "conditions": [condition], "placement": placement}
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": status}, namespace="default", subresource="status")
    return uid


@pytest.mark.parametrize("may_list", [True, False])
async def test_of_a_job_that_runs_where_nothing_is_reported_its_place_is_told_and_nothing_is_tried(may_list):
    """Regression: it ran, had no place yet, and would have had one with less memory."""
    kube = FakeKube()
    await running(kube)
    if not may_list:
        kube.fail_next("list", PODS, Forbidden("no", status=403))
    told = await tell(kube)
    assert told[0] == "Running: Running is True (Running) 1 of 1 workers run, attempt 1"
    assert told[1] == f"x-worker-0-1 has a place on b: least-slowdown: MPS on GPU 0 of b alone; {UNSAID}"
    assert told[2].startswith("  GPU 0 of a ")
    assert not any("no place" in line or "would" in line for line in told)


async def test_a_pod_that_runs_counts_also_before_the_status_tells_of_its_place():
    kube = FakeKube()
    await running(kube, workers=2)
    nowhere = {"status": {"placement": []}}
    await kube.patch(GPU_TRAINING_JOBS, "x", nowhere, namespace="default", subresource="status")
    told = await tell(kube)
    assert told[1] == f"x-worker-0-1 runs on b: {UNSAID}"
    assert told[2] == "1 of 2 workers has no place: not all of their pods exist yet"
    assert told[3].startswith("decided now with policy least-slowdown it would have to wait: ")


async def test_where_its_node_is_told_of_and_its_reservation_is_not_that_is_said():
    kube = FakeKube()
    await running(kube)
    seed_node(kube, gpu_node("b", 1))
    told = await tell(kube)
    assert told[1].endswith("alone; its reservation is missing in the GpuNode")
    assert not any("no place" in line for line in told)


async def test_a_worker_whose_work_is_done_has_no_place_there_any_more():
    kube = FakeKube()
    await running(kube, pod="Succeeded")
    assert (await tell(kube))[1:3] == ["default/x has no place yet", "its worker has succeeded"]


@pytest.mark.parametrize("pod", ["Failed", None])
async def test_a_place_that_an_attempt_has_lost_is_none(pod):
    """Regression: while a job waited for its next try, it was said to have the place that its status still told."""
    kube = FakeKube()
    await running(kube, pod=pod)
    told = await tell(kube)
    assert told[1] == "default/x has no place yet"
    assert not any("has a place on b" in line for line in told)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        pytest.param(
            ["GPU-a-7"],
            "; a does not report GPU-a-7 now",
            id="its only one",
        ),
        pytest.param(
            ["GPU-a-0", "GPU-a-7"],
            "; a does not report GPU-a-7 now",
            id="one of its two",
        ),
        pytest.param(["GPU-a-0"], "", id="none"),
    ],
)
async def test_a_gpu_of_its_own_that_its_node_no_longer_reports_is_told(own, said):
    """Regression: it had its place on GPU 0, the others were listed, and of that one nothing was said."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", own), job_uid=uid, reason="least-slowdown: alone")
    seed_node(kube, gpu_node("a", [device(number) for number in range(3)], [mine]))
    assert (await tell(kube))[0].partition("least-slowdown: alone")[2] == said


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="it alone is missing"),
        pytest.param({"health": "Unhealthy", "health_message": "Xid 79"}, False, id="it would be sick then"),
        pytest.param({"product": T4}, False, id="it would be too small then"),
    ],
)
async def test_where_a_silent_agent_is_all_that_is_missing_that_is_told(changes, is_told):
    kube = FakeKube()
    heard = rfc3339(CLOCK.now() - timedelta(seconds=600))
    node = gpu_node("b", [device(0, "b", **changes)])
    seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, heartbeat_time=heard)))
    seed_node(kube, gpu_node("a", [device(0, product=T4)]))
    told = await what_if(kube, memory={"limit": "30Gi"})
    ways = [line for line in told if line.startswith("it would have a place ")]
    assert ("if the agent of b reported again" in " ".join(ways)) is is_told
    assert not any("if the agent of a" in line for line in told)
