"""The operator as a whole on a cluster in memory."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.kube.api import (
    EVENTS,
    GPU_NODES,
    GPU_TRAINING_JOBS,
    LEASES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Page,
    ResourceKind,
    Selector,
)
from carpool_core.kube.client import error_for
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, NotFound, Overloaded
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.settings import KubeSettings
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_operator import commands
from carpool_operator.commands import NotInstalledError, check_installed, elector_of
from carpool_operator.expectations import REFUSAL_BACKOFF
from carpool_operator.performer import Superseded
from carpool_operator.reconcile import reconcile
from carpool_operator.settings import OperatorSettings
from carpool_operator.snapshot import Refusal
from carpool_operator.work_queue import DEBOUNCE_S
from carpool_predictor.features import Abstention
from click.testing import CliRunner
from operator_fixtures import again, condition, created, events, job_body, pod, predicted_job, snapshot, status_of
from operator_world import FakeTracer, MortalKube, World, running, status_writes, submitted


async def test_job_from_its_application_to_its_end() -> None:
    world = await submitted()
    job = world.job()
    assert job.status.prediction is not None
    assert [p.product for p in job.status.prediction.products] == ["NVIDIA A100-SXM4-40GB"]
    assert job.status.prediction.input_digest.startswith("sha256:")
    assert world.living() == ["x-worker-0-1"]
    await world.start_pods()
    assert world.job().status.state == "Running"
    assert world.job().status.placement[0].node == "n1"
    await world.finish_pod("x-worker-0-1")
    assert world.job().status.state == "Complete"
    reasons = {event["reason"] for event in world.kube.dump_all(EVENTS)}
    assert {"Predicted", "Placed", "Complete"} <= reasons
    assert status_writes(world) <= 5


MOUNT = ("FailedMount", "kubelet", 2)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        pytest.param([("FailedMount", "kubelet", 1), MOUNT], "FailedMount", id="the newest failed mount"),
        pytest.param([("FailedAttachVolume", "attachdetach-controller", 2)], "FailedAttachVolume", id="failed attach"),
        pytest.param([MOUNT, ("FailedScheduling", "carpool-scheduler", 3)], "FailedMount", id="scheduler's warning"),
        pytest.param([MOUNT, ("NodeNotReady", "node-controller", 3)], "FailedMount", id="a newer node warning"),
        pytest.param([("NodeNotReady", "node-controller", 2)], None, id="node is not ready"),
        pytest.param([("FailedCreatePodSandBox", "kubelet", 2)], None, id="no sandbox"),
        pytest.param([("PartitionFailed", "carpool-node-agent", 2)], None, id="partition failed"),
        pytest.param([("ReservationLost", "carpool-extender", 2)], None, id="reservation lost"),
        pytest.param([("FailedMount", "another-controller", 2)], None, id="another component"),
        pytest.param([("FailedMount", "kubelet", -7200)], None, id="before the binding"),
        pytest.param(Forbidden("may not list"), None, id="no right to list events"),
    ],
)
async def test_late_start_fails_the_job_only_because_of_a_volume(
    events: list[tuple[str, str, int]] | Forbidden, reason: str | None
) -> None:
    """Regression: any warning about the pod, also one of Carpool or of a dead node, failed the job for good."""
    world = await submitted()
    world.run_pods()
    [waiting] = world.pods()
    waiting["status"] |= {"phase": "Pending", "containerStatuses": []}
    world.kube.seed(PODS, waiting)
    await world.settle()
    [bound_at] = [one["lastTransitionTime"] for one in waiting["status"]["conditions"] if one["type"] == "PodScheduled"]
    for why, component, after_s in [] if isinstance(events, Forbidden) else events:
        event = {"type": "Warning", "reason": why, "message": f"{why} of {component}, {after_s} s after the binding"}
        event |= {"lastTimestamp": rfc3339(parse_rfc3339(bound_at) + timedelta(seconds=after_s))}
        event |= {"source": {"component": component}, "involvedObject": {"uid": waiting["metadata"]["uid"]}}
        world.kube.seed(EVENTS, {"metadata": {"name": f"{why}{after_s}".lower(), "namespace": "default"}} | event)
    if isinstance(events, Forbidden):
        world.kube.fail_next("list", EVENTS, events)
    await world.settle(after_s=600)
    assert world.job().status.state == ("BackingOff" if reason is None else "Failed")
    found = world.condition(keys.CONDITION_PLACED if reason is None else keys.CONDITION_FAILED)
    assert found.reason == (reason or "BackingOff")
    assert reason is None or f"{reason} of " in found.message
    assert reason is None or "2 s after the binding" in found.message
    assert "runPolicy.startDeadlineSeconds" in found.message


async def test_settled_cluster_is_quiet() -> None:
    world = await submitted()
    before = len(world.kube.calls)
    for _ in range(3):
        await world.reconcile_again()
    assert len(world.kube.calls) == before


async def test_columns_are_written_also_at_their_defaults() -> None:
    world = World()
    world.apply(model={"catalog": {"name": "timm/resnet50"}})
    world.deliver_events()
    await world.operator.reconcile("default/x")
    status = world.kube.dump(GPU_TRAINING_JOBS, "x")["status"]
    assert (status["state"], status["restarts"]) == ("Predicting", 0)
    await world.settle()
    status = world.kube.dump(GPU_TRAINING_JOBS, "x")["status"]
    assert status["attempts"][0]["outcome"] == "Running"


@pytest.mark.parametrize("workers", [1, 2])
async def test_each_attempt_is_recorded_with_the_uids_of_its_pods(workers: int) -> None:
    """One write records a single pod and its prediction; the attempt of a gang is recorded before its pods."""
    world = World()
    world.apply(workers=workers)
    record, create = ("replace", "gputrainingjobs"), ("create", "pods")
    expected = [create, record] if workers == 1 else [record, ("create", "services"), create, create, record]
    for attempt in (1, 2):
        before = len(world.kube.calls)
        await world.settle()
        own = ("gputrainingjobs", "pods", "services")
        writes = [(c.verb, c.plural) for c in world.kube.calls[before:] if c.verb in ("create", "replace")]
        assert [write for write in writes if write[1] in own] == expected
        assert world.job().status.prediction is not None
        of_attempt = [p["metadata"] for p in world.pods() if p["metadata"]["name"].endswith(f"-{attempt}")]
        assert world.job().status.attempts[-1].pod_uids == sorted(meta["uid"] for meta in of_attempt)
        await world.start_pods()
        await world.finish_pod(f"x-worker-0-{attempt}", exit_code=1)
        world.clock.advance(10)
        world.deliver_events()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Abstention(reason="TraceTimedOut", message="took longer than 120 s"), "TraceTimedOut"),
        (RuntimeError("broken"), "PredictorFailed"),
    ],
)
async def test_job_without_prediction_runs_alone(answer: Abstention | Exception, reason: str) -> None:
    world = World(FakeTracer(answer))
    await world.submit(model={"catalog": {"name": "timm/resnet50"}})
    assert world.condition(keys.CONDITION_PREDICTED).reason == reason
    assert world.living() == ["x-worker-0-1"]


async def test_new_product_in_the_cluster_renews_predictions() -> None:
    world = await submitted()
    node = world.kube.dump(GPU_NODES, "n1")
    node["metadata"] = {"name": "n2"}
    for device in node["status"]["devices"]:
        device["product"] = "Tesla T4"
    world.kube.seed(GPU_NODES, node)
    await world.settle()
    prediction = world.job().status.prediction
    assert prediction is not None
    assert [p.product for p in prediction.products] == ["NVIDIA A100-SXM4-40GB", "Tesla T4"]


async def test_job_that_never_fits_starts_when_a_larger_node_comes() -> None:
    world = await submitted(gpusPerWorker=8)
    assert world.condition(keys.CONDITION_PLACED).reason == "ExceedsEveryGpu"
    assert world.operator.queue.release_due() is None, "nothing to retry until the GPUs change"
    world.seed_node("large", gpus=8)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_foreign_pod_of_the_same_name_is_reported_until_it_is_gone() -> None:
    world = World()
    world.kube.seed(PODS, {"metadata": {"name": "x-worker-0-1"}, "status": {"phase": "Running"}})
    await world.submit()
    placed = world.condition(keys.CONDITION_PLACED)
    assert placed.reason == "PodNameTaken"
    assert "has no controller" in placed.message
    await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
    await world.settle(after_s=15)
    assert len(world.pods()) == 1


async def test_job_applied_again_while_the_pods_of_its_namesake_go() -> None:
    world = await submitted()
    pod = world.pods()[0]
    pod["metadata"]["finalizers"] = ["test/slow"]
    world.kube.seed(PODS, pod)
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    await world.submit()
    placed = world.condition(keys.CONDITION_PLACED)
    assert (placed.reason, "it is being deleted" in placed.message) == ("PodNameTaken", True)
    await world.kube.patch(PODS, "x-worker-0-1", {"metadata": {"finalizers": None}}, namespace="default")
    await world.settle()
    owner = world.pods()[0]["metadata"]["ownerReferences"][0]["uid"]
    assert owner == world.job().metadata.uid, "at once, when the old pod is gone"


async def test_pods_are_not_created_twice_while_the_watch_lags() -> None:
    world = World()
    world.apply()
    await world.settle(pods=False)
    world.operator.queue.add("default/x")
    await world.settle(pods=False)
    creates = [call for call in world.kube.calls if (call.verb, call.plural) == ("create", "pods")]
    assert len(creates) == 1


async def process_without_events(world: World, rounds: int) -> None:
    """Let the operator work, while its caches do not change."""
    for _ in range(rounds):
        await world.operator.predictions.idle()
        if (key := world.operator.queue.take_now()) is not None:
            await world.operator.process(key)
            world.operator.queue.done(key)


async def test_job_changed_by_its_user_meanwhile_is_read_again() -> None:
    world = World()
    world.apply()
    world.deliver_events()
    changed = job_body(runPolicy={"suspend": True})
    world.kube.seed(GPU_TRAINING_JOBS, changed | {"metadata": world.kube.dump(GPU_TRAINING_JOBS, "x")["metadata"]})
    await process_without_events(world, 5)
    assert world.job().status.state == "Suspended"
    await world.settle()
    await world.settle(after_s=DEBOUNCE_S)
    assert world.living() == []


@pytest.mark.parametrize(
    ("verb", "kind", "after"),
    [("replace", GPU_TRAINING_JOBS, False), ("create", PODS, False), ("create", PODS, True)],
    ids=["status", "pod", "pod created without an answer"],
)
async def test_failed_call_is_repeated_after_a_pause(verb: str, kind: ResourceKind, after: bool) -> None:
    world = World()
    world.apply()
    world.kube.fail_next(verb, kind, Overloaded("etcd is slow", status=503), after=after)
    await world.settle()
    assert world.operator.queue.release_due() == pytest.approx(0.5)
    await world.settle(after_s=0.5)
    await world.settle(after_s=DEBOUNCE_S)
    assert world.living() == ["x-worker-0-1"]
    assert world.job().status.attempts[0].pod_uids == [pod["metadata"]["uid"] for pod in world.pods()]


async def test_an_event_follows_a_status_that_was_written() -> None:
    """Another leader may have written it while this one was frozen: then its events are not repeated."""
    world = await submitted()
    world.run_pods()
    before = world.kube.dump_all(EVENTS)
    world.kube.fail_next("replace", GPU_TRAINING_JOBS, Conflict("changed meanwhile", status=409))
    world.deliver_events()
    with contextlib.suppress(Superseded):
        await world.operator.reconcile("default/x")
    assert world.kube.dump_all(EVENTS) == before
    await world.settle(after_s=DEBOUNCE_S)
    found = {event["reason"]: event["count"] for event in world.kube.dump_all(EVENTS)}
    assert found == {"Predicted": 1, "PodCreated": 1, "Placed": 1}


@pytest.mark.parametrize("by", ["watch", "write"])
async def test_deleted_job_is_forgotten(by: str) -> None:
    world = World()
    world.apply()
    world.deliver_events()
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    if by == "watch":
        await world.settle()
    else:
        await process_without_events(world, 3)
    assert len(world.operator.jobs) == 0
    assert len(world.pods()) == (by == "write")  # Kubernetes' garbage collector deletes it: its owner is gone


async def test_metrics_count_states_and_results() -> None:
    world = await submitted()
    registry = world.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_jobs", {"state": "Queued"}) == 1
    assert (registry.get_sample_value("carpool_operator_reconcile_total", {"result": "ok"}) or 0) > 0
    assert registry.get_sample_value("carpool_operator_prediction_seconds_count") == 1


async def test_metrics_show_placed_jobs_until_they_end() -> None:
    world = await running(sharing={"maxSlowdown": 2})
    world.measure(2900)
    await world.settle(after_s=60)
    value, job = world.operator.metrics.registry.get_sample_value, {"namespace": "default", "training_job": "x"}
    status = world.job().status
    assert status.prediction is not None
    predicted = {product.product: product for product in status.prediction.products}["NVIDIA A100-SXM4-40GB"]
    expected = {
        "max_slowdown_ratio": 2,
        "observed_memory_peak_bytes": 2900 * 2**20,
        "predicted_step_seconds": predicted.step_time_seconds.median,
        "restarts": 0,
    }
    assert {name: value(f"carpool_job_{name}", job) for name in expected} == expected
    for estimate, mib in (
        ("median", predicted.memory.median_mib),
        ("bound", status.placement[0].memory_limit_mib or 0),
    ):
        assert value("carpool_job_predicted_memory_bytes", job | {"estimate": estimate}) == mib * 2**20
    assert value("carpool_operator_predictions_total", {"outcome": "Predicted"}) == 1
    assert value("carpool_operator_attempts_total", {"outcome": "Complete"}) == 0
    assert value("carpool_operator_memory_peak_ratio_count", {"product": predicted.product}) == 0
    await world.finish_pod("x-worker-0-1")
    assert {value(f"carpool_job_{name}", job) for name in expected} == {None}
    assert value("carpool_operator_attempts_total", {"outcome": "Complete"}) == 1
    assert value("carpool_operator_finished_jobs_total", {"end": "Complete"}) == 1
    ratio = value("carpool_operator_memory_peak_ratio_sum", {"product": predicted.product})
    assert ratio == pytest.approx(2900 / predicted.memory.median_mib)


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        pytest.param("torch.OutOfMemoryError: CUDA out of memory.", "GpuOutOfMemory", id="memory"),
        pytest.param("", "ContainerFailed", id="other"),
    ],
)
async def test_metrics_count_restarts_by_cause(message: str, outcome: str) -> None:
    world = await running()
    await world.finish_pod("x-worker-0-1", exit_code=1, message=message)
    value = world.operator.metrics.registry.get_sample_value
    assert value("carpool_operator_attempts_total", {"outcome": outcome}) == 1
    assert value("carpool_operator_finished_jobs_total", {"end": "Failed"}) == 0


def test_operator_process_never_imports_torch() -> None:
    code = "import sys, carpool_operator.commands; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


NOPE = 'pods "x-worker-0-1" is forbidden: no PriorityClass with name nope was found'
QUOTA = 'pods "x-worker-0-1" is forbidden: exceeded quota: pods=10'


def warnings(world: World) -> list[tuple[str, str, int]]:
    """The job's warnings: reason, message and count."""
    found = [event for event in world.kube.dump_all(EVENTS) if event["type"] == "Warning"]
    return [(event["reason"], event["message"], event["count"]) for event in found]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([NOPE] * 4, (NOPE, 1), id="the same each time"),
        pytest.param([NOPE, QUOTA, QUOTA], (QUOTA, 2), id="another reason"),
        pytest.param(
            [f"{QUOTA}, used: {used}" for used in ("pods=10,cpu=9500m", "pods=9,cpu=9", "pods=10,cpu=1.5Ki")],
            (f"{QUOTA}, used: pods=10,cpu=9500m", 1),
            id="a quota whose numbers change",
        ),
    ],
)
@pytest.mark.parametrize(
    ("kind", "workers", "reason"),
    [
        (PODS, 1, "PodForbidden"),
        (SERVICES, 2, "ServiceForbidden"),
        (POD_DISRUPTION_BUDGETS, 2, "PodDisruptionBudgetForbidden"),
    ],
    ids=["pod", "service", "disruption budget"],
)
async def test_refused_creation_is_one_event_and_tried_again(
    messages: list[str], expected: tuple[str, int], kind: ResourceKind, workers: int, reason: str
) -> None:
    """Regression: `kubectl describe` showed no events of a job whose pod admission refused, or one for each try."""
    world = World()
    world.apply(workers=workers)
    for number, message in enumerate(messages):
        world.kube.fail_next("create", kind, Forbidden(message, status=403))
        await world.settle()
        assert (world.condition(keys.CONDITION_PLACED).reason, world.living()) == (reason, [])
        world.clock.advance(REFUSAL_BACKOFF.most_s)
        if number == len(messages) - 2:
            world.start()
    assert warnings(world) == [(reason, *expected)], "also after a restart of the operator"
    await world.settle()
    assert len(world.living()) == workers


