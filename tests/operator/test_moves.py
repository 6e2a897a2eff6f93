"""Jobs that leave a GPU on which a job is slowed beyond its limit."""

from dataclasses import replace

import msgspec
import pytest
from carpool_core.clock import rfc3339
from carpool_core.kube.api import GPU_NODES
from carpool_core.moves import MAX_MOVES
from carpool_core.resources.job import GpuTrainingJob, Sharing
from carpool_core.values import WhenSlowed
from carpool_operator.moves import move
from learning_world import measured, started, world
from operator_world import World

SETTLED = 120.0


def steps(step_s: float, solo_s: float | None, since: str, **more: str) -> dict[str, object]:
    """Measurements of a tenant that reports its steps."""
    return {
        "gpuUtilPercent": 45.0, "smActiveRatio": 0.35, "settled": True, "stepTimeSeconds": step_s,
        "soloStepTimeSeconds": solo_s, "tenantsSince": since,
    } | more  # fmt: skip


async def shared(when: str, after_s: float = SETTLED) -> World:
    """Job x was alone; since y came, with this `whenSlowed`, it runs 1.8 times as long as alone."""
    of = world()
    of.apply()
    await started(of, tenant={"maxSlowdown": 1.5})
    await measured(of, 3000, **steps(0.1, 0.1, rfc3339(of.clock.now())))
    of.clock.advance(3600)
    of.apply("y", sharing={"whenSlowed": when})
    await started(of, "y", tenant={"maxSlowdown": 1.5})
    came = rfc3339(of.clock.now())
    await measured(of, 3000, **steps(0.18, 0.1, came))
    of.clock.advance(after_s)
    await measured(of, 3000, **steps(0.18, 0.1, came))
    await measured(of, 3000, "y", **steps(0.12, None, came))
    await of.settle(after_s=30.0)
    return of


def ends(job: GpuTrainingJob) -> list[str]:
    return [attempt.outcome for attempt in job.status.attempts if attempt.ended_at]


@pytest.mark.parametrize(
    ("when", "after_s", "moves"),
    [
        ("Move", SETTLED, True), ("Move", 30.0, False), ("Move", 700.0, False), ("MoveAtCheckpoint", SETTLED, False),
        ("Stay", SETTLED, False),
    ],
)  # fmt: skip
async def test_the_last_job_to_come_leaves_in_its_first_minutes_if_its_owner_allows_it(when, after_s, moves) -> None:
    of = await shared(when, after_s)
    assert ends(of.job("x")) == [], "the slowed job stays"
    y = of.job("y")
    assert (ends(y), y.status.moves) == ((["Moved"], 1) if moves else ([], 0))
    if moves:
        assert y.status.restarts == 0
        (attempt, _) = y.status.attempts
        assert "where default/x was measured to run 1.80 times as long as alone, accepts 1.50" in attempt.message
        assert [pod["metadata"]["name"] for pod in of.pods("y")] == ["y-worker-0-2"], "the next attempt is there"


async def test_while_a_pod_leaves_the_gpu_no_other_job_follows_it() -> None:
    """Its co-tenants' means still hold steps beside it."""
    of = await shared("Move", 30.0)
    home = of.kube.dump(GPU_NODES, "n1")
    tenants = home["status"]["tenants"]
    home["status"]["tenants"] = [*tenants, tenants[0] | {"podUid": "leaves"}]
    of.kube.seed(GPU_NODES, home)
    await of.settle(after_s=SETTLED)
    assert ends(of.job("y")) == []
    home["status"]["tenants"] = tenants
    of.kube.seed(GPU_NODES, home)
    await of.settle(after_s=30.0)
    assert ends(of.job("y")) == ["Moved"]


async def test_a_slowed_job_leaves_after_its_checkpoint() -> None:
    of = world()
    for name in ("y", "x"):
        of.apply(name, sharing={"whenSlowed": "MoveAtCheckpoint"} if name == "x" else {})
        await started(of, name, tenant={"maxSlowdown": 1.5})
    came = rfc3339(of.clock.now())
    of.clock.advance(3600)
    await measured(of, 3000, "y", **steps(0.1, 0.1, came))
    await measured(of, 3000, **steps(0.2, 0.1, came))
    await of.settle(after_s=600)
    assert ends(of.job("x")) == []
    await measured(of, 3000, **steps(0.2, 0.1, came, checkpointedAt=rfc3339(of.clock.now())))
    await of.settle(after_s=30.0)
    assert ends(of.job("x")) == ["Moved"]


async def test_a_job_moves_a_few_times_only() -> None:
    of = await shared("Move")
    for _ in range(MAX_MOVES):
        await of.settle(after_s=400.0)  # backoff
        await started(of, "y", tenant={"maxSlowdown": 1.5})
        came = rfc3339(of.clock.now())
        of.clock.advance(SETTLED)
        await measured(of, 3000, **steps(0.18, 0.1, came))
        await measured(of, 3000, "y", **steps(0.12, None, came))
        await of.settle(after_s=30.0)
    assert ends(of.job("y")) == ["Moved"] * MAX_MOVES


async def test_reports_of_another_tenancy_domain_move_no_job() -> None:
    """Trainings report their steps themselves, and must not evict strangers."""
    of = await shared("Stay")
    snapshot = replace(of.operator.snapshot(of.job("y")), slowdowns={of.job("x").metadata.uid: 1.8})
    job = msgspec.structs.replace(
        snapshot.job, spec=msgspec.structs.replace(snapshot.job.spec, sharing=Sharing(when_slowed=WhenSlowed.MOVE))
    )
    (node,) = snapshot.nodes
    held = [
        one if one.job_uid == job.metadata.uid else msgspec.structs.replace(one, tenancy_group="theirs")
        for one in node.spec.reservations
    ]
    for reservations, moves in ((node.spec.reservations, True), (held, False)):
        changed = msgspec.structs.replace(node, spec=msgspec.structs.replace(node.spec, reservations=reservations))
        there = replace(snapshot, job=job, nodes=(changed,))
        assert (move(there, job.status) is not None) == moves
