"""What explain says of a job that is there: how it stands, where it is, and what was measured of it."""

from datetime import timedelta

import msgspec
import pytest
from asking_world import ASKER, CLOCK, RULES, job_of, predicted
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.errors import NotFound
from carpool_core.resources.node import Tenant
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid
from carpool_extender.enquiry import NoSuchJobError, asked, explained
from carpool_extender.measured import SETTLED_S
from carpool_extender.testing import T4, gpu_node, prediction, seed_job, seed_node, tenant


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        (
            [
                ("Predicted", "True", "Estimated", ""),
                ("Placed", "False", "Unschedulable", "0/2 nodes: 2 Insufficient cpu"),
            ],
            ["Queued: Placed is False (Unschedulable) 0/2 nodes: 2 Insufficient cpu"],
        ),
        (
            [("Placed", "False", "SchedulerError", "Post: connection refused")],
            ["Queued: Placed is False (SchedulerError) Post: connection refused", "kube-scheduler got no answer"],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Running", "False", "Starting", "the image is pulled")],
            ["Queued: Running is False (Starting) the image is pulled"],
        ),
        (
            [("Placed", "True", "Bound", ""), ("Failed", "True", "BackoffLimit", "4 failures")],
            ["Queued: Failed is True (BackoffLimit) 4 failures"],
        ),
    ],
    ids=["unschedulable", "no answer", "starting", "failed"],
)
async def test_explain_says_first_how_the_job_stands(conditions, told):
    kube = FakeKube()
    seed_job(kube, "x")
    listed = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) for one in conditions]
    await kube.patch(
        GPU_TRAINING_JOBS, "x", {"status": {"state": "Queued", "conditions": listed}}, namespace="default",
        subresource="status",
    )  # fmt: skip
    found = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert all(line.startswith(start) for line, start in zip(found, told, strict=False))
    has_ended = conditions[-1][0] == "Failed"
    assert found[len(told)] == ("default/x had no place when it ended" if has_ended else "default/x has no place yet")


async def test_a_gpunode_that_makes_no_sense_is_left_out_and_told():
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 1))
    odd = msgspec.to_builtins(gpu_node("b", 1))
    odd["status"]["devices"][0]["memoryMib"] = "much"
    kube.seed(GPU_NODES, odd)
    found = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert any("GPU 0 of a" in line for line in found)
    assert [line for line in found if "GpuNode b" in line] == [
        "left out: GpuNode b, which makes no sense: Expected `int`, got `str` - at `$.status.devices[0].memoryMib`"
    ]


async def test_of_a_job_that_has_ended_it_is_told_where_it_ran_and_nothing_is_rehearsed():
    """Regression: it had "no place yet", and every GPU of the cluster was gone through."""
    kube = FakeKube()
    seed_job(kube, "x")
    seed_node(kube, gpu_node("a", 2))
    place = {"worker": 0, "pod": "x-worker-0-1", "podUid": "u", "node": "a", "gpuUuids": ["GPU-a-0"], "product": T4}
    ran = place | {"mode": "MPS", "reason": "least-slowdown: MPS on GPU 0 of a alone"}
    done = {"type": "Complete", "status": "True", "reason": "Complete", "message": "1 of 1 workers succeeded"}
    status = {"state": "Complete", "conditions": [done], "placement": [ran]}
    await kube.patch(GPU_TRAINING_JOBS, "x", {"status": status}, namespace="default", subresource="status")
    assert (await explained(kube, "x", "default", RULES, ASKER)).lines == [
        "Complete: Complete is True (Complete) 1 of 1 workers succeeded",
        "x-worker-0-1 ran on a: least-slowdown: MPS on GPU 0 of a alone",
        "it has ended, so nothing is decided for it any more",
    ]


async def test_a_job_that_is_not_there_is_called_so_and_a_kind_that_is_not_there_is_not():
    kube = FakeKube()
    with pytest.raises(NoSuchJobError, match=r"^no GpuTrainingJob nosuch in namespace team-a$"):
        await explained(kube, "nosuch", "team-a", RULES, ASKER)
    kube.fail_next("get", GPU_TRAINING_JOBS, NotFound("404 page not found", status=404))
    with pytest.raises(NotFound, match="404 page not found"):
        await explained(kube, "nosuch", "team-a", RULES, ASKER)


async def test_a_running_job_is_no_stranger_on_its_own_gpu():
    """Regression: what it uses counted as used without a reservation, on the very GPU that it has."""
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x"))
    mine = msgspec.structs.replace(tenant("x", ["GPU-a-0"]), job_uid=uid, reason="least-slowdown: alone")
    node = gpu_node("a", 1, [mine])
    used = Tenant(pod_uid=mine.pod_uid, gpu_uuid=mine.gpu_uuids[0], memory_mib=3900)
    seed_node(kube, msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=[used])))
    told = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert not any("without a reservation" in line for line in told)
    assert "it is here" in told[1]
    assert "fits by MPS" in told[1]


async def test_what_was_measured_is_named_where_it_counts_in_place_of_what_was_predicted():
    """Regression: a decision changed after 90 s, and nobody said by what."""
    kube = FakeKube()
    busy = tenant("y", ["GPU-a-0"], prediction=prediction(util=90, sm=0.76))
    seen = Tenant(pod_uid=busy.pod_uid, gpu_uuid="GPU-a-0", memory_mib=100, gpu_util_percent=90.0, sm_active_ratio=0.68)
    for after_s, told in ((SETTLED_S - 1, False), (SETTLED_S + 1, True)):
        reserved_at = rfc3339(CLOCK.now() - timedelta(seconds=after_s))
        node = gpu_node("a", 2, [msgspec.structs.replace(busy, reserved_at=reserved_at)])
        status = msgspec.structs.replace(node.status, tenants=[seen], heartbeat_time=rfc3339(CLOCK.now()))
        seed_node(kube, msgspec.structs.replace(node, status=status))
        lines = (await asked(kube, job_of(), RULES, predicted, ASKER)).lines
        first = next(line for line in lines if line.startswith("  GPU 0 of a"))
        assert first.endswith("; counts as measured: default/y (measured SM 68%, predicted 76%)") is told
        assert sum("measured" in line for line in lines if line.startswith("  ")) == told
        wrong = (await asked(kube, job_of({"gpu": {"product": "T4"}}), RULES, predicted, ASKER)).lines
        assert not any("measured" in line for line in wrong[1:])


async def test_of_a_job_whose_status_tells_no_prediction_yet_it_is_said_so():
    kube = FakeKube()
    seed_job(kube, "x")
    kube.seed(GPU_TRAINING_JOBS, {**kube.dump(GPU_TRAINING_JOBS, "x", "default"), "status": {}})
    seed_node(kube, gpu_node("a", 1))
    found = (await explained(kube, "x", "default", RULES, ASKER)).lines
    assert found[0] == "its status tells no prediction yet: the answer is that for a job of which nothing is known"
    seed_job(kube, "y")
    assert not any("prediction yet" in line for line in (await explained(kube, "y", "default", RULES, ASKER)).lines)
