"""Alibaba's pods of 2023 with fractions of a GPU, on its 1,213 GPU nodes: as they came, on few nodes, and too many.

The trace belongs to "Beware of Fragmentation" (Weng et al., USENIX ATC '23), whose protocol `full` follows: pods drawn
from the trace, none of which ends, until they ask for 1.3 times the GPUs there are.
"""

import csv
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from carpool_core.resources.node import Device
from carpool_core.values import SharingMode
from carpool_extender.queue.order import QueueOrder
from carpool_simulator.information import exactly
from carpool_simulator.philly import devices_of
from carpool_simulator.profiles import PRODUCT
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Truth, Workload, WorkloadError

PODS, NODES = "openb_pod_list_default.csv", "openb_node_list_gpu_node.csv"
WHOLE_MILLI = 1000
EVERY = 200
"""`few` has each node of so many: on all nodes no pod ever waits."""
INFLATED = 1.3
"""GPUs that are asked for in `full`, over those that there are, as the authors of the trace have it."""
WATCHED_S = 3600.0
"""How long `full` is watched, in seconds; nothing changes after its beginning."""

ASSUMPTIONS = (
    "A fraction of a GPU means that share of its memory and of its time: pods use what they "
    "declare, and Carpool's predictions are these declarations, without error.",
    "Every GPU counts as the same product; CPU and memory of the nodes are not looked at. Pods without a GPU are left "
    "out.",
    "Whole GPUs are busy all the time and never shared.",
    "Slowdowns are those of Lucid's pairs by time slicing that were as busy.",
)
LASTS = "A pod lasts from its creation to its deletion, or to the end of the trace; many are services that never end."
SHOWN = ("waiting_min", "completion_min", "gpus_in_use", "unused_percent", "utilization_percent", "unplaced")
SHOWN_FULL = ("gpus_in_use", "memory_percent", "unused_percent", "utilization_percent", "unplaced")


def _strategy(name: str, policy: str, max_slowdown: float = 10.0) -> Strategy:
    return Strategy(
        name, policy, Knowledge.PREDICTED, SharingMode.TIME_SLICING, max_slowdown=max_slowdown, measure=False
    )


def _carpool(name: str, policy: str, max_slowdown: float) -> Strategy:
    return replace(_strategy(name, policy, max_slowdown), order=QueueOrder.ALTERNATE)


STRATEGIES = (
    Strategy("whole GPUs", "exclusive", mode=SharingMode.EXCLUSIVE, measure=False),
    _strategy("first fit by declared fraction", "first-fit"),
    _strategy("best fit by declared fraction", "best-fit"),
    _strategy("worst fit by declared fraction", "worst-fit"),
    _carpool("Carpool, slowdown ≤ 1.5 (default)", "least-slowdown", 1.5),
    _carpool("Carpool, slowdown ≤ 3", "least-slowdown", 3.0),
    _carpool("Carpool, best fit", "best-fit", 1.5),
)


def alibaba(data: Path, _seed: int) -> Workload:
    """Return the pods of the trace as they came; there is nothing to draw."""
    nodes, jobs = _cluster(data), _jobs(data)
    return Workload("alibaba", _title("as they came", jobs, nodes), jobs, nodes, (*ASSUMPTIONS, LASTS), shown=SHOWN)


def few(data: Path, _seed: int) -> Workload:
    """Return the pods of the trace as they came, on so few of the nodes that they meet."""
    jobs = _jobs(data)
    nodes = dict(itertools.islice(_cluster(data).items(), 0, None, EVERY))
    gpus = sum(map(len, nodes.values()))
    asked = sum(job.work_s * job.gpus * job.truth.util for job in jobs)
    mean = asked / max(job.arrival_s + job.work_s for job in jobs)
    assumptions = (f"Every {EVERY}th node only: {gpus} GPUs, of which {mean:.1f} are asked for on average.", LASTS)
    return Workload(
        "alibaba-few", _title("on few nodes", jobs, nodes), jobs, nodes, (*ASSUMPTIONS, *assumptions), shown=SHOWN
    )


