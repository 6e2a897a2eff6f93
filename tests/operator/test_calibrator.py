"""The calibrator: each attempt is learned once, whatever crashes, and calibrates the next predictions."""

import json
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.api import CONFIG_MAPS, EVENTS, GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.errors import Conflict, Forbidden, Overloaded
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import LOADING_S, STEADY_S
from carpool_core.resources.prediction import MemoryPrediction, Prediction
from carpool_operator.calibrator import PAUSE_S, REPAIR_POLL_S
from carpool_operator.observations import Observation
from carpool_predictor.calibration.document import MAX_SAMPLES, MIN_JOBS, RunMeasurement
from carpool_predictor.calibration.store import KEY
from carpool_predictor.features import Abstention
from learning_world import (
    NAME,
    NAMESPACE,
    OOM,
    SeenEnoughError,
    as_measured,
    completed,
    kept,
    measured,
    measured_stable,
    memory,
    model,
    on_t4,
    run_until_on,
    running_world,
    stack,
    started,
    world,
    writes,
)
from operator_fixtures import FEATURES, job, job_body
from operator_world import World


async def ended_and_processed(of: World) -> None:
    """End the pod of job x, and reconcile the job once."""
    of.end_pod("x-worker-0-1")
    of.deliver_events()
    await of.operator.process("default/x")


async def assert_quiet(of: World, name: str) -> None:
    """Reconciliations of a settled job make no calls."""
    before = len(of.kube.calls)
    for _ in range(2):
        of.operator.queue.add(f"default/{name}")
        await of.settle()
    assert len(of.kube.calls) == before


