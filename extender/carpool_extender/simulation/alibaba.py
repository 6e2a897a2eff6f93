"""Alibaba's pods of 2023 with fractions of a GPU, on its 1,213 GPU nodes."""

import csv
from pathlib import Path

from carpool_core.resources.node import Device
from carpool_core.values import SharingMode

from carpool_extender.simulation import hotcloud
from carpool_extender.simulation.knowing import exactly
from carpool_extender.simulation.philly import devices_of
from carpool_extender.simulation.strategy import Knowledge, Strategy
from carpool_extender.simulation.workload import SimJob, Truth, Workload, WorkloadError

PODS, NODES = "openb_pod_list_default.csv", "openb_node_list_gpu_node.csv"
WHOLE_MILLI = 1000
USABLE_MIB = 24_000
"""Memory that a fraction is a fraction of, in MiB."""

ASSUMPTIONS = (
    "A fraction of a GPU means that share of its memory and of its time: what the pod declares is taken for what it "
    "does, and is what Carpool is told. So there is no error in these predictions.",
    "Every GPU counts as the same product with 24 GiB; CPU and memory of the nodes are not looked at. Pods without a "
    "GPU are left out.",
    "A pod lasts from its creation to its deletion, or to the end of the trace; many are services that never end.",
    "Whole GPUs are busy all the time and shared with nobody.",
    "Slowdowns are those of Lucid's pairs by time slicing that were as busy.",
)

STRATEGIES = (
    Strategy("whole GPUs", "exclusive", mode=SharingMode.EXCLUSIVE, measure=False),
    Strategy("best fit by declared fraction", "best-fit", Knowledge.PREDICTED, SharingMode.TIME_SLICING, measure=False),
    Strategy(
        "Carpool, slowdown ≤ 1.5 (default)",
        "least-slowdown",
        Knowledge.PREDICTED,
        SharingMode.TIME_SLICING,
        max_slowdown=1.5,
        measure=False,
    ),
    Strategy(
        "Carpool, slowdown ≤ 3",
        "least-slowdown",
        Knowledge.PREDICTED,
        SharingMode.TIME_SLICING,
        max_slowdown=3.0,
        measure=False,
    ),
)


def alibaba(data: Path, _seed: int) -> Workload:
    """Return the pods of the trace; there is nothing to draw."""
    folder = data / "traces"
    nodes: dict[str, list[Device]] = {
        row["sn"]: devices_of(row["sn"], hotcloud.PRODUCT, int(row["gpu"]))
        for row in _read(folder / NODES, ("sn", "gpu"))
    }
    columns = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
    jobs = [job for row in _read(folder / PODS, columns) if (job := _job(row)) is not None]
    jobs.sort(key=lambda job: job.arrival_s)
    title = f"Alibaba 2023: {len(jobs):,} pods, {len(nodes):,} nodes, {sum(map(len, nodes.values())):,} GPUs"
    return Workload("alibaba", title, jobs, nodes, ASSUMPTIONS)


def _job(row: dict[str, str]) -> SimJob | None:
    gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"] or WHOLE_MILLI)
    at_s, lasts_s = float(row["creation_time"]), float(row["deletion_time"]) - float(row["creation_time"])
    if gpus < 1 or lasts_s <= 0:
        return None
    share = milli / WHOLE_MILLI
    truth = Truth(
        kind=f"openb/{milli}",
        memory_mib=round(share * USABLE_MIB),
        util=share,
        sm=share,
        dram=share / 2,
        product=hotcloud.PRODUCT,
    )
    declared = exactly(truth, None) if gpus == 1 and milli < WHOLE_MILLI else None
    return SimJob(row["name"], at_s, lasts_s, gpus, truth, declared)


def _read(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    if not path.is_file():
        raise WorkloadError(f"expected Alibaba's trace at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise WorkloadError(f"{path}: expected the columns {', '.join(columns)}; add {', '.join(missing)}")
        return list(reader)
