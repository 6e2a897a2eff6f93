"""Pods as Carpool reads them, names of workers, and Kubernetes Events."""

import msgspec
import pytest
from carpool_core.kube.api import EVENTS, PODS
from carpool_core.kube.events import BURST, EVENTS_PER_SECOND, EventRecorder
from carpool_core.kube.pods import OwnerReference, Pod, PodMeta, WorkerName, job_owner_reference, parse_worker_name
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs


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


JOB = {"api_version": "carpool.dev/v1alpha1", "kind": "GpuTrainingJob", "name": "x", "uid": "u", "controller": True}


@given(
    st.builds(
        WorkerName,
        st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True) | st.just("a-worker-0-1"),
        st.integers(0, 999_999),
        st.integers(1, 999_999_999),
    )
)
def test_a_name_is_read_as_it_was_given(named: WorkerName) -> None:
    assert parse_worker_name(named.pod) == named


@pytest.mark.parametrize(
    "name", ["x", "x-worker-0", "x-worker-0-0", "x-worker-00-1", "x-worker-0-01", "-worker-0-1", "x-worker-0-1-a"]
)
def test_another_name_is_no_worker_s(name: str) -> None:
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
def test_the_job_that_controls_an_object(changes: dict[str, str | None], is_ours: bool) -> None:
    owner = OwnerReference(**(JOB | changes))  # type: ignore[arg-type]
    assert job_owner_reference(PodMeta(name="x", owner_references=[owner])) == (owner if is_ours else None)


async def record(recorder, number, type_="Normal"):
    name = f"p{number}"
    await recorder.record(
        kind=PODS, namespace="default", name=name, uid=f"uid-{name}", type=type_, reason="Placed", message="placed"
    )


async def test_a_flood_of_normal_events_is_cut_and_goes_on_at_its_rate():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    for number in range(3 * int(BURST)):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST
    clock.advance(1)
    for number in range(1000, 1100):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST + EVENTS_PER_SECOND


async def test_after_a_pause_there_is_room_for_no_more_than_at_the_start():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    clock.advance(3600)
    for number in range(2 * int(BURST)):
        await record(recorder, number)
    assert len(kube.dump_all(EVENTS)) == BURST


async def test_warnings_are_never_left_out():
    clock, kube = FakeClock(), FakeKube()
    recorder = EventRecorder(kube, clock, "test")
    for number in range(2 * int(BURST)):
        await record(recorder, number, "Warning")
    assert len(kube.dump_all(EVENTS)) == 2 * BURST


async def test_a_flood_is_told_of_when_it_begins_and_how_large_it_was_when_it_is_over():
    clock = FakeClock()
    recorder = EventRecorder(FakeKube(), clock, "test")
    with capture_logs() as logs:
        for number in range(int(BURST) + 5):
            await record(recorder, number)
        assert [log["event"] for log in logs] == ["dropping events"]
        clock.advance(1)
        for number in range(int(EVENTS_PER_SECOND) + 2):
            await record(recorder, number)
        assert len(logs) == 1, "once, while it lasts"
        clock.advance(3600)
        await record(recorder, 0)
        assert [(log["event"], log.get("number")) for log in logs[1:]] == [("events dropped", 7)]
        await record(recorder, 0)
        assert len(logs) == 2
