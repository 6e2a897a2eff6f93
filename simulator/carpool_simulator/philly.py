"""Workloads from a trace of times, durations and GPUs on any cluster; Microsoft's Philly by default."""

import csv
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec
from carpool_core.products import UnknownProductError, find_product
from carpool_core.resources.node import MAX_GPUS, Device, GpuNode
from carpool_core.resources.schema import describe_decode_error
from carpool_core.values import DeviceHealth, GpuUuid, SharingMode, pluralize
from carpool_extender.queue.order import QueueOrder
from msgspec import Meta

from carpool_simulator.profiles import PRODUCT, job_of, measured_profiles, predicted_profiles, prediction_of, step_times
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Workload, WorkloadError

COLUMNS = ("timestamp", "duration", "num_gpus")
LONGEST_S = 1e9
"""Longest job, thirty years: the simulation's clock is a calendar, which ends."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a trace."""

    at_s: float
    """Time after the first submission, in seconds."""
    duration_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Content of a trace file."""

    jobs: Sequence[Submission]
    """Ascending by time."""
    unsorted: int
    """Number of lines after a line with a later time."""


def read_trace(path: Path) -> Trace:
    """Read a trace with the columns `timestamp`, `duration` and `num_gpus`.

    Times are ISO 8601, UTC without a time zone, or seconds; durations are seconds.

    Raises:
        WorkloadError: The file is missing or unreadable, a column is missing, or a value is invalid; the message names
            the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = list(_submissions(path, csv.DictReader(file)))
    except OSError as error:
        raise WorkloadError(
            f"expected a trace at {path}, found: {error.strerror}; check the path of --trace, or, for a published "
            "workload, --data (CARPOOL_DATA)"
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: expected CSV in UTF-8, found {error}; save it as that") from error
    if not found:
        raise WorkloadError(f"{path}: expected at least one job, found none")
    latest_s = accumulate((one.at_s for one in found), max)
    unsorted = sum(one.at_s < before_s for one, before_s in zip(found, latest_s, strict=True))
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return Trace([Submission(one.at_s - first, one.duration_s, one.gpus) for one in found], unsorted)


def _submissions(path: Path, reader: "csv.DictReader[str]") -> Iterator[Submission]:
    names = reader.fieldnames or ()
    if missing := [column for column in COLUMNS if column not in names]:
        raise WorkloadError(
            f"{path}: expected the columns {', '.join(COLUMNS)} separated by commas, found "
            f"{', '.join(names) or 'none'}; add or rename {', '.join(missing)}"
        )
    in_seconds = None
    for row in reader:
        yield _submission(path, reader.line_num, row)
        timestamp = row[COLUMNS[0]] or ""
        if in_seconds is None:
            in_seconds = _is_number(timestamp)
        if _is_number(timestamp) is not in_seconds:
            kind = "seconds" if in_seconds else "a time in ISO 8601"
            raise WorkloadError(
                f"{path}, line {reader.line_num}: expected {kind} as on the lines before, found {timestamp}; use one "
                "format for all times"
            )


def _submission(path: Path, line: int, row: Mapping[str, str | None]) -> Submission:
    timestamp, duration, num_gpus = (row[column] or "" for column in COLUMNS)
    try:
        at_s, duration_s, gpus = _seconds(timestamp), float(duration), int(num_gpus)
    except (ValueError, OverflowError) as error:
        found = ", ".join(f"{column} {row[column] or 'nothing'}" for column in COLUMNS)
        raise WorkloadError(
            f"{path}, line {line}: expected a time (ISO 8601, or seconds), a duration in seconds and a whole number of "
            f"GPUs, found {found}"
        ) from error
    if not 0 <= duration_s <= LONGEST_S or gpus < 1:
        raise WorkloadError(
            f"{path}, line {line}: expected a duration from 0 to {LONGEST_S:.0e} s on 1 GPU or more, found "
            f"{duration_s:g} s on {gpus}"
        )
    return Submission(at_s, duration_s, gpus)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _seconds(text: str) -> float:
    """Return a time in seconds since an arbitrary start."""
    if not _is_number(text):
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text} is no time")
    return found


GPUS, PER_NODE = 2490, 8
MAX_NODES = 100_000
SHOWN = (
    "makespan_min",
    "waiting_min",
    "completion_min",
    "slowed_percent",
    "gpus_in_use",
    "utilization_percent",
    "oom",
    "energy_mj",
)

