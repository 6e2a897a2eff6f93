"""Which GPUs there are, and whether a job could ever run on them."""

from collections import Counter

import msgspec
from carpool_core.demand import demand_of
from carpool_core.kube.api import GPU_NODES
from carpool_core.products import device_class
from carpool_core.resources.node import Device, GpuNode
from carpool_operator.inventory import Inventory, infeasible_when_empty, node_kind
from operator_fixtures import device, job, node
from operator_world import World


def inventory(*nodes: GpuNode) -> Inventory:
    return Counter(node_kind(n.status.devices) for n in nodes)


SMALL = node(gpus=4)
LARGE = msgspec.structs.replace(SMALL, status=msgspec.structs.replace(SMALL.status, devices=[device(memory_mib=81920)]))


def test_what_is_wrong_is_counted_over_all_nodes() -> None:
    told = infeasible_when_empty(demand_of(job(memory={"limit": "88Gi"})), inventory(SMALL, SMALL, LARGE))
    assert told == (
        "no GPU of this cluster can hold it: 8 GPUs: too small: needs 90,112 MiB, has 40,960 MiB; "
        "1 GPUs: too small: needs 90,112 MiB, has 81,920 MiB"
    )


def test_one_node_that_could_is_enough() -> None:
    assert infeasible_when_empty(demand_of(job(memory={"limit": "60Gi"})), inventory(SMALL, LARGE)) is None
    assert infeasible_when_empty(
        demand_of(job(gpusPerWorker=2, memory={"limit": "60Gi"})), inventory(SMALL, LARGE)
    ) == ("needs 2 suitable GPUs on one node, the best node has 1")


def test_nothing_is_decided_by_what_changes_in_use() -> None:
    busy = msgspec.convert(
        msgspec.to_builtins(device()) | {"mode": "MPS", "health": "Unhealthy", "healthMessage": "XID 79"}, Device
    )
    assert device_class(busy) == device_class(device())


def test_thousands_of_equal_nodes_are_one_kind() -> None:
    """Regression: each look at a job went through every GPU of the cluster."""
    world = World()
    for number in range(50):
        world.seed_node(f"many-{number}")
    world.hear()
    assert [*world.operator.nodes.inventory.values()] == [51]
    world.kube.lose(GPU_NODES, "many-0")
    world.hear()
    assert [*world.operator.nodes.inventory.values()] == [50]
    for number in range(1, 50):
        world.kube.lose(GPU_NODES, f"many-{number}")
    world.kube.lose(GPU_NODES, "n1")
    world.hear()
    assert world.operator.nodes.inventory == {}


async def test_one_more_node_of_a_kind_wakes_those_only_that_tell_of_it() -> None:
    """Regression: each node that came had every unfinished job looked at."""
    world = World()
    world.apply("fits")
    world.apply("large", memory={"limit": "88Gi"})
    await world.settle()
    world.seed_node("n2")
    world.hear()
    assert [world.operator.queue.take_now(), world.operator.queue.take_now()] == ["default/large", None]
