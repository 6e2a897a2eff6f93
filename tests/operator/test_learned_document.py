"""What was learned is kept in a ConfigMap that others may change, break or remove, and that may not be readable."""

import json

import msgspec
import pytest
from carpool_core.kube.api import CONFIG_MAPS, EVENTS
from carpool_core.kube.errors import Conflict, Forbidden, Overloaded, Unreachable
from carpool_core.settings import SettingsError
from carpool_operator.calibrator import PAUSE_S, REPAIR_POLL_S
from carpool_operator.settings import OperatorSettings
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.store import KEY
from learning_world import (
    NAME,
    NAMESPACE,
    SeenEnoughError,
    begun,
    kept,
    memory,
    model,
    on_t4,
    ran,
    run_until_on,
    seen,
    stack,
    world,
    writes,
)
from operator_world import World


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
async def test_what_cannot_be_read_is_told_and_left_alone(content: str, word: str) -> None:
    of = world()
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {KEY: content, "a": "b"}})
    await ran(of, 3000)
    assert of.job().status.state == "Complete"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"] == {KEY: content, "a": "b"}
    (event,) = [e for e in of.kube.dump_all(EVENTS) if e["reason"] == "CalibrationUnreadable"]
    assert word in event["message"]
    assert event["involvedObject"]["name"] == NAME
    assert not of.operator.calibrator.is_on
    # Repaired, it is used from the next start on.
    of.kube.seed(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"a": "b"}})
    of.start()
    await of.settle()
    assert stack(of).seen == 1, "the job told again what nobody had learned"
    assert of.kube.dump(CONFIG_MAPS, NAME, NAMESPACE)["data"]["a"] == "b"


async def test_a_document_that_was_repaired_is_used_without_a_restart() -> None:
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
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    of.hear()
    await of.operator.process("default/x")
    with pytest.raises(SeenEnoughError):
        await running
    assert stack(of).seen == 1


async def test_who_may_not_read_it_learns_nothing_and_predicts_as_shipped() -> None:
    of = world()
    of.kube.fail_next("get", CONFIG_MAPS, Forbidden("may not"))
    await ran(of, 3000)
    assert of.job().status.state == "Complete"
    assert writes(of) == 0


async def test_where_it_may_not_be_written_that_is_not_tried_every_few_seconds() -> None:
    of = world()
    of.apply()
    await begun(of)
    await seen(of, 3000)
    of.end_pod("x-worker-0-1")
    of.hear()
    await of.operator.process("default/x")
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


async def test_one_failed_read_takes_nothing_away_and_trusts_nothing_more() -> None:
    """Regression: after one answer that failed, jobs shared for a minute where nothing was measured."""
    of = world()
    on_t4(of)
    await ran(of, 3000)
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    await of.operator.calibrator.load()
    assert of.operator.calibrator.is_on
    of.kube.fail_next("get", CONFIG_MAPS, Overloaded("busy"))
    of.start()
    of.apply("y", model=model(9))
    await of.settle()
    assert not of.operator.calibrator.is_on
    assert not memory(of, "y").trusted
    running, naps = await run_until_on(of)
    assert naps == [PAUSE_S]
    running.cancel()


async def test_switched_off_it_asks_for_no_configmap() -> None:
    of = World()
    await ran(of, 3000)
    assert not any(call.plural == "configmaps" for call in of.kube.calls)


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


async def test_metrics_tell_what_was_learned_by_stack() -> None:
    of = world()
    registry = of.operator.metrics.registry
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 0
    of.apply()
    await begun(of)
    within = memory(of).upper_mib
    await seen(of, within)
    of.end_pod("x-worker-0-1")
    await of.settle()
    labels = {"product": "NVIDIA A100-SXM4-40GB", "precision": "fp32", "driver": "simulated"}
    assert registry.get_sample_value("carpool_operator_calibration_in_use") == 1
    assert registry.get_sample_value("carpool_operator_calibration_jobs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == 1
    assert registry.get_sample_value("carpool_operator_calibration_refused_runs", labels) == 0
    assert registry.get_sample_value("carpool_operator_calibration_coverage_ratio", labels) == 1
    await ran(of, 2 * within, "y")
    assert registry.get_sample_value("carpool_operator_calibration_runs", labels) == 2
    assert registry.get_sample_value("carpool_operator_calibration_coverage_ratio", labels) == 0.5