def full(data: Path, seed: int) -> Workload:
    """Return pods drawn from the trace, with replacement, that ask for more than the cluster has; none ends."""
    nodes, known = _cluster(data), _jobs(data)
    draw = random.Random(f"alibaba/{seed}")  # noqa: S311  # a simulation, no secret
    gpus, asked, jobs = sum(map(len, nodes.values())), 0.0, list[SimJob]()
    while asked < INFLATED * gpus:
        one = draw.choice(known)
        jobs.append(replace(one, name=f"pod-{len(jobs)}", arrival_s=0.0, work_s=2 * WATCHED_S))
        asked += one.gpus * one.truth.util
    protocol = (
        f"Pods are drawn from the trace until they ask for {INFLATED:g} times the GPUs, come one after the other, and "
        "none ends: the protocol of the trace's authors (USENIX ATC '23). In their published results best fit "
        "hands out 92.9% of the GPUs, their own policy 95.4%; they look at CPU and memory of the nodes, too.",
    )
    title = _title(f"{INFLATED:g} times what there is", jobs, nodes)
    return Workload("alibaba-full", title, jobs, nodes, (*ASSUMPTIONS, *protocol), until_s=WATCHED_S, shown=SHOWN_FULL)


def _title(which: str, jobs: Sequence[SimJob], nodes: dict[str, list[Device]]) -> str:
    return f"Alibaba 2023, {which}: {len(jobs):,} pods, {len(nodes):,} nodes, {sum(map(len, nodes.values())):,} GPUs"


def _cluster(data: Path) -> dict[str, list[Device]]:
    path = data / "traces" / NODES
    found = {}
    for line, row in _read(path, ("sn", "gpu")):
        try:
            found[row["sn"]] = devices_of(row["sn"], PRODUCT, int(row["gpu"]))
        except ValueError as error:
            raise WorkloadError(f"{path}, line {line}: expected a number of GPUs: {error}") from error
    if not any(found.values()):
        raise WorkloadError(f"{path}: expected at least one GPU, found none")
    return found


def _jobs(data: Path) -> list[SimJob]:
    path = data / "traces" / PODS
    columns = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
    found = []
    for line, row in _read(path, columns):
        try:
            job = _job(row)
        except ValueError as error:
            raise WorkloadError(f"{path}, line {line}: expected GPUs, thousandths, and two times: {error}") from error
        found += [] if job is None else [job]
    if not found:
        raise WorkloadError(f"{path}: expected at least one pod with a GPU, found none")
    return sorted(found, key=lambda job: job.arrival_s)


def _job(row: dict[str, str]) -> SimJob | None:
    gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"] or WHOLE_MILLI)
    at_s, lasts_s = float(row["creation_time"]), float(row["deletion_time"]) - float(row["creation_time"])
    if gpus < 1 or lasts_s <= 0:
        return None
    if not 0 < milli <= WHOLE_MILLI:
        raise ValueError(f"{milli} thousandths of a GPU")
    share = milli / WHOLE_MILLI
    device = devices_of("", PRODUCT, 1)[0]
    truth = Truth(
        kind=f"openb/{milli}",
        memory_mib=int(share * (device.memory_mib - device.reserved_mib)),
        util=share,
        sm=share,
        dram=share / 2,
        product=PRODUCT,
    )
    declared = exactly(truth, None) if gpus == 1 and milli < WHOLE_MILLI else None
    return SimJob(row["name"], at_s, lasts_s, gpus, truth, declared)


def _read(path: Path, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a file, each with its line."""
    if not path.is_file():
        raise WorkloadError(f"expected Alibaba's trace at {path}, found no file; set CARPOOL_DATA")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise WorkloadError(f"{path}: expected the columns {', '.join(columns)}; add {', '.join(missing)}")
        return [(reader.line_num, row) for row in reader]
