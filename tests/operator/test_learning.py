"""The operator learns from what ran: once from each attempt, whatever dies in between, and uses it for the next."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from carpool_core import keys
from carpool_core.clock import rfc3339
from carpool_core.kube.api import CONFIG_MAPS, EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.kube.errors import Conflict, Forbidden, Overloaded, Unreachable
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.prediction import MemoryPrediction
from carpool_core.settings import SettingsError
from carpool_operator.app import NEWS_S
from carpool_operator.conditions import find
from carpool_operator.learner import PAUSE_S, REPAIRED_S
from carpool_operator.lessons import Lesson
from carpool_operator.settings import OperatorSettings
from carpool_predictor.abstention import Abstention
from carpool_predictor.calibration import COUNTED, FEWEST, Calibration, Measured, StackState, read_calibration
from carpool_predictor.calibration_map import KEY
from carpool_predictor.observe import SEEN_S, STEADY_S
from operator_fixtures import FEATURES, job
from operator_world import World

NAMESPACE, NAME = "carpool-system", "learned"
OOM = "torch.OutOfMemoryError: CUDA out of memory"


def world(**settings: Any) -> World:
    return World(calibration=f"{NAMESPACE}/{NAME}", **settings)


def kept(of: World) -> Calibration:
    return read_calibration(of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"][KEY].encode())


def stack(of: World) -> StackState:
    (state,) = kept(of).stacks
    return state


def memory(of: World, name: str = "x") -> MemoryPrediction:
    prediction = of.job(name).status.prediction
    assert prediction is not None
    (product,) = prediction.products
    return product.memory


def writes(of: World) -> int:
    return sum(call.plural == "configmaps" and call.verb in ("create", "patch") for call in of.kube.calls)


def model(size: int) -> dict[str, Any]:
    """A model that no other one resembles."""
    steps = [FEATURES["steps"][0] | {"peakBytes": 500_000_000 * size, "activationBytes": 400_000_000 * size}]
    return {"features": FEATURES | {"steps": steps}}


async def begun(of: World, name: str = "x", **reserved_with: Any) -> None:
    """Let a job's pods run since a moment ago."""
    await of.settle()
    at = rfc3339(of.clock.now())
    of.run_pods(name=name, reservedAt=at, **reserved_with)
    for pod in of.pods(name):
        if pod["status"]["phase"] == "Running":
            pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = at
            of.kube.seed(PODS, pod)
    await of.settle()


async def seen(of: World, peak_mib: int, name: str = "x", **measures: Any) -> None:
    """Let the agent report, and the operator hear of it."""
    of.measure(peak_mib, name, **measures)
    of.hear()
    of.clock.advance(NEWS_S)
    await of.settle()


async def ran(of: World, peak_mib: int, name: str = "x", **spec: Any) -> None:
    """Let a job run to its end."""
    of.apply(name, **spec)
    await begun(of, name)
    await seen(of, peak_mib, name)
    of.end_pod(f"{name}-worker-0-1")
    await of.settle()


async def test_what_a_job_took_is_what_the_next_of_its_kind_is_predicted() -> None:
    of = world()
    await ran(of, 3000)
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3000, True)]
    assert (stack(of).seen, stack(of).stack.driver) == (1, "simulated")
    assert of.job().status.attempts[0].learned
    assert of.job().status.attempts[0].peak_memory_mib == 3000
    before = memory(of)
    assert (before.learned_jobs, before.learned_runs) == (0, 0)
    of.apply("y")
    await of.settle()
    after = memory(of, "y")
    assert (after.median_mib, after.upper_mib, after.learned_runs) == (3000, pytest.approx(3300, abs=1), 1)
    told = find(of.job("y").status, keys.CONDITION_PREDICTED)
    assert told is not None
    assert "is calibrated from 1 run of this very one" in told.message
    assert memory(of) == before, "of a job that ran, the prediction stays what it was"


async def test_a_settled_cluster_that_learns_is_quiet() -> None:
    of = world()
    await ran(of, 3000)
    before = len(of.kube.calls)
    for _ in range(3):
        of.operator.queue.add("default/x")
        await of.settle()
    assert len(of.kube.calls) == before


