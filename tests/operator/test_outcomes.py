"""Why a pod failed, and who pays."""

from typing import Any

import pytest
from carpool_operator.outcomes import outcome_of
from operator_fixtures import pod, terminated

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.49 GiB"
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}


@pytest.mark.parametrize(
    ("status", "reason", "charged", "told"),
    [
        pytest.param(terminated(1, message=OOM), "GpuOutOfMemory", True, "2.00 GiB", id="GPU out of memory"),
        pytest.param(terminated(137, reason="OOMKilled"), "HostOutOfMemory", True, "host memory", id="OOMKilled"),
        pytest.param(terminated(3, message="bad"), "ContainerFailed", True, "exit code 3: bad", id="exit code"),
        pytest.param(
            {"reason": "Evicted", "message": "low on memory"}, "Evicted", True, "low on memory", id="evicted by node"
        ),
        pytest.param(
            {"reason": "UnexpectedAdmissionError", "message": "Allocate failed"},
            "UnexpectedAdmissionError",
            False,
            "Allocate failed",
            id="refused at admission",
        ),
        pytest.param({"conditions": [DISRUPTED]}, "PreemptionByScheduler", False, "preempted", id="preempted"),
        pytest.param(
            {"conditions": [DISRUPTED], **terminated(143)},
            "PreemptionByScheduler",
            False,
            "preempted",
            id="exit code of a preempted pod",
        ),
        pytest.param({}, "PodFailed", True, "no reason given", id="nothing known"),
    ],
)
def test_outcome(status: dict[str, Any], reason: str, charged: bool, told: str) -> None:
    outcome = outcome_of(pod(phase="Failed", status=status))
    assert (outcome.reason, outcome.charged) == (reason, charged)
    assert told in outcome.message
    assert "x-worker-0-1" in outcome.message


def test_long_message_keeps_its_end() -> None:
    outcome = outcome_of(pod(phase="Failed", status=terminated(1, message="x" * 5000 + "ValueError: the end")))
    assert outcome.message.endswith("ValueError: the end")
    assert len(outcome.message) < 800
