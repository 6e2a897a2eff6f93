"""Pods as Carpool reads them, and names of workers."""

import msgspec
import pytest
from carpool_core.kube.pods import OwnerReference, Pod, PodMeta, WorkerName, job_owner_reference, parse_worker_name
from hypothesis import given
from hypothesis import strategies as st


def test_pod_with_null_times_is_decoded() -> None:
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


JOB = {"api_version": "carpool.dev/v1alpha1", "kind": "GpuTrainingJob", "name": "x", "uid": "u", "controller": True}


@given(
    st.builds(
        WorkerName,
        st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True) | st.just("a-worker-0-1"),
        st.integers(0, 999_999),
        st.integers(1, 999_999_999),
    )
)
def test_worker_name_is_parsed(named: WorkerName) -> None:
    assert parse_worker_name(named.pod) == named


@pytest.mark.parametrize(
    "name", ["x", "x-worker-0", "x-worker-0-0", "x-worker-00-1", "x-worker-0-01", "-worker-0-1", "x-worker-0-1-a"]
)
def test_other_names_are_not_workers(name: str) -> None:
    assert parse_worker_name(name) is None


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        pytest.param({}, True, id="the controller"),
        pytest.param({"api_version": "carpool.dev/v9"}, True, id="another version"),
        pytest.param({"api_version": "carpool.dev"}, True, id="no version"),
        pytest.param({"api_version": "carpool.dev.example/v1"}, False, id="another group"),
        pytest.param({"kind": "Job"}, False, id="another kind"),
        pytest.param({"controller": None}, False, id="an owner only"),
    ],
)
def test_only_a_controller_of_our_kind_counts(changes: dict[str, str | None], is_ours: bool) -> None:
    owner = OwnerReference(**(JOB | changes))  # type: ignore[arg-type]
    assert job_owner_reference(PodMeta(name="x", owner_references=[owner])) == (owner if is_ours else None)