EXAMPLE = "`nodes: [{count: 1, product: NVIDIA A100-SXM4-40GB, gpus: 8}]`"
MEASURED = (
    "The trace contains times, durations and numbers of GPUs, but no models. Each job gets one of the 18 measured "
    "profiles of the HotCloud workload at random: small networks on small images, which need little memory.",
    "Durations are those of jobs alone. Measurements on an RTX 3090 are used for every product.",
    "GPUs are shared by time-slicing, as the measured pairs were, also where MPS would be possible.",
)
PREDICTED = (
    "The trace contains times, durations and numbers of GPUs, but no models. Each job gets one of the package's traced "
    "models that fit the GPU, at random: convolutional networks and transformers.",
    "Durations are those of jobs alone. Memory, activity and slowdowns are exactly as the shipped models predict, so "
    "that no prediction is wrong. With --data they are measurements instead.",
    "GPUs are shared by time-slicing, also where MPS would be possible.",
)
POWER = (
    "A GPU without a job draws its idle power; a GPU with jobs draws the share of its power limit that Zeus measured."
)
UNLEARNED = (
    "Running jobs are measured, but later jobs are predicted without that, so that more jobs are slowed beyond their "
    "limit than on a cluster. With --learn the simulation learns as a cluster does; it takes longer."
)
LEARNED = "Carpool learns from finished jobs. The few profiles recur often: a real cluster knows its jobs less well."
SILENT = (
    "Jobs declare no steps, so that all count as equally long, and every queue order is that of arrival. With --steps "
    "they declare them."
)
DECLARED = (
    "Jobs declare their steps: the duration over the time of a step. The queue predicts a duration as these steps "
    "times the predicted step time, or as one hour without a prediction."
)

STRATEGIES = (
    Strategy("whole GPUs, in order", "exclusive", mode=SharingMode.EXCLUSIVE, in_order=True, measure=False),
    Strategy(
        "Carpool, slowdown ≤ 1.5 (default)",
        "least-slowdown",
        Knowledge.PREDICTED,
        SharingMode.TIME_SLICING,
        max_slowdown=1.5,
        order=QueueOrder.ALTERNATE,
        settles=True,
    ),
)


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Equal nodes in a cluster file."""

    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    product: str
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)] = 8


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes: [{count: 10, product: NVIDIA A100-SXM4-40GB, gpus: 8}]`."""

    nodes: list[NodeGroup]


def philly(data: Path, seed: int) -> Workload:
    """Return the whole Philly trace on its 2,490 GPUs."""
    return from_trace(data, data / "traces" / "philly_sia.csv", default_cluster(), seed)