async def test_measured_peak_calibrates_the_next_prediction() -> None:
    of = world()
    await completed(of, 3000)
    assert [(row.value_mib, row.steady) for row in as_measured(stack(of).rows)] == [(3000, True)]
    assert (stack(of).seen, stack(of).stack.driver) == (1, "simulated")
    document = json.loads(of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"][KEY])
    assert document["stacks"][0]["stack"]["product"] == "NVIDIA A100-SXM4-40GB"
    assert of.job().status.attempts[0].learned
    assert of.job().status.attempts[0].peak_memory_mib == 3000
    before = memory(of)
    assert (before.learned_jobs, before.learned_runs) == (0, 0)
    await of.submit("y")
    after = memory(of, "y")
    assert (after.median_mib, after.upper_mib, after.learned_runs) == (3000, pytest.approx(3300, abs=1), 1)
    assert "is calibrated from 1 run of the same training" in of.condition(keys.CONDITION_PREDICTED, "y").message
    assert memory(of) == before, "a job that ran keeps its prediction"
    await assert_quiet(of, "x")


async def test_gpu_in_no_table_is_predicted_from_its_figures_and_learned() -> None:
    of = world()
    home = of.kube.dump(GPU_NODES, "n1")
    figures = {
        "cudaCores": 19456,
        "smClockMhz": 2062,
        "memoryClockMhz": 3996,
        "memoryBusBits": 8192,
        "powerLimitW": 1200,
    }
    for device in home["status"]["devices"]:
        device |= {"product": "NVIDIA GB200", "computeCapability": "10.0", "figures": figures}
    of.kube.seed(GPU_NODES, home)
    await completed(of, 3000)
    prediction = of.job().status.prediction
    assert prediction is not None
    assert (prediction.reason, prediction.products[0].product) == ("DerivedProduct", "NVIDIA GB200")
    assert "NVIDIA GB200 is described from what NVML reports" in prediction.message
    assert [row.value_mib for row in as_measured(stack(of).rows)] == [3000]
    await of.submit("y")
    assert (memory(of, "y").upper_mib, memory(of, "y").learned_runs) == (pytest.approx(3300, abs=1), 1)


async def test_activity_is_learned_as_without_co_tenants() -> None:
    of = world()
    for name in ("x", "y"):
        of.apply(name)
        await started(of, name)
    for name in ("x", "y"):
        await measured(of, 3000, name, gpuUtilPercent=45.0, smActiveRatio=0.35)
    await of.settle(after_s=LOADING_S)
    for row in stack(of).rows:
        assert row.sm_active is not None
        assert 0.35 < row.sm_active < 2 * 0.35  # less than twice: two never slow each other down by more
    await of.submit("z")
    prediction = of.job("z").status.prediction
    assert prediction is not None
    assert prediction.products[0].activity.sm_active_ratio.median == pytest.approx(
        sum(row.sm_active or 0 for row in stack(of).rows) / 2
    )


async def test_workers_with_several_gpus_are_learned_apart() -> None:
    """The largest peak on one GPU counts, for jobs with as many GPUs: DDP adds buckets to each, FSDP divides."""
    of = world()
    await completed(of, 3000, gpusPerWorker=2)
    assert of.job().status.attempts[0].peak_memory_mib == 3000
    assert [row.value_mib for row in as_measured(stack(of).rows)] == [3000]
    await of.submit("y", gpusPerWorker=2)
    assert (memory(of, "y").upper_mib, memory(of, "y").learned_runs) == (pytest.approx(3300, abs=1), 1)
    await of.submit("z")
    assert memory(of, "z").learned_runs == 0
    await completed(of, 2000, "w")
    assert sorted((state.stack.gpus, as_measured(state.rows)[0].value_mib) for state in kept(of).stacks) == [
        (1, 2000),
        (2, 3000),
    ]


async def test_a_worker_that_ran_out_of_memory_had_what_its_fullest_gpu_left_it() -> None:
    of = world()
    of.apply(gpusPerWorker=2)
    await started(of, memoryLimitMib=None, mode="TimeSlicing")
    home = of.kube.dump(GPU_NODES, "n1")
    home["status"]["tenants"] = [{"podUid": "other", "gpuUuid": "n1-GPU-1", "memoryMib": 30_000}]
    of.kube.seed(GPU_NODES, home)
    await measured(of, 9000)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    available = home["status"]["devices"][1]["memoryMib"] - 30_000
    assert [(row.value_mib, row.censored) for row in as_measured(stack(of).rows)] == [(available, True)]


async def test_run_without_comparable_prediction_is_not_learned() -> None:
    of = world()
    await completed(of, 3000, model=None)
    assert of.job().status.state == "Complete"
    assert writes(of) == 0
    assert not of.job().status.attempts[0].learned


@pytest.mark.parametrize("happens", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("write", range(1, 9))
async def test_killed_at_each_write_each_attempt_counts_once(write: int, happens: bool) -> None:
    of = world(backoff_s=1.0)
    of.apply()
    await started(of, memoryLimitMib=3000)
    await measured(of, 2500)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.survive(write, happens=happens)
    await of.settle()
    await of.settle(after_s=60)
    await started(of, memoryLimitMib=6000)
    await measured(of, 4000)
    of.end_pod("x-worker-0-2")
    await of.survive(write, happens=happens)
    await of.settle()
    rows = sorted((row.value_mib, row.censored) for row in as_measured(stack(of).rows))
    assert rows == [(3000, True), (4000, False)]
    assert stack(of).seen == 2
    assert [attempt.learned for attempt in of.job().status.attempts] == [True, True]


async def test_observation_waits_for_a_transient_failure_of_the_predictor() -> None:
    of = await running_world(model={"catalog": {"name": "timm/resnet50"}})
    await measured(of, 3000)
    of.tracer.answer = Abstention(reason="TorchMissing", message="no torch here")
    of.start()
    await of.settle()
    await of.finish_pod("x-worker-0-1")
    assert of.job().status.state == "Complete"
    assert not of.job().status.attempts[0].learned
    assert writes(of) == 0
    of.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    await of.settle()
    assert writes(of) == 0
    await of.settle(after_s=600)
    await of.settle()
    assert stack(of).seen == 1
    assert of.job().status.attempts[0].learned


async def test_running_job_is_observed_once_its_peak_is_stable_and_at_its_end() -> None:
    of = await running_world()
    await measured(of, 2000)
    assert writes(of) == 0
    of.clock.advance(LOADING_S / 2)
    await measured(of, 3400)
    await of.settle(after_s=LOADING_S - 1)
    assert writes(of) == 0, "its peak has changed"
    await of.settle(after_s=1)
    assert [(row.value_mib, row.steady) for row in as_measured(stack(of).rows)] == [(3400, False)]
    assert stack(of).seen == 0
    await of.settle(after_s=STEADY_S)
    assert [row.steady for row in stack(of).rows] == [True]
    assert writes(of) == 2
    await of.finish_pod("x-worker-0-1")
    assert (len(stack(of).rows), stack(of).seen) == (1, 1)
    assert stack(of).outcomes == "0", "it took more than its bound"


@pytest.mark.parametrize(
    ("peaks", "uppers", "steady", "write_count"),
    [
        pytest.param([(2000, LOADING_S), (6000, STEADY_S), (6000, 0.0)], [2200, 6600, 6600], True, 2, id="grows once"),
        pytest.param(
            [(6000, LOADING_S), (6010, LOADING_S), (9000, LOADING_S)], [6600, 6600, 9900], False, 2, id="keeps growing"
        ),
        pytest.param([(3000, STEADY_S), (3500, STEADY_S)], [3300, 3850], True, 2, id="grows after it was steady"),
    ],
)
async def test_next_prediction_follows_the_peak_of_a_run(
    peaks: list[tuple[int, float]], uppers: list[int], steady: bool, write_count: int
) -> None:
    """Regression: only the first observation of a run counted until its end, however it grew."""
    of = await running_world()
    found = []
    for number, (peak_mib, wait_s) in enumerate(peaks):
        await measured_stable(of, peak_mib, wait_s)
        await of.submit(f"y{number}")
        found.append(memory(of, f"y{number}").upper_mib)
    assert found == [pytest.approx(upper, rel=0.02) for upper in uppers]
    assert [(row.value_mib, row.steady) for row in as_measured(stack(of).rows)] == [(peaks[-1][0], steady)]
    assert (stack(of).seen, writes(of)) == (0, write_count)


async def test_waiting_job_is_predicted_again_from_runs_of_its_model() -> None:
    """Regression: it kept the prediction from the first observation of a run."""
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await started(of, memoryLimitMib=7000)
    await measured_stable(of, 5000, LOADING_S)
    await of.submit("y")
    uppers = [memory(of, "y").upper_mib]
    await measured_stable(of, 6000, STEADY_S)
    await of.reconcile_again("y")
    uppers.append(memory(of, "y").upper_mib)
    await of.finish_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.reconcile_again("y")
    uppers.append(memory(of, "y").upper_mib)
    assert uppers == [5500, pytest.approx(6600, abs=1), 10_500]


async def test_steady_peak_stays_steady_across_a_restart() -> None:
    """Regression: a steady peak became a first observation again, which never lowers a bound."""
    of = await running_world()
    await measured_stable(of, 2000, STEADY_S)
    assert [row.steady for row in stack(of).rows] == [True]
    of.start()
    await of.settle(after_s=LOADING_S)
    assert [row.steady for row in stack(of).rows] == [True]
    await measured_stable(of, 3000, LOADING_S)
    assert [(row.value_mib, row.steady) for row in as_measured(stack(of).rows)] == [(3000, False)]


@pytest.mark.parametrize("wait_s", [0.0, LOADING_S], ids=["at once", "after an observation"])
@pytest.mark.parametrize("earlier", range(4))
async def test_each_out_of_memory_failure_raises_the_bound(earlier: int, wait_s: float) -> None:
    """Regression: with earlier runs, or an observation of its own, it got the same memory again, or less."""
    of = world(backoff_s=10.0)
    for number in range(earlier):
        await completed(of, 3000, f"k{number}")
    await of.submit(runPolicy={"backoffLimit": 5})
    had = [memory(of).upper_mib]
    for attempt in (1, 2):
        await started(of, memoryLimitMib=had[-1])
        await measured_stable(of, 2900, wait_s)
        await of.finish_pod(f"x-worker-0-{attempt}", exit_code=1, message=OOM)
        await of.settle(after_s=400)
        had.append(memory(of).upper_mib)
        assert memory(of).trusted is (attempt == 1)
        assert of.living() == [f"x-worker-0-{attempt + 1}"]
    assert had[1] == pytest.approx(1.5 * had[0], abs=1)
    assert had[2] > had[1]
    assert stack(of).seen == earlier + 2
    await started(of, mode="Exclusive", memoryLimitMib=None)
    predicted, placed = (of.condition(kind, "x").message for kind in (keys.CONDITION_PREDICTED, keys.CONDITION_PLACED))
    why = "ran out of memory on NVIDIA A100-SXM4-40GB, or took nearly all of it: once one has completed"
    assert "because earlier runs of this model" in predicted
    assert "(Exclusive), because earlier runs of this model" in placed
    assert why in placed


async def failed_with_a_whole_gpu() -> tuple[World, MemoryPrediction]:
    """Job x has run out of memory with a GPU alone; return its former prediction."""
    of = world(backoff_s=10.0)
    of.apply()
    await started(of, mode="Exclusive", memoryLimitMib=None)
    before = memory(of)
    await measured(of, 39_000)
    await of.finish_pod("x-worker-0-1", exit_code=1, message=OOM)
    return of, before


AVAILABLE = "of the 10,240 MiB that it could use, so nothing is learned"


@pytest.mark.parametrize(
    ("peak_mib", "log", "doubt", "restarted"),
    [
        pytest.param(300, OOM, f"the node's agent measured at most 300 MiB {AVAILABLE}", False, id="measured little"),
        pytest.param(300, OOM, f"the node's agent measured at most 300 MiB {AVAILABLE}", True, id="operator restarts"),
        pytest.param(0, OOM, f"the node's agent measured none {AVAILABLE}", False, id="not measured"),
        pytest.param(10_200, "", "only its measured memory shows that, so nothing is learned", False, id="no log"),
    ],
)
async def test_out_of_memory_without_both_log_and_measurement_teaches_nothing(
    peak_mib: int, log: str, doubt: str, restarted: bool
) -> None:
    """Regression: a job that printed the message with 300 MiB in use raised the bound of its model for all jobs."""
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await started(of, memoryLimitMib=10_240)
    before = memory(of)
    await measured(of, peak_mib)
    await of.finish_pod("x-worker-0-1", exit_code=1, message=log)
    if restarted:
        of.start()
        await of.settle()
    assert doubt in of.condition(keys.CONDITION_PLACED).message
    assert any(e["reason"] == "Restarting" and doubt in e["message"] for e in of.kube.dump_all(EVENTS))
    assert writes(of) == 0
    await of.submit("y")
    assert memory(of, "y") == before
    await of.settle(after_s=60)
    assert of.living() == ["x-worker-0-2"]
    assert not memory(of).trusted, "it runs alone, where a peak shows what it needs"
    await started(of, mode="Exclusive", memoryLimitMib=None)
    assert "log and measurements of attempt 1 do not both show" in of.condition(keys.CONDITION_PLACED).message


async def test_job_excluded_from_each_gpu_is_tried_alone_after_a_day() -> None:
    """Regression: one failure with a whole GPU made a model unplaceable for ever."""
    of, _ = await failed_with_a_whole_gpu()
    await of.settle(after_s=86_000)
    assert (of.job().status.state, of.living()) == ("Unplaceable", [])
    placed = of.condition(keys.CONDITION_PLACED)
    assert (placed.reason, "too small: needs" in placed.message) == ("ExceedsEveryGpu", True)
    of.start()
    await of.settle(after_s=1000)
    assert of.living() == ["x-worker-0-2"]
    assert not memory(of).trusted
    await started(of, mode="Exclusive", memoryLimitMib=None)
    await measured(of, 3000)
    await of.finish_pod("x-worker-0-2")
    await of.submit("y")
    assert of.living("y") == ["y-worker-0-1"], "a completed run disproves the failure"


async def test_exclusion_counts_only_in_its_own_namespace() -> None:
    """Regression: one job's failure with a whole GPU made its model unplaceable in every namespace."""
    of, before = await failed_with_a_whole_gpu()
    other = job_body("z")
    other["metadata"]["namespace"] = "other"
    of.kube.seed(GPU_TRAINING_JOBS, other)
    await of.submit("y")
    assert of.living("y") == []
    assert of.living("z") == ["z-worker-0-1"]
    prediction = msgspec.convert(of.kube.dump(GPU_TRAINING_JOBS, "z", "other"), GpuTrainingJob).status.prediction
    assert prediction is not None
    assert prediction.products[0].memory.upper_mib == before.upper_mib


async def test_next_attempt_waits_30_s_for_the_calibration() -> None:
    of = world(backoff_s=0.0)
    of.apply()
    await started(of, memoryLimitMib=3000)
    await measured(of, 2900)
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    await of.finish_pod("x-worker-0-1", exit_code=1, message=OOM)
    assert of.living() == []
    await of.settle(after_s=31)
    assert of.living() == ["x-worker-0-2"]


async def test_observations_of_simulated_gpus_serve_no_hardware() -> None:
    """Regression: three jobs on simulated GPUs were enough to share real ones of that product."""
    of = world()
    on_t4(of)
    for number in range(MIN_JOBS):
        await completed(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    home = of.kube.dump(GPU_NODES, "n1")
    for device in home["status"]["devices"][:1]:
        device["product"] = "Tesla T4"
    of.kube.seed(GPU_NODES, home)
    await of.submit("y", model=model(9))
    assert not memory(of, "y").trusted
    assert memory(of, "y").learned_jobs == 0
    await of.submit("z", model=model(1))
    assert memory(of, "z").learned_runs == 0


@pytest.mark.parametrize("restarted", [False, True])
async def test_waiting_job_is_predicted_again_once_its_stack_is_calibrated(restarted: bool) -> None:
    of = world()
    on_t4(of)
    await of.submit("waits", model=model(9))
    assert not memory(of, "waits").trusted
    assert "runs alone on Tesla T4 until enough" in of.condition(keys.CONDITION_PREDICTED, "waits").message
    for number in range(MIN_JOBS):
        await completed(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
        assert not memory(of, f"x{number}").trusted
    if restarted:  # the new process does not know the job's calibration keys
        untrusted = of.kube.dump(GPU_TRAINING_JOBS, "waits", "default")["status"]["prediction"]
        assert not untrusted["products"][0]["memory"]["trusted"]
        of.start()
    await of.reconcile_again("waits")
    assert (memory(of, "waits").trusted, memory(of, "waits").learned_jobs) == (True, MIN_JOBS)
    await assert_quiet(of, "waits")


@pytest.mark.parametrize(
    "technique",
    [
        pytest.param({"parallelism": {"kind": "fsdp", "gpus": 8}}, id="sharded"),
        pytest.param({"compile": True}, id="compiled"),
        pytest.param({"activationOffloading": True}, id="offloaded"),
        pytest.param({"crossEntropy": "fused"}, id="fused loss"),
        pytest.param({"varyingLengths": True}, id="varying lengths"),
    ],
)
async def test_jobs_with_unmeasured_techniques_learn_from_their_own_runs_only(technique: dict[str, Any]) -> None:
    """Regression: sharded, compiled and offloaded jobs moved the bounds of plain ones with as many GPUs."""

    def spec(size: int) -> dict[str, Any]:
        workers = 8 if "parallelism" in technique else 1
        found = {"features": model(size)["features"] | technique}
        return {"model": found, "training": technique, "workers": workers}

    of = world(share_unmeasured=False)
    on_t4(of)
    for number in range(MIN_JOBS):
        await completed(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    await of.submit("plain", model=model(9))
    (line,) = kept(of).stacks
    for number in range(MIN_JOBS):
        name = f"y{number}"
        of.apply(name, **spec(number + 5))
        await started(of, name)
        await measured(of, 13_000, name)
        for pod in of.pods(name):
            await of.finish_pod(pod["metadata"]["name"])
    await of.submit("other", model=model(9))
    assert memory(of, "other") == memory(of, "plain")
    assert line in kept(of).stacks
    await of.submit("first", **spec(9))
    first = memory(of, "first")
    assert (first.trusted, first.learned_jobs, first.learned_runs) == (False, 0, 0)
    await of.submit("again", **spec(5))
    assert memory(of, "again").median_mib == pytest.approx(13_000, abs=1)
    labels = {"product": "Tesla T4", "precision": "fp32", "driver": "simulated", "gpus": "1"}
    registry = of.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == MIN_JOBS


@pytest.mark.parametrize("settings", [{"share_unmeasured": True}, {"calibration": ""}])
async def test_unmeasured_jobs_share_if_set_so_or_without_learning(settings: dict[str, Any]) -> None:
    of = World(**({"calibration": f"{NAMESPACE}/{NAME}"} | settings))
    on_t4(of)
    await of.submit()
    assert memory(of).trusted


async def test_one_write_holds_no_more_observations_than_the_document_names() -> None:
    """Regression: the document named only the last observations of a large write."""
    of = world()
    await of.settle()
    calibrator = of.operator.calibrator
    found = job()
    for number in range(MAX_SAMPLES + 10):
        measured = RunMeasurement(peak_mib=3000, capacity_mib=40960, sample=f"{number}/1")
        calibrator.submit(found, Observation(f"{number}/1", "NVIDIA A100-SXM4-40GB", True, 4000, measured))
    sizes = []
    while not calibrator.is_settled:
        before = set(kept(of).counted) if sizes else set[str]()
        await calibrator.flush()
        sizes.append(len(set(kept(of).counted) - before))
    assert sizes == [MAX_SAMPLES // 2, MAX_SAMPLES // 2, 10]
    assert stack(of).seen == MAX_SAMPLES + 10


async def test_defect_drops_its_observations_and_not_the_operator() -> None:
    of = await running_world(model={"catalog": {"name": "timm/resnet50"}})
    await measured(of, 3000)
    features, of.tracer.answer = of.tracer.answer, ValueError("a defect")
    of.start()  # so that the model has to be traced again
    await of.settle()
    await ended_and_processed(of)
    assert not of.operator.calibrator.is_settled

    async def sleep(_seconds: float) -> None:
        raise SeenEnoughError

    with pytest.raises(SeenEnoughError):
        await of.operator.calibrator.run(sleep)
    assert of.operator.calibrator.is_settled
    assert writes(of) == 0
    of.tracer.answer = features
    await completed(of, 3000, "y")
    assert stack(of).seen == 2, "it was submitted again at the next reconciliation"


async def test_dropped_observation_is_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a process submitted each observation once, stored or not."""
    monkeypatch.setattr("carpool_operator.calibrator.MAX_PENDING", 0)
    of = world()
    await completed(of, 3000)
    assert writes(of) == 0
    monkeypatch.setattr("carpool_operator.calibrator.MAX_PENDING", 1)
    await of.reconcile_again()
    assert stack(of).seen == 1


async def test_concurrent_write_is_kept() -> None:
    of, other = world(), world()
    await completed(other, 3000, "y", model=model(2))
    await completed(of, 3000, model=model(1))
    theirs = other.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"]
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": theirs})
    await completed(of, 4000, "z", model=model(3))
    assert {row.sample for row in stack(of).rows} == {
        f"{other.job('y').metadata.uid}/1",
        f"{of.job('z').metadata.uid}/1",
    }


async def test_deleted_configmap_is_created_again() -> None:
    of = world()
    await completed(of, 3000)
    await of.kube.delete(CONFIG_MAPS, NAME, namespace=NAMESPACE)
    await completed(of, 3500, "y")
    assert [row.value_mib for row in as_measured(stack(of).rows)] == [3500]


async def test_repeated_conflicts_are_tried_again_later() -> None:
    of = world()
    await completed(of, 3000)
    of.apply("y")
    await started(of, "y")
    await measured(of, 3500, "y")
    for _ in range(5):
        of.kube.fail_next("patch", CONFIG_MAPS, Conflict("changed"))
    await of.finish_pod("y-worker-0-1")
    assert stack(of).seen == 1
    assert not of.operator.calibrator.is_settled
    await of.settle()
    assert stack(of).seen == 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param('{"format":3,"stacks":[', "expected a calibration", id="truncated"),
        pytest.param('{"format":4,"stacks":"other"}', "upgrade carpool", id="newer"),
        pytest.param('{"format":2}', "remove it", id="older"),
        pytest.param('{"format":3,"stacks":[{"slope":-1}]}', "expected a calibration", id="tampered"),
    ],
)
async def test_unreadable_configmap_is_reported_and_not_overwritten(content: str, word: str) -> None:
    of = world()
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {KEY: content, "a": "b"}})
    await completed(of, 3000)
    assert of.job().status.state == "Complete"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"] == {KEY: content, "a": "b"}
    (event,) = [e for e in of.kube.dump_all(EVENTS) if e["reason"] == "CalibrationUnreadable"]
    assert word in event["message"]
    assert event["involvedObject"]["name"] == NAME
    assert not of.operator.calibrator.is_on
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"a": "b"}})
    of.start()
    await of.settle()
    assert stack(of).seen == 1, "the observation is submitted again"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"]["a"] == "b"


async def test_repaired_configmap_is_used_without_a_restart() -> None:
    of = world()
    place = {"metadata": {"name": NAME, "namespace": NAMESPACE}}
    of.kube.seed(CONFIG_MAPS, place | {"data": {KEY: "{"}})
    await of.settle()
    assert not of.operator.calibrator.is_on

    def mend(naps: int) -> None:
        if naps == 2:
            of.kube.seed(CONFIG_MAPS, place | {"data": {}})

    running, naps = await run_until_on(of, mend)
    assert naps == [REPAIR_POLL_S, REPAIR_POLL_S]
    of.apply()
    await started(of)
    await measured(of, 3000)
    await ended_and_processed(of)
    with pytest.raises(SeenEnoughError):
        await running
    assert stack(of).seen == 1


async def test_without_read_access_nothing_is_learned() -> None:
    of = world()
    of.kube.fail_next("get", CONFIG_MAPS, Forbidden("may not"))
    await completed(of, 3000)
    assert of.job().status.state == "Complete"
    assert writes(of) == 0


async def test_forbidden_write_is_tried_again_after_a_longer_pause() -> None:
    of = await running_world()
    await measured(of, 3000)
    await ended_and_processed(of)
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise SeenEnoughError

    of.kube.fail_next("create", CONFIG_MAPS, Forbidden("may not"))
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    with pytest.raises(SeenEnoughError):
        await of.operator.calibrator.run(sleep)
    assert naps == [REPAIR_POLL_S, PAUSE_S, PAUSE_S]
    assert stack(of).seen == 1


async def test_failed_read_keeps_the_calibration_and_trusts_nothing_more() -> None:
    """Regression: after one failed read, jobs shared for a minute on products without measurements."""
    of = world()
    on_t4(of)
    await completed(of, 3000)
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    await of.operator.calibrator.load()
    assert of.operator.calibrator.is_on
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    of.start()
    await of.submit("y", model=model(9))
    assert not of.operator.calibrator.is_on
    assert not memory(of, "y").trusted
    running, naps = await run_until_on(of)
    assert naps == [PAUSE_S]
    running.cancel()


async def test_without_learning_no_configmap_is_read() -> None:
    of = World()
    await completed(of, 3000)
    assert not any(call.plural == "configmaps" for call in of.kube.calls)


async def test_metrics_report_the_calibration_by_stack() -> None:
    of = world()
    registry = of.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 0
    of.apply()
    await started(of)
    within = memory(of).upper_mib
    await measured(of, within)
    await of.finish_pod("x-worker-0-1")
    labels = {"product": "NVIDIA A100-SXM4-40GB", "precision": "fp32", "driver": "simulated", "gpus": "1"}
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 1
    assert registry.get_sample_value("carpool_operator_calibration_jobs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_refused_runs", labels) == 0
    assert registry.get_sample_value("carpool_operator_calibration_coverage_ratio", labels) == 1
    await completed(of, 2 * within, "y")
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == 2
    assert registry.get_sample_value("carpool_operator_calibration_coverage_ratio", labels) == 0.5
    assert registry.get_sample_value("carpool_operator_calibration_widening_ratio", labels) > 1


SLOW_STEP = FEATURES["steps"][0] | {"flops": 9e16}
"""A step that no GPU computes in less than a minute."""


def prediction(of: World, name: str = "x") -> Prediction:
    found = of.job(name).status.prediction
    assert found is not None
    return found


def steps(step_s: float, solo_s: float | None) -> dict[str, Any]:
    """Measurements of a tenant that reports its steps."""
    return {
        "gpuUtilPercent": 45.0,
        "smActiveRatio": 0.35,
        "settled": True,
        "stepTimeSeconds": step_s,
        "soloStepTimeSeconds": solo_s,
    }


async def test_measured_slowdown_of_a_pair_corrects_the_next_prediction() -> None:
    of = world()
    for name in ("x", "y"):
        of.apply(name)
        await of.settle()
        family = prediction(of, name).family
        tenant = {"family": family, "gpuUtilPercent": 50, "smActiveRatio": 0.5, "dramActiveRatio": 0.1}
        await started(of, name, tenant=tenant)
    for name in ("x", "y"):
        await measured(of, 3000, name, **steps(0.3, 0.2))
    await of.settle(after_s=LOADING_S)
    assert [round(one.log_ratio, 2) for one in kept(of).pairs] == [0.31, 0.31], "1.5 measured, 1.1 predicted"
    labels = {"product": "NVIDIA A100-SXM4-40GB", "mode": "MPS"}
    assert of.operator.metrics.registry.get_sample_value("carpool_operator_colocation_runs", labels) == 2
    await assert_quiet(of, "x")
    await of.submit("z")
    of_family, of_jobs, _ = prediction(of, "z").products[0].colocations
    assert (of_family.family, of_jobs.family) == (family.partition("@")[0], family)
    assert (of_jobs.runs, of_jobs.own_width, of_jobs.own == of_jobs.other) == (2, 0.0, True)
    assert of_jobs.own[0] > of_family.own[0] > 0.1
    assert prediction(of).products[0].colocations == [], "a job that runs keeps its prediction"


async def test_step_time_alone_of_an_earlier_run_gives_the_slowdown_of_one_that_was_never_alone() -> None:
    of = await running_world()
    await measured(of, 3000, **steps(0.2, 0.2))
    await of.settle(after_s=LOADING_S)
    assert [(one.step_s, one.namespace) for one in kept(of).solo] == [(0.2, "default")]
    of.apply("y")
    await started(of, "y")
    await measured(of, 3000, "y", **steps(0.5, None))
    await of.settle(after_s=LOADING_S)
    found = of.job("y").status.observed
    assert found is not None
    assert (found.slowdown, found.solo_source) == (2.5, "EarlierRun")
    assert of.job("x").status.observed.solo_source == "Run"
    assert len(kept(of).solo) == 1, "the earlier run's step time is not learned a second time"


async def test_measured_steps_alone_are_those_of_the_next_equal_job_and_change_those_of_its_family() -> None:
    of = world()
    of.apply("x")
    of.apply("waiting", training={"batchSize": 48})
    await of.settle()
    shipped_s = {name: prediction(of, name).products[0].step_time_seconds for name in ("x", "waiting")}
    await started(of, "x")
    took_s = 3 * shipped_s["x"].median
    await measured(of, 3000, "x", **steps(took_s, took_s))
    await of.settle(after_s=LOADING_S)
    await of.submit("y")
    found = prediction(of, "y").products[0]
    assert found.step_time_seconds.median == pytest.approx(took_s, rel=1e-3)
    assert found.step_time_factor == pytest.approx(3.0, rel=1e-3)
    assert found.comparable
    found = prediction(of, "waiting").products[0]
    assert 1.5 < found.step_time_factor < 3.0, "predicted anew while it waits"
    ratio = found.step_time_seconds.median / shipped_s["waiting"].median
    assert ratio == pytest.approx(found.step_time_factor, rel=1e-3)
    await assert_quiet(of, "waiting")
    calibration = of.operator.calibrator.usable("other")
    assert calibration is not None
    assert calibration.solo == [], "steps count for the namespaces that reported them"


async def test_steps_on_a_mig_instance_are_not_those_of_the_whole_gpu() -> None:
    """Regression: the next equal job was predicted to be as slow on a whole GPU as on an instance of it."""
    of = world()
    of.apply("x")
    await started(of, "x", mode="MIG", migProfile="1g.5gb", memoryLimitMib=None)
    await measured(of, 3000, "x", **steps(7.0, 7.0))
    await of.settle(after_s=LOADING_S)
    assert kept(of).solo == []
    await of.submit("y")
    assert not prediction(of, "y").products[0].comparable


async def test_very_short_steps_do_not_renew_a_prediction_again_and_again() -> None:
    """Regression: a factor below 0.00005 was rounded to 0, and one of 0.00014 to 0.0001, which is no longer near it."""
    of = await running_world(model={"features": FEATURES | {"steps": [SLOW_STEP]}})
    modelled_s = prediction(of).products[0].step_time_seconds.median
    await measured(of, 3000, **steps(1e-6, 1e-6))
    await of.settle(after_s=LOADING_S)
    await of.submit("y", model={"features": FEATURES | {"steps": [SLOW_STEP]}})
    found = prediction(of, "y").products[0]
    assert found.step_time_seconds.median == pytest.approx(1e-6)
    assert found.step_time_factor == pytest.approx(1e-6 / modelled_s)
    await assert_quiet(of, "y")
    await started(of, "y")
    await measured(of, 3000, "y", **steps(2e-6, 2e-6))
    (record,) = kept(of).solo
    assert (record.step_s, record.predicted_s) == (2e-6, pytest.approx(modelled_s, rel=1e-4))


async def test_a_step_time_beyond_the_record_s_range_leaves_the_calibration_readable() -> None:
    """Regression: the operator wrote a document that it could not read again, and learned nothing from then on."""
    slowest = SLOW_STEP | {"flops": 9e18, "bytesMoved": 1e18}
    of = await running_world(model={"features": FEATURES | {"steps": [slowest]}})
    assert prediction(of).products[0].step_time_seconds.median > 1e6
    await measured(of, 3000, **steps(0.2, 0.2))
    await of.settle(after_s=LOADING_S)
    await of.operator.calibrator.load()
    assert [one.step_s for one in kept(of).solo] == [0.2]


@pytest.mark.parametrize(
    ("since_s", "changes", "learned"),
    [
        pytest.param(100, {}, [0.2], id="none of its GPUs is shared"),
        pytest.param(60, {}, [], id="a co-tenant left a minute ago"),
        pytest.param(100, {"settled": False}, [], id="not measured for long"),
    ],
)
async def test_step_time_alone_of_a_job_on_several_gpus_is_learned_apart(
    since_s: int, changes: dict[str, Any], learned: list[float]
) -> None:
    """The agents' own steps alone (0.1) do not count: a GPU is not shared, but the job waits for another one."""
    of = await running_world(workers=2)
    since = rfc3339(of.clock.now() - timedelta(seconds=since_s))
    await measured(of, 3000, **steps(0.2, 0.1) | {"tenantsSince": since} | changes)
    assert [one.step_s for one in kept(of).solo] == learned if learned else writes(of) == 0
    found = of.job().status.observed
    assert found is not None
    assert found.slowdown == (1.0 if learned else None)
    if learned:
        for name, workers in (("y", 2), ("z", 1)):
            await of.submit(name, workers=workers)
            assert prediction(of, name).products[0].comparable == (workers == 2)
