"""When a reservation is needed no longer."""

from datetime import timedelta

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.kube.pods import Pod
from carpool_core.testing.clock import FakeClock
from carpool_extender.janitor import UNCONFIRMED_S, ended
from carpool_extender.testing import tenant

NOW = FakeClock().now()
RUNNING = {"containerStatuses": [{"name": "train", "state": {"running": {"startedAt": rfc3339(NOW)}}}]}


def deleted(seconds_ago: float, **status: object) -> Pod:
    """A bound pod whose grace period ended so long ago."""
    metadata = {
        "name": "x-worker-0-1",
        "uid": "pod-x",
        "deletionTimestamp": rfc3339(NOW - timedelta(seconds=seconds_ago)),
    }
    return msgspec.convert(
        {"metadata": metadata, "spec": {"nodeName": "a"}, "status": {"phase": "Pending", **status}}, Pod
    )


@pytest.mark.parametrize(
    ("pod", "is_ended"),
    [
        pytest.param(deleted(UNCONFIRMED_S + 1), True, id="never started, on a node that confirms nothing"),
        pytest.param(deleted(UNCONFIRMED_S - 1), False, id="its node may still confirm it"),
        pytest.param(deleted(UNCONFIRMED_S + 1, **RUNNING), False, id="it ran, and nobody knows that it has ended"),
    ],
)
def test_pod_deleted_before_it_started_on_a_dead_node(pod: Pod, is_ended: bool) -> None:
    """Regression: its reservation was held for ever, because no kubelet was there to confirm the deletion."""
    assert (ended(tenant("x", ["GPU-a-0"]), "a", pod, NOW) is not None) == is_ended