def learning(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Return the strategies with learning for those that predict."""
    predicts = {one.name: one.knowledge is Knowledge.PREDICTED for one in strategies}
    return [replace(one, learns=predicts[one.name], learns_slowdowns=predicts[one.name]) for one in strategies]


def from_trace(
    data: Path | None,
    trace: Path,
    nodes: Mapping[str, Sequence[Device]],
    seed: int,
    *,
    is_learned: bool = False,
    has_steps: bool = False,
) -> Workload:
    """Build a workload from a trace and the GPUs of each node; the seed draws the models of the jobs.

    `data` is the folder of measurements; if it is None, all jobs behave as predicted. `is_learned` is whether
    strategies learn, for the list of assumptions, and `has_steps` whether jobs declare their steps.
    """
    draw = random.Random(f"trace/{seed}")  # noqa: S311  # a simulation, no secret
    most, all_gpus = max(map(len, nodes.values())), sum(map(len, nodes.values()))
    product = _most_common_product(nodes)
    if data is None:
        steps_s = predicted_profiles(product)
        kinds = list(steps_s)
    else:
        measured_s = step_times(data)
        kinds = [replace(kind, product=product) for kind in measured_profiles(data)]
        steps_s = {kind: measured_s[kind.kind] for kind in kinds}
    read, jobs = read_trace(trace), list[SimJob]()
    for number, one in enumerate(read.jobs):
        truth = draw.choice(kinds)
        gpus = min(one.gpus, most)
        prediction = prediction_of(truth.kind, product)
        jobs.append(
            SimJob(
                f"job-{number}",
                one.at_s,
                one.duration_s,
                gpus,
                truth,
                prediction,
                workers=-(-one.gpus // gpus),
                asked=job_of(truth.kind),
                steps=max(1, round(one.duration_s / steps_s[truth])) if has_steps else None,
                step_s=steps_s[truth],
            )
        )
    notes = [f"{pluralize(read.unsorted, 'line')} came after a later one; all were sorted."] if read.unsorted else []
    if large := sum(one.gpus > all_gpus for one in read.jobs):
        notes.append(f"Never placed: {pluralize(large, 'job')} of more GPUs than the {all_gpus:,} that there are.")
    largest_mib = max(device.memory_mib - device.reserved_mib for devices in nodes.values() for device in devices)
    if fat := sum(one.truth.memory_mib > largest_mib for one in jobs):
        notes.append(
            f"Out of memory until abandoned: {pluralize(fat, 'job')} that need more than the {largest_mib:,} MiB of "
            "any GPU."
        )
    title = f"{trace.name}: {len(jobs):,} jobs, {all_gpus:,} GPUs"
    if others := {device.product for devices in nodes.values() for device in devices} - {product}:
        notes.append(f"Predictions are for {product}; on {', '.join(sorted(others))} every job runs alone.")
    assumptions = (
        *(PREDICTED if data is None else MEASURED),
        POWER,
        LEARNED if is_learned else UNLEARNED,
        DECLARED if has_steps else SILENT,
        _describe(nodes),
        *notes,
    )
    return Workload("trace", title, jobs, nodes, assumptions, notes=notes, shown=SHOWN)


def _most_common_product(nodes: Mapping[str, Sequence[Device]]) -> str:
    products = Counter(device.product for devices in nodes.values() for device in devices)
    return products.most_common(1)[0][0]


def _describe(nodes: Mapping[str, Sequence[Device]]) -> str:
    """Return a sentence about the nodes of a cluster."""
    kinds = Counter((device.product, len(devices)) for devices in nodes.values() for device in devices[:1])
    parts = [f"{count:,} of {gpus} {product}" for (product, gpus), count in kinds.items()]
    return f"Nodes: {', '.join(parts)}; a job of more GPUs than a node has is a gang of workers that start together."


def default_cluster() -> dict[str, list[Device]]:
    """Return Philly's GPUs."""
    return {
        f"node-{begin // PER_NODE:04}": devices_of(f"node-{begin // PER_NODE:04}", PRODUCT, min(PER_NODE, GPUS - begin))
        for begin in range(0, GPUS, PER_NODE)
    }


class _Listed(msgspec.Struct, frozen=True):
    """What `kubectl get gpunodes --output json` prints, or yaml."""

    items: list[GpuNode]


def read_cluster(path: Path) -> dict[str, list[Device]]:
    """Read a cluster file, or a list of GpuNodes, whose healthy GPUs count.

    Raises:
        WorkloadError: The file is missing, is no YAML, has an invalid field, or names an unknown product.
    """
    try:
        read = msgspec.yaml.decode(path.read_bytes())
        if isinstance(read, dict) and "items" in read:
            return _reported(path, msgspec.convert(read, _Listed))
        found = msgspec.convert(read, ClusterFile)
        groups = [(group, find_product(group.product).name) for group in found.nodes]
    except OSError as error:
        raise WorkloadError(
            f"expected a cluster file at {path}, found: {error.strerror}; check the path of --cluster"
        ) from error
    except UnknownProductError as error:
        raise WorkloadError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{path}: {describe_decode_error(str(error))}; write {EXAMPLE}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        found_instead = " ".join(str(error).split())
        raise WorkloadError(f"{path}: expected YAML in UTF-8, found: {found_instead}; write {EXAMPLE}") from error
    nodes: dict[str, list[Device]] = {}
    for group, product in groups:
        for _ in range(group.count):
            name = f"node-{len(nodes):04}"
            nodes[name] = devices_of(name, product, group.gpus)
    if not nodes:
        raise WorkloadError(f"{path}: expected at least one node, found none")
    return nodes


def _reported(path: Path, listed: _Listed) -> dict[str, list[Device]]:
    """Return the healthy GPUs of nodes. Raises WorkloadError without any or with one twice, and UnknownProductError."""
    names = [node.metadata.name for node in listed.items]
    names += [device.uuid for node in listed.items for device in node.status.devices]
    if repeated := [name for name, number in Counter(names).items() if number > 1]:
        raise WorkloadError(f"{path}: expected each node name and GPU UUID once, found {repeated[0]} again; rename it")
    nodes = {
        node.metadata.name: [one for one in node.status.devices if one.health is DeviceHealth.HEALTHY]
        for node in listed.items
    }
    for device in (one for devices in nodes.values() for one in devices):
        find_product(device.product)
    if not any(nodes.values()):
        raise WorkloadError(f"{path}: expected at least one healthy GPU in status.devices of a GpuNode, found none")
    return {name: devices for name, devices in nodes.items() if devices}


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