async def test_a_running_job_tells_its_peak_once_it_has_not_moved_for_long_and_its_end_counts_it() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 2000)
    assert writes(of) == 0
    of.clock.advance(SEEN_S / 2)
    await seen(of, 3000)
    of.clock.advance(SEEN_S - 1)
    await of.settle()
    assert writes(of) == 0, "its peak has moved"
    of.clock.advance(1)
    await of.settle()
    assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(3000, False)]
    assert stack(of).seen == 0
    of.clock.advance(STEADY_S)
    await of.settle()
    assert [row.steady for row in stack(of).rows] == [True]
    assert writes(of) == 2
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert (len(stack(of).rows), stack(of).seen, stack(of).outcomes) == (
        1,
        1,
        "0" if memory(of).upper_mib < 3000 else "1",
    )


async def test_a_peak_that_moves_after_it_was_steady_is_told_before_the_end() -> None:
    """Regression: a job that grew late taught nothing of it until it ended, after days perhaps."""
    of = world()
    of.apply()
    await begun(of)
    for peak_mib in (3000, 3500):
        await seen(of, peak_mib)
        of.clock.advance(STEADY_S)
        await of.settle()
        assert [(row.value_mib, row.steady) for row in stack(of).rows] == [(peak_mib, True)]
    assert stack(of).seen == 0


async def test_an_operator_that_was_restarted_tells_what_runs_again_and_counts_it_once() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 3000)
    of.clock.advance(SEEN_S)
    await of.settle()
    of.start()
    of.clock.advance(STEADY_S)
    await of.settle()
    of.clock.advance(STEADY_S)
    await of.settle()
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert (len(stack(of).rows), stack(of).seen) == (1, 1)


async def test_activity_is_learned_as_it_is_without_neighbours() -> None:
    of = world()
    for name in ("x", "y"):
        of.apply(name)
        await begun(of, name)
    for name in ("x", "y"):
        await seen(of, 3000, name, gpuUtilPercent=45.0, smActiveRatio=0.42)
    of.clock.advance(SEEN_S)
    await of.settle()
    for row in stack(of).rows:
        assert row.sm_active is not None
        assert 0.42 <= row.sm_active < 0.6
    of.apply("z")
    await of.settle()
    prediction = of.job("z").status.prediction
    assert prediction is not None
    assert prediction.products[0].activity.sm_active_ratio.median == pytest.approx(
        sum(row.sm_active or 0 for row in stack(of).rows) / 2
    )


async def test_who_died_of_memory_gets_more_and_then_a_gpu_alone() -> None:
    of = world(backoff_s=10.0)
    of.apply(runPolicy={"backoffLimit": 3})
    await begun(of, memoryLimitMib=3000)
    uppers = [memory(of).upper_mib]
    for attempt in (1, 2):
        of.end_pod(f"x-worker-0-{attempt}", exit_code=1, message=OOM)
        await of.settle()
        assert of.job().status.attempts[-1].learned
        of.clock.advance(60)
        await of.settle()
        assert of.living() == [f"x-worker-0-{attempt + 1}"]
        uppers.append(memory(of).upper_mib)
        if attempt == 1:
            assert memory(of).trusted
        await begun(of, memoryLimitMib=uppers[-1])
    assert uppers[1] == 4500
    assert not memory(of).trusted
    assert stack(of).seen == 2


async def test_the_next_attempt_waits_until_its_predecessors_end_is_learned_but_not_for_ever() -> None:
    of = world(backoff_s=0.0)
    of.apply()
    await begun(of, memoryLimitMib=3000)
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    of.kube.fail_next("create", CONFIG_MAPS, Overloaded("busy"))
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.settle()
    assert of.living() == []
    of.clock.advance(31)
    await of.settle()
    assert of.living() == ["x-worker-0-2"]


async def test_a_job_whose_memory_was_never_promised_judges_no_bound() -> None:
    of = world()
    of.apply(model=None)
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert writes(of) == 0, "nothing was predicted, so nothing is compared"
    assert not of.job().status.attempts[0].learned


async def test_a_worker_of_several_gpus_teaches_nothing() -> None:
    of = world()
    await ran(of, 3000, gpusPerWorker=2)
    assert writes(of) == 0


