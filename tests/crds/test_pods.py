import msgspec
from carpool_core.kube.pods import Pod


def test_a_pod_that_ended_before_its_container_started_is_understood() -> None:
    """Regression: the kubelet sends null times then, and the pod was skipped as malformed."""
    wire = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "c", "state": {"terminated": {"exitCode": 137, "startedAt": None, "finishedAt": None}}}
            ],
        },
    }
    pod = msgspec.json.decode(msgspec.json.encode(wire), type=Pod)
    terminated = pod.status.container_statuses[0].state.terminated
    assert terminated is not None
    assert terminated.finished_at is None
    assert pod.is_finished
