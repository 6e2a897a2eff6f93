"""Bound pods that no GpuNode holds a reservation for."""

from carpool_core.kube.api import GPU_NODES, PODS
from carpool_operator.conditions import find
from carpool_operator.work_queue import DEBOUNCE_S
from operator_fixtures import reservation
from operator_world import World


async def bound_without_reservation(world: World, phase: str = "Pending") -> None:
    """Somebody binds the worker's pod past the extender, or its GpuNode was written anew."""
    pod = world.kube.dump(PODS, "x-worker-0-1", "default")
    pod["spec"]["nodeName"] = "n1"
    pod["status"]["phase"] = phase
    world.kube.seed(PODS, pod)
    await world.settle()
    await told(world)


async def told(world: World) -> None:
    """Wait until news of pods are told."""
    world.clock.advance(DEBOUNCE_S)
    await world.settle()


def placed(world: World) -> tuple[str, str, str]:
    found = find(world.job().status, "Placed")
    assert found is not None
    return found.status, found.reason, found.message


async def start() -> World:
    world = World()
    world.apply(runPolicy={"activeDeadlineSeconds": 600})
    await world.settle()
    return world


async def test_bound_pod_without_reservation_makes_way_for_the_next_attempt() -> None:
    """Regression: such a pod waited for ever, and activeDeadlineSeconds never began."""
    world = await start()
    await bound_without_reservation(world)
    assert placed(world)[:2] == ("False", "NoReservation")
    world.clock.advance(59)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]
    world.clock.advance(1)
    await world.settle()
    assert world.living() == ["x-worker-0-2"]
    await told(world)
    status = world.job().status
    assert [a.outcome for a in status.attempts] == ["NoReservation", "Running"]
    assert "its GpuNode held no reservation for it for 60 s" in status.attempts[0].message
    assert status.restarts == 0
    world.run_pods()
    await world.settle()
    assert world.job().status.state == "Running"


async def test_reservation_that_is_heard_of_late_is_waited_for() -> None:
    world = await start()
    await bound_without_reservation(world)
    world.clock.advance(30)
    node = world.kube.dump(GPU_NODES, "n1")
    metadata = world.kube.dump(PODS, "x-worker-0-1", "default")["metadata"]
    node["spec"]["reservations"] = [reservation(metadata["uid"], world.job().metadata.uid, gpuUuids=["n1-GPU-0"])]
    world.kube.seed(GPU_NODES, node)
    await world.settle()
    assert placed(world)[:2] == ("True", "Placed")
    world.clock.advance(60)
    await world.settle()
    assert world.living() == ["x-worker-0-1"]


async def test_running_pod_whose_reservation_went_is_left_alone_and_told() -> None:
    world = await start()
    world.run_pods()
    await world.settle()
    node = world.kube.dump(GPU_NODES, "n1")
    node["spec"]["reservations"] = []
    world.kube.seed(GPU_NODES, node)
    await world.settle()
    assert placed(world)[0] == "True", "a pod that just ended loses its reservation first"
    world.clock.advance(DEBOUNCE_S)
    await world.settle()
    world.clock.advance(60)
    await world.settle()
    status, reason, message = placed(world)
    assert (status, reason) == ("False", "NoReservation")
    assert "x-worker-0-1 runs on node n1" in message
    assert "it keeps running" in message
    job = world.job()
    assert (job.status.state, job.status.placement[0].node) == ("Running", "n1")
    assert world.living() == ["x-worker-0-1"]


async def test_neighbours_that_come_one_after_the_other_are_told_of_in_one_write() -> None:
    world = await start()
    world.run_pods()
    await world.settle()
    before = world.kube.writes
    for number in range(3):
        node = world.kube.dump(GPU_NODES, "n1")
        node["spec"]["reservations"].append(
            reservation(f"pod-{number}", f"uid-{number}", jobName=f"y{number}", gpuUuids=["n1-GPU-0"])
        )
        world.kube.seed(GPU_NODES, node)
        await world.settle()
        world.clock.advance(DEBOUNCE_S / 4)
    assert world.kube.writes == before
    world.clock.advance(DEBOUNCE_S / 4)
    await world.settle()
    assert world.kube.writes == before + 1
    assert [neighbour.job for neighbour in world.job().status.placement[0].neighbours] == ["y0", "y1", "y2"]