@pytest.mark.parametrize("happens", [False, True], ids=["before the write", "after the write"])
@pytest.mark.parametrize("write", range(1, 9))
async def test_killed_at_each_write_nothing_counts_twice_and_nothing_is_lost(write: int, happens: bool) -> None:
    of = world(backoff_s=1.0)
    of.apply()
    await begun(of, memoryLimitMib=3000)
    await seen(of, 2500)
    of.end_pod("x-worker-0-1", exit_code=1, message=OOM)
    await of.survive(write, happens=happens)
    await of.settle()
    of.clock.advance(60)
    await of.settle()
    await begun(of, memoryLimitMib=6000)
    await seen(of, 4000)
    of.end_pod("x-worker-0-2")
    await of.survive(write, happens=happens)
    await of.settle()
    rows = sorted((row.value_mib, row.censored) for row in stack(of).rows)
    assert rows == [(3000, True), (4000, False)]
    assert stack(of).seen == 2
    assert [attempt.learned for attempt in of.job().status.attempts] == [True, True]


async def test_one_write_counts_no_more_than_the_document_names() -> None:
    """Regression: of many lessons in one write only the last were named, and the others counted twice after a crash."""
    of = world()
    await of.settle()
    learner = of.operator.learner
    found = job()
    for number in range(COUNTED + 10):
        measured = Measured(peak_mib=3000, capacity_mib=40960, sample=f"{number}/1")
        learner.offer(found, Lesson(f"{number}/1", "NVIDIA A100-SXM4-40GB", True, 4000, measured))
    sizes = []
    while not learner.is_settled:
        before = set(kept(of).counted) if sizes else set[str]()
        await learner.flush()
        sizes.append(len(set(kept(of).counted) - before))
    assert sizes == [COUNTED // 2, COUNTED // 2, 10]
    assert stack(of).seen == COUNTED + 10


async def test_an_answer_that_got_lost_counts_once() -> None:
    of = world()
    for number, verb in enumerate(("create", "patch"), start=1):
        of.kube.fail_next(verb, CONFIG_MAPS, Unreachable("no answer"), after=True)
        await ran(of, 3000, f"x{number}")
        await of.settle()
        assert stack(of).seen == number
        assert of.job(f"x{number}").status.attempts[0].learned


async def test_what_somebody_else_wrote_meanwhile_is_kept() -> None:
    of, other = world(), world()
    await ran(other, 3000, "y", model=model(2))
    await ran(of, 3000, model=model(1))
    theirs = other.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"]
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": theirs})
    await ran(of, 4000, "z", model=model(3))
    assert {row.sample for row in stack(of).rows} == {
        f"{other.job('y').metadata.uid}/1",
        f"{of.job('z').metadata.uid}/1",
    }


async def test_a_configmap_that_was_removed_is_learned_anew() -> None:
    of = world()
    await ran(of, 3000)
    await of.kube.delete(CONFIG_MAPS, NAME, namespace=NAMESPACE)
    await ran(of, 3500, "y")
    assert [row.value_mib for row in stack(of).rows] == [3500]


async def test_a_configmap_that_is_written_all_the_time_is_told_of_and_tried_again() -> None:
    of = world()
    await ran(of, 3000)
    of.apply("y")
    await begun(of, "y")
    await seen(of, 3500, "y")
    for _ in range(5):
        of.kube.fail_next("patch", CONFIG_MAPS, Conflict("changed"))
    of.end_pod("y-worker-0-1")
    await of.settle()
    assert stack(of).seen == 1
    assert not of.operator.learner.is_settled
    await of.settle()
    assert stack(of).seen == 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        pytest.param('{"format":2,"stacks":[', "expected a calibration", id="truncated"),
        pytest.param('{"format":3,"stacks":"other"}', "upgrade carpool", id="newer"),
        pytest.param('{"format":1}', "remove it", id="older"),
        pytest.param('{"format":2,"stacks":[{"slope":-1}]}', "expected a calibration", id="tampered"),
    ],
)
async def test_what_cannot_be_read_is_told_and_left_alone(content: str, word: str) -> None:
    of = world()
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {KEY: content, "a": "b"}})
    await ran(of, 3000)
    assert of.job().status.state == "Complete"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"] == {KEY: content, "a": "b"}
    (event,) = [e for e in of.kube.dump_all(EVENTS) if e["reason"] == "CalibrationUnreadable"]
    assert word in event["message"]
    assert event["involvedObject"]["name"] == NAME
    assert not of.operator.learner.is_on
    # Repaired, it is used from the next start on.
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"a": "b"}})
    of.start()
    await of.settle()
    assert stack(of).seen == 1, "the job told again what nobody had learned"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"]["a"] == "b"