@pytest.mark.parametrize("ahead_s", [0, 90, -90], ids=["same clock", "machine behind", "machine ahead"])
async def test_job_on_a_dead_node_continues_elsewhere(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a pod that was Terminating on a dead kubelet kept its job Running for a week.

    Regression: with the machine's clock ahead, a pod that ended gracefully was lost, and a second copy began.
    """
    monkeypatch.setattr(FakeKube, "server_ahead_s", ahead_s)
    world = World()
    world.seed_node("n2")
    await world.submit(workers=2)
    await world.start_pods()
    dead = world.kube.dump(PODS, "x-worker-0-1", "default")
    deleted_at = rfc3339(world.clock.now() + timedelta(seconds=ahead_s))
    dead["metadata"] |= {"deletionTimestamp": deleted_at, "finalizers": ["test/dead-node"]}
    world.kube.seed(PODS, dead)
    await world.settle()
    await world.settle(after_s=59)
    assert world.job().status.state == "Running", "the node may still confirm the end of its pod"
    await world.settle(after_s=1)
    assert sorted(world.living()) == ["x-worker-0-1", "x-worker-0-2", "x-worker-1-2"]
    await world.start_pods("n2")
    await world.settle(after_s=DEBOUNCE_S)
    status = world.job().status
    assert (status.state, status.restarts) == ("Running", 0)
    assert [attempt.outcome for attempt in status.attempts] == ["NodeLost", "Running"]
    assert {place.node for place in status.placement} == {"n2"}
    names = [env["value"] for env in world.pods()[-1]["spec"]["containers"][0]["env"] if env["name"] == "MASTER_ADDR"]
    assert names == ["worker-0-2.x-workers"], "the name of the lost worker leads to its old address"


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_denial_of_a_webhook_is_tried_again_with_growing_pauses(status: int) -> None:
    """Regression: a job whose pod was recreated during an outage of an image registry failed for good."""
    denial = 'admission webhook "images.example" denied the request: cannot reach registry.example'
    world = World()
    world.apply()
    for pause_s in (15, 30, 60, 120, 240, 240):
        world.kube.fail_next("create", PODS, error_for(status, "POST pods", denial))
        await world.settle()
        assert (world.condition(keys.CONDITION_PLACED).reason, world.job().status.state) == ("PodForbidden", "Queued")
        await world.settle(after_s=pause_s - 1)
        assert world.living() == [], "not tried again before the pause is over"
        world.clock.advance(1)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


class QuotaKube(MortalKube):
    """Refuses a fifth pod, as a ResourceQuota does."""

    async def create(self, kind: ResourceKind, *args: Any, **options: Any) -> Any:
        if kind is PODS and not options.get("is_dry_run") and len(self.dump_all(PODS)) >= 4:
            raise Forbidden("exceeded quota: pods=4", status=403)
        return await super().create(kind, *args, **options)


async def test_two_gangs_under_one_quota_run_one_after_the_other() -> None:
    """Regression: two jobs of three workers under a quota of four pods held two GPUs each for days."""
    world = World()
    world.kube.__class__ = QuotaKube
    for number in range(2):
        world.kube.seed(PODS, {"metadata": {"name": f"other-{number}"}, "status": {"phase": "Running"}})
    await world.submit("x", workers=3)
    for number in range(2):
        await world.kube.delete(PODS, f"other-{number}", namespace="default")
    await world.submit("y", workers=3)
    assert (len(world.living("x")), len(world.living("y"))) == (2, 2), "each has half of the quota"
    done: list[str] = []
    for _ in range(600):
        for name in {"x", "y"} - {*done}:
            if len(world.living(name)) == 3:  # the queue admits whole gangs only
                world.run_pods(name=name)
                for pod in world.living(name):
                    world.end_pod(pod)
                await world.settle()
                assert world.job(name).status.state == "Complete"
                done.append(name)
                for pod in world.pods(name):
                    await world.kube.delete(PODS, pod["metadata"]["name"], namespace="default")
        await world.settle(after_s=2)
    assert sorted(done) == ["x", "y"]
    assert "GangTimeout" in {attempt.outcome for name in done for attempt in world.job(name).status.attempts}
    assert all(world.job(name).status.restarts == 0 for name in done)


async def test_recreated_job_inherits_nothing() -> None:
    """Regression: a corrected job failed at once with the error of its deleted predecessor."""
    world = World()
    world.apply()
    message = 'Pod "x-worker-0-1" is invalid: spec.containers[0].image: Required value'
    world.kube.fail_next("check", PODS, Invalid(message, status=422))
    world.deliver_events()
    with contextlib.suppress(Superseded):
        await world.operator.reconcile("default/x")
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    world.apply()
    await world.settle()
    assert world.job().status.state == "Queued"
    assert world.job().status.attempts[0].pod_uids == [pod["metadata"]["uid"] for pod in world.pods()]
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    await world.settle()


async def test_a_job_that_was_deleted_before_a_write_was_answered_stays_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the answer put the job back into the cache, from which no event removed it."""
    world = World()
    write = world.kube.replace_status

    async def write_and_delete(*args: Any, **options: Any) -> Any:
        answer = await write(*args, **options)
        await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
        world.deliver_events()
        return answer

    world.apply()
    monkeypatch.setattr(world.kube, "replace_status", write_and_delete)
    await world.settle()
    assert status_writes(world) == 1
    assert len(world.operator.jobs) == 0


def test_refusal_of_one_worker_stays_until_its_pod_exists() -> None:
    """Regression: the condition alternated between the refusal and the reason of the other pod."""
    of = predicted_job(attempts=[{"number": 1, "outcome": "Creating"}], workers=2)
    refusal = Refusal("PodForbidden", NOPE, is_final=False)
    before = snapshot(of, pods=(pod(0, phase="Pending"),), refusal=refusal)
    refused = reconcile(before)
    assert events(refused) == ["PodForbidden"]
    tried_again = again(before, refused, refusal=None)
    assert created(tried_again) == ["x-worker-1-1"]
    still = msgspec.structs.replace(of, status=status_of(refused, of))
    assert condition(tried_again, still, "Placed").message == NOPE
    assert events(again(before, refused)) == []
    both = again(before, refused, refusal=None, pods=(pod(0, phase="Pending"), pod(1, phase="Pending")))
    assert condition(both, still, "Placed").reason == "Queued"


def version_of_job(version: str, uid: str = "u1") -> GpuTrainingJob:
    body = job_body()
    body["metadata"] |= {"uid": uid, "resourceVersion": version}
    return msgspec.convert(body, GpuTrainingJob)


def test_events_update_the_cache() -> None:
    jobs = World().operator.jobs
    first, newest, older = map(version_of_job, ("5", "10", "9"))
    for job in (first, newest, older):
        jobs.changed(None, job)
    assert [*jobs] == [newest], "older versions are ignored"
    assert jobs.share(first, version_of_job("10")) is newest, "the reflector's store holds no second copy"
    jobs.changed(version_of_job("11", uid="of-a-namesake"), None)
    assert len(jobs) == 1
    jobs.changed(newest, None)
    assert len(jobs) == 0


async def until(is_true: Callable[[], bool]) -> None:
    """Let the loop turn until something holds; the estimator's thread needs real time, on a busy machine a lot."""
    limit = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < limit, "it never came to that"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def running_operator(world: World) -> AsyncIterator[World]:
    running = asyncio.create_task(world.operator.run())
    yield world
    running.cancel()
    await asyncio.wait([running])
    await world.operator.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_operator(World()) as world:
        yield world


async def test_job_runs_through(world: World) -> None:
    assert world.operator.unready() == "the GpuNodes are not listed yet"
    world.apply()
    await until(lambda: world.living() == ["x-worker-0-1"])
    assert world.operator.unready() is None
    world.run_pods()
    await until(lambda: world.job().status.state == "Running")
    world.end_pod("x-worker-0-1")
    await until(lambda: world.job().status.state == "Complete")


async def test_unlisted_jobs_make_the_operator_unready(world: World) -> None:
    world.kube.fail_next("list", GPU_TRAINING_JOBS, Overloaded("etcd is slow", status=503))
    world.apply()
    await until(lambda: world.operator.unready() == "the GpuTrainingJobs are not listed yet")
    await until(lambda: world.clock.sleeping != [])
    world.clock.advance(1)
    await until(lambda: world.living() == ["x-worker-0-1"])


async def test_malformed_job_is_skipped(world: World) -> None:
    world.apply("odd", workers="many")
    world.apply()
    await until(lambda: world.living() == ["x-worker-0-1"])
    assert [job.metadata.name for job in world.operator.jobs] == ["x"]


async def submit_and_wait(world: World) -> None:
    """Apply a job, and wait until its attempt is recorded and nothing else is written."""
    world.apply()
    await until(lambda: world.job().status.attempts != [] and world.job().status.attempts[0].outcome == "Running")
    await until(lambda: world.operator.queue.is_idle)


async def test_job_deleted_during_an_expired_watch_is_forgotten(world: World) -> None:
    await submit_and_wait(world)
    world.kube.lose(GPU_TRAINING_JOBS, "x", "default")
    world.kube.compact()
    await until(lambda: len(world.operator.jobs) == 0)


async def test_pod_deleted_during_an_expired_watch_is_replaced(world: World) -> None:
    """Regression for informers that list again without a diff: the job would wait for its pod for ever."""
    await submit_and_wait(world)
    world.kube.lose(PODS, "x-worker-0-1", "default")
    world.kube.compact()
    await until(lambda: world.living() == ["x-worker-0-1"])
    await until(lambda: world.job().status.attempts[0].outcome == "Running")
    assert len(world.job().status.attempts) == 1, "a pod that was never bound is created again"


class Confined(MortalKube):
    """Lets jobs be read in one namespace only."""

    async def list_page(
        self, kind: ResourceKind, selector: Selector, *, limit: int = 500, continue_token: str = ""
    ) -> Page:
        if kind is GPU_TRAINING_JOBS and selector.namespace != "team-a":
            raise Forbidden("cannot list resource gputrainingjobs at the cluster scope", status=403)
        return await super().list_page(kind, selector, limit=limit, continue_token=continue_token)


async def test_rights_in_its_own_namespaces_are_enough() -> None:
    """Regression: it listed the jobs of the whole cluster once, whatever its namespaces."""
    world = World(namespaces="team-a")
    world.kube.__class__ = Confined
    await check_installed(world.kube, world.settings.namespace_list)
    body = job_body()
    body["metadata"]["namespace"] = "team-a"
    world.kube.seed(GPU_TRAINING_JOBS, body)
    async with running_operator(world):
        await until(lambda: [job.metadata.namespace for job in world.operator.jobs] == ["team-a"])


async def test_cluster_without_the_crds_is_reported() -> None:
    kube = FakeKube()
    kube.fail_next("list", GPU_TRAINING_JOBS, NotFound("the server could not find the requested resource", status=404))
    with pytest.raises(NotInstalledError, match="install the chart"):
        await check_installed(kube, ())


def connect_to(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process this cluster."""

    @asynccontextmanager
    async def connect(_: KubeSettings) -> AsyncIterator[FakeKube]:
        yield kube

    monkeypatch.setattr(commands, "connect", connect)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_process(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    kube = FakeKube()
    connect_to(kube, monkeypatch)
    for name in ("freeze", "set_threshold"):
        monkeypatch.setattr(commands.gc, name, lambda *_: None)  # they would apply to the other tests, too
    serving = asyncio.create_task(commands.serve(OperatorSettings(metrics_port=0)))
    await until(lambda: kube.open_watches == 3)
    signal.raise_signal(number)
    await until(serving.done)
    assert serving.exception() is None
    assert kube.open_watches == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--metrics-port", "{taken}"], "CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {taken}: "),
        (["--metrics-port", "-1"], "expected a number from 0 to 65535, found -1"),
        (["--workers", "0"], "expected a number from 1 on, found 0"),
        (["--traces", "-1"], "expected a number from 1 on, found -1"),
        (["--trace-timeout-seconds", "nan"], "expected a number from 1 to 86400, found nan"),
        (["--backoff-seconds", "inf"], "expected a number from 0 to 86400, found inf"),
        (["--calibration", "x"], "CARPOOL_CALIBRATION: expected NAMESPACE/NAME of a ConfigMap, or nothing, found 'x'"),
        (["--calibration", "a/b/c"], "expected NAMESPACE/NAME of a ConfigMap, or nothing, found 'a/b/c'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, taken: int, arguments: list[str], expected: str
) -> None:
    """Regression: a port in use and invalid numbers caused tracebacks."""
    connect_to(FakeKube(), monkeypatch)
    given = [part.format(taken=taken) for part in arguments]
    result = CliRunner().invoke(commands.operator, ["--metrics-port", "0", *given])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert expected.format(taken=taken) in result.output


@pytest.mark.parametrize(("identity", "distinct"), [("", 2), ("pod-1", 1)])
async def test_two_operators_of_one_host_have_different_identities(identity: str, distinct: int) -> None:
    """Regression: pods on their node's network have its name, and each took the other's Lease for its own."""
    holders, clock = set(), FakeClock()
    for _ in range(2):
        kube = FakeKube(clock)
        elector = elector_of(OperatorSettings(lease="carpool/operator", identity=identity), kube, clock)
        assert elector is not None
        await elector.acquire()
        holders.add(kube.dump(LEASES, "operator", "carpool")["spec"]["holderIdentity"])
    assert len(holders) == distinct
