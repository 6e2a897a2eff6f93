"""The operator as a whole on a cluster in memory."""

import subprocess
import sys

import pytest
from carpool_core import keys
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Forbidden, Invalid, Overloaded, Unreachable
from carpool_operator.conditions import find
from carpool_predictor.features import Abstention
from operator_fixtures import job_body
from operator_world import FakeTracer, World


def reason_of(world: World, type_: str) -> str:
    found = find(world.job().status, type_)
    assert found is not None, f"no condition {type_}"
    return found.reason


def status_writes(world: World) -> int:
    return sum(call.verb == "replace" for call in world.kube.calls)


async def test_job_from_its_application_to_its_end() -> None:
    world = World()
    world.apply()
    await world.settle()
    job = world.job()
    assert job.status.prediction is not None
    assert [p.product for p in job.status.prediction.products] == ["NVIDIA A100-SXM4-40GB"]
    assert job.status.prediction.input_digest.startswith("sha256:")
    assert world.living() == ["x-worker-0-1"]
    world.run_pods()
    await world.settle()
    assert world.job().status.state == "Running"
    assert world.job().status.placement[0].node == "n1"
    world.end_pod("x-worker-0-1")
    await world.settle()
    assert world.job().status.state == "Complete"
    reasons = {event["reason"] for event in world.kube.dump_all(EVENTS)}
    assert {"Predicted", "Placed", "Complete"} <= reasons
    assert status_writes(world) <= 5


async def test_settled_cluster_is_quiet() -> None:
    world = World()
    world.apply()
    await world.settle()
    before = len(world.kube.calls)
    for _ in range(3):
        world.operator.queue.add("default/x")
        await world.settle()
    assert len(world.kube.calls) == before


async def test_columns_of_kubectl_get_are_told_also_at_their_defaults() -> None:
    world = World()
    world.apply(model={"catalog": {"name": "timm/resnet50"}})
    world.hear()
    await world.operator.reconcile("default/x")
    status = world.kube.dump(GPU_TRAINING_JOBS, "x")["status"]
    assert (status["state"], status["restarts"]) == ("Predicting", 0)
    await world.settle()
    status = world.kube.dump(GPU_TRAINING_JOBS, "x")["status"]
    assert status["attempts"][0]["outcome"] == "Running"


async def test_prediction_stands_before_the_first_pod() -> None:
    world = World()
    world.apply()
    await world.settle()
    writes = [(call.verb, call.plural) for call in world.kube.calls if call.verb in ("create", "replace")]
    assert writes.index(("replace", "gputrainingjobs")) < writes.index(("create", "pods"))


async def test_equal_models_are_traced_once() -> None:
    world = World()
    for name in ("x", "y", "z"):
        world.apply(name, model={"catalog": {"name": "timm/resnet50"}})
    await world.settle(rounds=100)
    assert len(world.tracer.traced) == 1
    assert all(world.living(name) for name in ("x", "y", "z"))


async def test_tracer_that_abstains_lets_the_job_run_alone() -> None:
    world = World(FakeTracer(Abstention(reason="TraceTimedOut", message="took longer than 120 s")))
    world.apply(model={"catalog": {"name": "timm/resnet50"}})
    await world.settle()
    assert reason_of(world, keys.CONDITION_PREDICTED) == "TraceTimedOut"
    assert world.living() == ["x-worker-0-1"]


async def test_defect_of_the_predictor_lets_the_job_run_alone() -> None:
    world = World(FakeTracer(RuntimeError("broken")))
    world.apply(model={"catalog": {"name": "timm/resnet50"}})
    await world.settle()
    assert reason_of(world, keys.CONDITION_PREDICTED) == "PredictorFailed"
    assert world.living() == ["x-worker-0-1"]


async def test_new_product_in_the_cluster_renews_predictions() -> None:
    world = World()
    world.apply()
    await world.settle()
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
    world = World()
    world.apply(gpusPerWorker=8)
    await world.settle()
    assert reason_of(world, keys.CONDITION_PLACED) == "ExceedsEveryGpu"
    assert world.operator.queue.release_due() is None, "nothing to retry until the GPUs change"
    world.seed_node("large", gpus=8)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_template_that_the_api_server_refuses_fails_the_job() -> None:
    world = World()
    world.apply()
    template_message = 'Pod "x-worker-0-1" is invalid: spec.containers[0].image: Required value'
    world.kube.fail_next("create", PODS, Invalid(template_message, status=422))
    await world.settle()
    failed = find(world.job().status, keys.CONDITION_FAILED)
    assert failed is not None
    told = "spec.template.spec.containers[0].image: Required value; this ended the job: delete it, and apply"
    assert (failed.reason, failed.message) == ("InvalidTemplate", f"{told} the corrected one")
    assert world.living() == []