class SeenEnoughError(Exception):
    """The test has seen enough."""


async def test_a_document_that_was_repaired_is_used_without_a_restart() -> None:
    of = world()
    place = {"metadata": {"name": NAME, "namespace": NAMESPACE}}
    of.kube.seed(CONFIG_MAPS, place | {"data": {KEY: "{"}})
    await of.settle()
    assert not of.operator.learner.is_on
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            of.kube.seed(CONFIG_MAPS, place | {"data": {}})
        if of.operator.learner.is_on:
            raise SeenEnoughError

    running = asyncio.create_task(of.operator.learner.run(sleep))
    for _ in range(20):
        await asyncio.sleep(0)
    assert of.operator.learner.is_on
    assert naps == [REPAIRED_S, REPAIRED_S]
    of.apply()
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    of.hear()
    await of.operator.look_safely("default/x")
    with pytest.raises(SeenEnoughError):
        await running
    assert stack(of).seen == 1


async def test_a_defect_costs_the_lessons_that_met_it_and_not_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    of.hear()
    await of.operator.look_safely("default/x")
    assert not of.operator.learner.is_settled

    async def sleep(_seconds: float) -> None:
        raise SeenEnoughError

    def broken(*_: object) -> Calibration:
        raise ValueError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr("carpool_operator.learner.taken", broken)
        with pytest.raises(SeenEnoughError):
            await of.operator.learner.run(sleep)
    assert of.operator.learner.is_settled
    await ran(of, 3000, "y")
    assert stack(of).seen == 2, "it was told again when its job was looked at"


async def test_what_can_no_longer_be_compared_is_not_said_to_be_learned() -> None:
    of = world()
    of.apply(model={"catalog": {"name": "timm/resnet50"}})
    await begun(of)
    await seen(of, 3000)
    of.tracer.answer = Abstention(reason="TorchMissing", message="no torch here")
    of.start()
    await of.settle()
    of.end_pod("x-worker-0-1")
    await of.settle()
    assert of.job().status.state == "Complete"
    assert not of.job().status.attempts[0].learned
    assert writes(of) == 0
    # What lies in the moment is tried again, though not all the time.
    of.tracer.answer = msgspec.convert(FEATURES, ModelFeatures)
    await of.settle()
    assert writes(of) == 0
    of.clock.advance(600)
    await of.settle()
    await of.settle()
    assert stack(of).seen == 1
    assert of.job().status.attempts[0].learned


