"""What could never run on the GPUs that there are, even if all of them were empty."""

import pytest
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.placement.assessments import Assessment
from carpool_extender.placement.ever import never_fits
from carpool_extender.placement.policies import find_policy
from carpool_extender.placement.rules import Rules
from carpool_extender.testing import T4, applicant, cluster, device, gpu_node, prediction, tenant

RULES = Rules(find_policy("least-slowdown"), slots=8)
SMALL = {"memory_limit_mib": 4000}
ALONE = {"mode": RequestedMode.EXCLUSIVE}
FULL = [tenant("y", ["GPU-a-0"], SharingMode.EXCLUSIVE)]
NODES = (
    gpu_node("a", 2, FULL),
    gpu_node("b", [device(i, "b", health=DeviceHealth.UNHEALTHY) for i in range(3)]),
    gpu_node("c", [device(0, "c", product=T4, memory_mib=15360)]),
)


@pytest.mark.parametrize(
    ("workers", "wants", "said"),
    [
        pytest.param(1, {"product": "H100"}, "no node has GPUs that would do, even if they were empty", id="no GPU"),
        pytest.param(1, ALONE | {"gpus": 3}, None, id="those of a sick node count"),
        pytest.param(
            1, {"gpus": 9}, "needs 9 suitable GPUs on one node, the best node has 3", id="more than a node has"
        ),
        pytest.param(6, ALONE, None, id="each its own"),
        pytest.param(7, ALONE, "needs places for 7 workers at once, and empty GPUs would have 6", id="one too many"),
        pytest.param(6, {"prediction": None}, None, id="unknown, so alone"),
        pytest.param(
            4, {"memory_limit_mib": 39_000}, None, id="by memory"
        ),
        pytest.param(
            6,
            {"memory_limit_mib": 39_000},
            "needs places for 6 workers at once, and empty GPUs would have 5",
            id="the small one holds none",
        ),
        pytest.param(43, SMALL, None, id="by slots and memory"),
        pytest.param(
            44, SMALL, "needs places for 44 workers at once, and empty GPUs would have 43", id="5 x 8, and 3 of 15 GiB"
        ),
        pytest.param(
            3,
            ALONE | {"gpus": 2},
            "needs places for 3 workers at once, and empty GPUs would have 2",
            id="whole workers on each node",
        ),
    ],
)  # fmt: skip
def test_it_is_said_what_is_lacking(workers, wants, said):
    verdict = Assessment(applicant(**{"prediction": prediction(), **wants}), RULES, cluster(*NODES).view()).verdict
    assert never_fits(verdict, RULES.slots, workers) == said


def test_of_no_gpus_none_would_do():
    verdict = Assessment(applicant(), RULES, cluster().view()).verdict
    assert never_fits(verdict, RULES.slots, 1) is not None