async def test_quota_is_told_and_tried_again() -> None:
    world = World()
    world.apply()
    world.kube.fail_next("create", PODS, Forbidden("exceeded quota: pods=10", status=403))
    await world.settle()
    assert reason_of(world, keys.CONDITION_PLACED) == "PodForbidden"
    assert world.living() == []
    world.clock.advance(15)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_pod_name_taken_by_somebody_else_is_said_and_healed() -> None:
    world = World()
    world.kube.seed(PODS, {"metadata": {"name": "x-worker-0-1"}, "status": {"phase": "Running"}})
    world.apply()
    await world.settle()
    placed = find(world.job().status, keys.CONDITION_PLACED)
    assert placed is not None
    assert placed.reason == "PodNameTaken"
    assert "has no controller" in placed.message
    await world.kube.delete(PODS, "x-worker-0-1", namespace="default")
    world.clock.advance(15)
    await world.settle()
    assert len(world.pods()) == 1


async def test_job_applied_again_while_the_pods_of_its_namesake_go() -> None:
    world = World()
    world.apply()
    await world.settle()
    pod = world.pods()[0]
    pod["metadata"]["finalizers"] = ["test/slow"]
    world.kube.seed(PODS, pod)
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    world.apply()
    await world.settle()
    assert reason_of(world, keys.CONDITION_PLACED) == "PodNameTaken"
    await world.kube.patch(PODS, "x-worker-0-1", {"metadata": {"finalizers": None}}, namespace="default")
    await world.settle()
    owner = world.pods()[0]["metadata"]["ownerReferences"][0]["uid"]
    assert owner == world.job().metadata.uid, "at once, when the old pod is gone"


async def test_pod_that_exists_already_is_taken_as_created() -> None:
    world = World()
    world.apply()
    world.kube.fail_next("create", PODS, Unreachable("no answer"), after=True)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]
    world.clock.advance(1)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]
    assert world.job().status.attempts[0].outcome == "Running"


async def test_operator_that_hears_of_its_pods_late_does_not_create_them_twice() -> None:
    world = World()
    world.apply()
    await world.settle(pods=False)
    world.operator.queue.add("default/x")
    await world.settle(pods=False)
    creates = [call for call in world.kube.calls if (call.verb, call.plural) == ("create", "pods")]
    assert len(creates) == 1


async def test_job_changed_by_its_user_meanwhile_is_read_again() -> None:
    world = World()
    world.apply()
    world.hear()
    changed = job_body(runPolicy={"suspend": True})
    world.kube.seed(GPU_TRAINING_JOBS, changed | {"metadata": world.kube.dump(GPU_TRAINING_JOBS, "x")["metadata"]})
    for _ in range(5):
        await world.operator.predictions.idle()
        if (key := world.operator.queue.take_now()) is not None:
            await world.operator.process(key)
            world.operator.queue.done(key)
    assert world.job().status.state == "Suspended"
    assert world.living() == []


async def test_failing_api_is_retried_with_growing_pauses() -> None:
    world = World()
    world.apply()
    world.kube.fail_next("replace", GPU_TRAINING_JOBS, Overloaded("etcd is slow", status=503))
    await world.settle()
    assert world.living() == []
    assert world.operator.queue.release_due() == pytest.approx(0.5)
    world.clock.advance(0.5)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_deleted_job_is_forgotten_and_its_pods_go_with_it() -> None:
    world = World()
    world.apply()
    await world.settle()
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    await world.settle()
    assert world.pods() == []
    assert len(world.operator.jobs) == 0


async def test_deletion_that_the_watch_missed_is_found_by_the_sweep() -> None:
    world = World()
    world.apply()
    await world.settle()
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    await world.operator.resync()
    assert len(world.operator.jobs) == 0


async def test_deletion_that_the_watch_missed_is_found_by_a_write() -> None:
    world = World()
    world.apply()
    world.hear()
    await world.kube.delete(GPU_TRAINING_JOBS, "x", namespace="default")
    world.operator.queue.add("default/x")
    for _ in range(3):
        await world.operator.predictions.idle()
        if (key := world.operator.queue.take_now()) is not None:
            await world.operator.process(key)
            world.operator.queue.done(key)
    assert len(world.operator.jobs) == 0
    assert world.pods() == []


async def test_finished_job_is_deleted_after_its_time() -> None:
    world = World()
    world.apply(runPolicy={"ttlSecondsAfterFinished": 60})
    await world.settle()
    world.end_pod("x-worker-0-1")
    await world.settle()
    world.clock.advance(60)
    await world.settle()
    assert world.kube.dump_all(GPU_TRAINING_JOBS) == []


async def test_metrics_tell_states_and_results() -> None:
    world = World()
    world.apply()
    await world.settle()
    registry = world.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_jobs", {"state": "Queued"}) == 1
    assert (registry.get_sample_value("carpool_operator_reconcile_total", {"result": "ok"}) or 0) > 0
    assert registry.get_sample_value("carpool_operator_prediction_seconds_count") == 1


def test_operator_process_never_imports_torch() -> None:
    code = "import sys, carpool_operator.commands; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