async def test_a_lesson_that_was_dropped_is_told_again_when_its_job_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: what a job had told once was never told again by this process, taken in or not."""
    monkeypatch.setattr("carpool_operator.learner.MOST_PENDING", 0)
    of = world()
    await ran(of, 3000)
    assert writes(of) == 0
    monkeypatch.setattr("carpool_operator.learner.MOST_PENDING", 1)
    of.operator.queue.add("default/x")
    await of.settle()
    assert stack(of).seen == 1


async def test_who_may_not_read_it_learns_nothing_and_predicts_as_shipped() -> None:
    of = world()
    of.kube.fail_next("get", CONFIG_MAPS, Forbidden("may not"))
    await ran(of, 3000)
    assert of.job().status.state == "Complete"
    assert writes(of) == 0


async def test_one_failed_read_takes_nothing_away_and_trusts_nothing_more() -> None:
    """Regression: after one answer that failed, jobs shared for a minute where nothing was measured."""
    of = world()
    on_t4(of)
    await ran(of, 3000)
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    await of.operator.learner.load()
    assert of.operator.learner.is_on
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    of.start()
    of.apply("y", model=model(9))
    await of.settle()
    assert not of.operator.learner.is_on
    assert not memory(of, "y").trusted
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        if of.operator.learner.is_on:
            raise SeenEnoughError

    running = asyncio.create_task(of.operator.learner.run(sleep))
    for _ in range(20):
        await asyncio.sleep(0)
    assert of.operator.learner.is_on
    assert naps == [PAUSE_S]
    running.cancel()


async def test_switched_off_it_asks_for_no_configmap() -> None:
    of = World()
    await ran(of, 3000)
    assert not any(call.plural == "configmaps" for call in of.kube.calls)


def on_t4(of: World) -> None:
    home = of.kube.dump(GPU_NODES, "n1")
    for device in home["status"]["devices"]:
        device["product"], device["memoryMib"] = "Simulated Tesla T4", 15360
    of.kube.seed(GPU_NODES, home)


async def test_where_nothing_was_measured_jobs_run_alone_until_enough_was() -> None:
    of = world()
    on_t4(of)
    for number in range(FEWEST):
        name = f"x{number}"
        await ran(of, 2000 + 500 * number, name, model=model(number + 1))
        assert not memory(of, name).trusted
    of.apply("y", model=model(9))
    await of.settle()
    assert memory(of, "y").trusted
    assert memory(of, "y").learned_jobs == FEWEST
    told = find(of.job("x0").status, keys.CONDITION_PREDICTED)
    assert told is not None
    assert told.reason == "Uncalibrated"
    assert "runs alone on Tesla T4 until enough like it was measured there" in told.message


async def test_what_simulated_gpus_taught_makes_no_hardware_trusted() -> None:
    """Regression: three jobs on simulated GPUs were enough to share real ones of that product."""
    of = world()
    on_t4(of)
    for number in range(FEWEST):
        await ran(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    home = of.kube.dump(GPU_NODES, "n1")
    for device in home["status"]["devices"][:1]:
        device["product"] = "Tesla T4"
    of.kube.seed(GPU_NODES, home)
    of.apply("y", model=model(9))
    await of.settle()
    assert not memory(of, "y").trusted
    assert memory(of, "y").learned_jobs == 0
    of.apply("z", model=model(1))
    await of.settle()
    assert memory(of, "z").learned_runs == 0


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_job_that_waits_hears_that_its_stack_was_calibrated(restarted: bool) -> None:
    of = world()
    on_t4(of)
    of.apply("waits", model=model(9))
    await of.settle()
    assert not memory(of, "waits").trusted
    for number in range(FEWEST):
        await ran(of, 2000 + 500 * number, f"x{number}", model=model(number + 1))
    if restarted:  # it knows no job's size yet, and no list of news
        untrusted = of.kube.dump(GPU_TRAINING_JOBS, "waits", "default")["status"]["prediction"]
        assert not untrusted["products"][0]["memory"]["trusted"]
        of.start()
    of.operator.queue.add("default/waits")
    await of.settle()
    assert memory(of, "waits").trusted
    before = len(of.kube.calls)
    of.operator.queue.add("default/waits")
    await of.settle()
    assert len(of.kube.calls) == before


@pytest.mark.parametrize("settings", [{"share_unmeasured": True}, {"calibration": ""}])
async def test_unmeasured_jobs_share_where_the_site_says_so_or_nothing_is_learned(settings: dict[str, Any]) -> None:
    of = World(**({"calibration": f"{NAMESPACE}/{NAME}"} | settings))
    on_t4(of)
    of.apply()
    await of.settle()
    assert memory(of).trusted


async def test_metrics_tell_what_was_learned_by_stack() -> None:
    of = world()
    registry = of.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 0
    await ran(of, 3000)
    labels = {"product": "NVIDIA A100-SXM4-40GB", "precision": "fp32", "driver": "simulated"}
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 1
    assert registry.get_sample_value("carpool_operator_calibration_jobs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_refused_runs", labels) == 0
    assert registry.get_sample_value("carpool_operator_calibration_coverage_ratio", labels) in (0, 1)


@pytest.mark.parametrize("text", ["carpool", "/x", "x/", "a/b/c"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected NAMESPACE/NAME"):
        _ = OperatorSettings(calibration=text).calibration_place


async def test_the_document_is_json_that_people_can_read() -> None:
    of = world()
    await ran(of, 3000)
    text = of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"][KEY]
    assert json.loads(text)["stacks"][0]["stack"] == {
        "product": "NVIDIA A100-SXM4-40GB",
        "precision": "fp32",
        "driver": "simulated",
        "torch": "",
    }
    assert msgspec.json.decode(text, type=Calibration) == kept(of)
