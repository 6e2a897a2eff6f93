"""Lessons wait in a queue that has an end: what is dropped, or meets a defect, is told again and counts once."""

import pytest
from carpool_operator.observations import Observation
from carpool_predictor.calibration.document import MAX_SAMPLES, RunMeasurement
from learning_world import SeenEnoughError, begun, kept, ran, seen, stack, world, writes
from operator_fixtures import job


async def test_one_write_counts_no_more_than_the_document_names() -> None:
    """Regression: of many lessons in one write only the last were named, and the others counted twice after a crash."""
    of = world()
    await of.settle()
    learner = of.operator.calibrator
    found = job()
    for number in range(MAX_SAMPLES + 10):
        measured = RunMeasurement(peak_mib=3000, capacity_mib=40960, sample=f"{number}/1")
        learner.submit(found, Observation(f"{number}/1", "NVIDIA A100-SXM4-40GB", True, 4000, measured))
    sizes = []
    while not learner.is_settled:
        before = set(kept(of).counted) if sizes else set[str]()
        await learner.flush()
        sizes.append(len(set(kept(of).counted) - before))
    assert sizes == [MAX_SAMPLES // 2, MAX_SAMPLES // 2, 10]
    assert stack(of).seen == MAX_SAMPLES + 10


async def test_a_defect_costs_the_lessons_that_met_it_and_not_the_operator() -> None:
    of = world()
    of.apply(model={"catalog": {"name": "timm/resnet50"}})
    await begun(of)
    await seen(of, 3000)
    features, of.tracer.answer = of.tracer.answer, ValueError("a defect")
    of.start()  # so that the model has to be traced again
    await of.settle()
    of.end_pod("x-worker-0-1")
    of.hear()
    await of.operator.process("default/x")
    assert not of.operator.calibrator.is_settled

    async def sleep(_seconds: float) -> None:
        raise SeenEnoughError

    with pytest.raises(SeenEnoughError):
        await of.operator.calibrator.run(sleep)
    assert of.operator.calibrator.is_settled
    assert writes(of) == 0
    of.tracer.answer = features
    await ran(of, 3000, "y")
    assert stack(of).seen == 2, "it was told again when its job was looked at"


async def test_a_lesson_that_was_dropped_is_told_again_when_its_job_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: what a job had told once was never told again by this process, taken in or not."""
    monkeypatch.setattr("carpool_operator.calibrator.MAX_PENDING", 0)
    of = world()
    await ran(of, 3000)
    assert writes(of) == 0
    monkeypatch.setattr("carpool_operator.calibrator.MAX_PENDING", 1)
    of.operator.queue.add("default/x")
    await of.settle()
    assert stack(of).seen == 1
