"""Any trace of times, durations and GPUs on any cluster; Microsoft's Philly by default."""

import random
from collections import deque
from pathlib import Path

import msgspec
from carpool_core.products import UnknownProductError, find_product
from carpool_core.resources.node import Device
from carpool_core.values import GpuUuid, SharingMode

from carpool_extender.simulation import hotcloud
from carpool_extender.simulation.features import prediction_of
from carpool_extender.simulation.philly_times import read_trace
from carpool_extender.simulation.strategy import Knowledge, Strategy
from carpool_extender.simulation.workload import SimJob, Workload, WorkloadError

GPUS, PER_NODE = 2490, 8

ASSUMPTIONS = (
    "The trace says when, for how long and on how many GPUs; not what was trained. Each job gets one of the 18 "
    "measured "
    "profiles of the HotCloud workload at random.",
    "2,490 GPUs in nodes of eight (the last has two), each with 24 GiB; more than eight GPUs make a gang of workers "
    "of eight.",
    "Durations are those alone.",
)

STRATEGIES = (
    Strategy("whole GPUs, in order", "exclusive", mode=SharingMode.EXCLUSIVE, in_order=True, measure=False),
    Strategy(
        "Carpool, slowdown ≤ 1.5 (default)",
        "least-slowdown",
        Knowledge.PREDICTED,
        SharingMode.TIME_SLICING,
        max_slowdown=1.5,
        measure=False,
    ),
)


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Nodes that are alike, in a cluster file."""

    count: int = 1
    product: str
    gpus: int = 8


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes: [{count: 10, product: NVIDIA A100-SXM4-40GB, gpus: 8}]`."""

    nodes: list[NodeGroup]


def philly(data: Path, seed: int) -> Workload:
    """Return the whole Philly trace on its 2,490 GPUs."""
    return from_trace(data, data / "traces" / "philly_sia.csv", default_cluster(), seed)


def from_trace(data: Path, trace: Path, nodes: dict[str, list[Device]], seed: int) -> Workload:
    """Build a workload out of a trace and a cluster."""
    draw = random.Random(f"trace/{seed}")  # noqa: S311  # a simulation, no secret
    kinds = hotcloud.profiles(data)
    most = max(len(devices) for devices in nodes.values())
    jobs = deque[SimJob]()
    for number, one in enumerate(read_trace(trace)):
        truth = draw.choice(kinds)
        gpus = min(one.gpus, most)
        prediction = prediction_of(truth.kind, hotcloud.PRODUCT)
        jobs.append(
            SimJob(f"job-{number}", one.at_s, one.duration_s, gpus, truth, prediction, workers=-(-one.gpus // gpus))
        )
    return Workload("trace", f"{trace.name}: {len(jobs):,} jobs", list(jobs), nodes, ASSUMPTIONS)


def default_cluster() -> dict[str, list[Device]]:
    """Return Philly's GPUs."""
    return {
        f"node-{begin // PER_NODE:04}": devices_of(
            f"node-{begin // PER_NODE:04}", hotcloud.PRODUCT, min(PER_NODE, GPUS - begin)
        )
        for begin in range(0, GPUS, PER_NODE)
    }


def read_cluster(path: Path) -> dict[str, list[Device]]:
    """Read a cluster file.

    Raises:
        WorkloadError: It cannot be read, or names an unknown product.
    """
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=ClusterFile)
        groups = [(group, find_product(group.product).name) for group in found.nodes]
    except (OSError, msgspec.MsgspecError, UnknownProductError) as error:
        raise WorkloadError(
            f"{path}: expected `nodes: [{{count: 1, product: NVIDIA A100-SXM4-40GB, gpus: 8}}]`: {error}"
        ) from error
    nodes: dict[str, list[Device]] = {}
    for group, product in groups:
        for _ in range(group.count):
            name = f"node-{len(nodes):04}"
            nodes[name] = devices_of(name, product, group.gpus)
    if not any(nodes.values()):
        raise WorkloadError(f"{path}: expected at least one GPU, found none")
    return nodes


def devices_of(node: str, product: str, count: int) -> list[Device]:
    """Return the GPUs of one node."""
    known = find_product(product)
    modes = [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS]
    return [
        Device(
            uuid=GpuUuid(f"GPU-{node}-{index}"),
            index=index,
            product=known.name,
            memory_mib=known.memory_mib,
            reserved_mib=256,
            compute_capability=known.compute_capability,
            modes=modes,
        )
        for index in range(count)
    ]
