"""Jobs that do not fit on the GPUs of the cluster even if all of them are empty."""

import pytest
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.framework.gang import infeasible_when_empty, max_workers_when_empty
from carpool_extender.testing import T4, cluster, device, gpu_node, pod_request, prediction, tenant
from evaluations import evaluate

SMALL = {"memory_limit_mib": 4000}
ALONE = {"mode": RequestedMode.EXCLUSIVE}
FULL = [tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE)]
NODES = (
    gpu_node("a", 2, FULL),
    gpu_node("b", [device(i, "b", health=DeviceHealth.UNHEALTHY) for i in range(3)]),
    gpu_node("c", [device(0, "c", product=T4, memory_mib=15360)]),
)


@pytest.mark.parametrize(
    ("workers", "wants", "reason"),
    [
        pytest.param(1, {"product": "H100"}, "no node has GPUs that would do, even if they were empty", id="no GPU"),
        pytest.param(1, ALONE | {"gpus": 3}, None, id="those of a sick node count"),
        pytest.param(
            1, {"gpus": 9}, "needs 9 suitable GPUs on one node, the best node has 3", id="more than a node has"
        ),
        pytest.param(6, ALONE, None, id="each its own"),
        pytest.param(7, ALONE, (7, 6), id="one too many"),
        pytest.param(6, {"prediction": None}, None, id="unknown, so alone"),
        pytest.param(6, {"memory_limit_mib": 39_000}, (6, 5), id="the small one holds none"),
        pytest.param(7, SMALL, (7, 6), id="however small they are"),
        pytest.param(3, ALONE | {"gpus": 2}, (3, 2), id="whole workers on each node"),
    ],
)
def test_a_job_that_empty_gpus_do_not_hold_gets_a_reason_with_numbers(workers, wants, reason):
    evaluation = evaluate(cluster(*NODES), pod_request(**{"prediction": prediction(), **wants})).evaluation
    if isinstance(reason, tuple):
        reason = "needs places for {} workers at once, and empty GPUs would have {} at most".format(*reason)
    assert infeasible_when_empty(evaluation, workers) == reason


def test_gpus_without_a_mode_for_it_are_not_counted_as_suitable():
    """Regression: one of two GPUs had a mode, and the reason was that none would do."""
    node = gpu_node("a", [device(0, modes=[SharingMode.EXCLUSIVE]), device(1, modes=[SharingMode.MPS])])
    found = evaluate(node, pod_request(gpus=2, prediction=prediction())).evaluation
    assert infeasible_when_empty(found, 1) == "needs 2 suitable GPUs on one node, the best node has 1"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wants", [{"prediction": None}, {"prediction": None, "mode": RequestedMode.EXCLUSIVE}])
def test_gpu_of_unknown_memory_takes_one_job(wants):
    """Regression: a warning of a division by zero, and a job could never run on a GPU that is only sick."""
    sick = gpu_node("a", [device(memory_mib=0, health=DeviceHealth.UNHEALTHY)])
    found = evaluate(sick, pod_request(**wants)).evaluation
    assert max_workers_when_empty(found) == 1
