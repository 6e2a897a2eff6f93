"""Any trace of times, durations and GPUs on any cluster; Microsoft's Philly by default."""

import csv
import math
import random
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec
from carpool_core.products import UnknownProductError, find_product
from carpool_core.resources.node import MAX_GPUS, Device
from carpool_core.resources.schema import describe_decode_error
from carpool_core.values import GpuUuid, SharingMode
from carpool_extender.framework.filters import pluralize
from carpool_extender.queue.order import QueueOrder
from msgspec import Meta

from carpool_simulator.profiles import PRODUCT, job_of, measured_profiles, prediction_of, step_times
from carpool_simulator.strategy import Knowledge, Strategy
from carpool_simulator.truth import SimJob, Workload, WorkloadError

COLUMNS = ("timestamp", "duration", "num_gpus")
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
"""What programs put between columns in the place of commas."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a trace."""

    at_s: float
    """Seconds after the first."""
    duration_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file says."""

    jobs: Sequence[Submission]
    """Ascending by time."""
    unsorted: int
    """How many lines came after a line of a later time."""


def read_trace(path: Path) -> Trace:
    """Read a trace with the columns `timestamp`, `duration` and `num_gpus`.

    Times are ISO 8601, UTC where they say nothing else, or seconds; durations are seconds.

    Raises:
        WorkloadError: There is no such file, a column is missing or there twice, or a value makes no sense; the line is
            named.
    """
    if not path.is_file():
        found_instead = "a folder" if path.is_dir() else "what is no regular file" if path.exists() else "no file"
        raise WorkloadError(
            f"expected a trace at {path}, found {found_instead}; look at the path that --trace names, or, for a "
            "published workload, --data (CARPOOL_DATA)"
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = _submissions(path, csv.DictReader(file))
    except OSError as error:
        raise WorkloadError(f"expected to read the trace {path}: {error.strerror}; look at its permissions") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: expected CSV in UTF-8, found {error}; save it as that") from error
    if not found:
        raise WorkloadError(f"{path}: expected at least one job, found none")
    latest_s = accumulate((one.at_s for one in found), max)
    unsorted = sum(one.at_s < before_s for one, before_s in zip(found, latest_s, strict=True))
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return Trace([Submission(one.at_s - first, one.duration_s, one.gpus) for one in found], unsorted)


def _submissions(path: Path, reader: "csv.DictReader[str]") -> list[Submission]:
    given = Counter(reader.fieldnames or ())
    has = ", ".join(reader.fieldnames or ["none"])
    if missing := [column for column in COLUMNS if not given[column]]:
        raise WorkloadError(
            f"{path}: expected the columns {', '.join(COLUMNS)}, found {has}; {_remedy(tuple(given), missing)}"
        )
    if repeated := [column for column in COLUMNS if given[column] > 1]:
        raise WorkloadError(
            f"{path}: expected each of the columns {', '.join(COLUMNS)} once, found {has}; keep one {repeated[0]}, and "
            "rename or remove the others"
        )
    found, first_line = list[Submission](), 0
    in_seconds = False
    for row in reader:
        found.append(_submission(path, reader.line_num, row))
        timestamp = row[COLUMNS[0]] or ""
        is_number = _is_number(timestamp)
        if not first_line:
            first_line, in_seconds = reader.line_num, is_number
        if is_number is not in_seconds:
            kind = "seconds" if in_seconds else "a time in ISO 8601"
            raise WorkloadError(
                f"{path}, line {reader.line_num}: expected {kind} as on line {first_line}, found {timestamp}; write "
                "all times alike"
            )
    return found


def _remedy(given: Sequence[str], missing: Sequence[str]) -> str:
    """Say what to do about columns that are missing: they may stand there in other letters, or not apart."""
    for separator, name in _SEPARATORS.items():
        if any(separator in one and _plain(part) in missing for one in given for part in one.split(separator)):
            return f"separate by commas what {name} separate"
    like = {_plain(one): one for one in given}
    renamed = [f'"{like[column]}" to {column}' for column in missing if column in like]
    told = [f"rename {', '.join(renamed)}"] if renamed else []
    if added := [column for column in missing if column not in like]:
        told.append(f"add {', '.join(added)}")
    return ", and ".join(told)


def _plain(name: str) -> str:
    """Write a column's name as ours are written."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


LONGEST_S = 1e9
"""Longest job, thirty years: the clock of a simulation is a calendar, which ends."""


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
    """Read a moment as seconds since some beginning."""
    if _is_number(text):
        found = float(text)
    else:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(found):
        raise ValueError(f"{text} is no time")
    return found


GPUS, PER_NODE = 2490, 8
MOST_NODES = 100_000
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
_WORDS = {
    ", got ": ", found ",
    r"\barray$": "a list",
    r"\barray,": "a list,",
    r"\bnull$": "nothing",
    r"object contains unknown field (\w+)": r"expected only the fields that are known, found \1",
    r"object missing required field (\w+)": r"expected the field \1, found none",
}
"""Of what the decoder says, in these words."""
_LINE = re.compile(r"line (\d+), column \d+")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

ASSUMPTIONS = (
    "The trace says when, for how long and on how many GPUs; not what was trained. Each job gets one of the 18 "
    "measured profiles of the HotCloud workload at random: small networks on small images, which take little memory.",
    "Durations are those alone. What was measured on an RTX 3090 is taken for what happens on any product.",
    "A GPU without a job draws an RTX 3090's idle power, one with a job what Zeus measured of an A40.",
    "GPUs are shared by time slicing, as the measured pairs were, also where MPS could be had.",
)
UNLEARNED = (
    "Running jobs are measured, but nothing is learned of jobs to come, because the trace does not say what could come "
    "again. So every newcomer counts with what is predicted of it, and how busy such networks keep a GPU is predicted "
    "badly: where many share, jobs are slowed beyond what they accept more often than on a cluster, which learns."
)
LEARNED = (
    "Carpool learns from what ran. There are only 18 profiles, which come again and again: a cluster knows its jobs "
    "less well."
)
SILENT = (
    "Jobs do not say how many steps they have, so that all count as equally long: whatever sorts the queue, they come "
    "in order of arrival. Of an own trace they say it with --steps."
)
TELLING = (
    "Jobs say how many steps they have: their duration over the measured time of a step. How long they are to the "
    "queue is these steps by the predicted time of one, and an hour where that is not predicted."
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
    """Nodes that are alike, in a cluster file."""

    count: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1
    product: str
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)] = 8


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes: [{count: 10, product: NVIDIA A100-SXM4-40GB, gpus: 8}]`."""

    nodes: list[NodeGroup]


def philly(data: Path, seed: int) -> Workload:
    """Return the whole Philly trace on its 2,490 GPUs."""
    return from_trace(data, data / "traces" / "philly_sia.csv", default_cluster(), seed)


def learning(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Return the same strategies, of which those learn that predict."""
    return [replace(one, learns=one.knowledge is Knowledge.PREDICTED) for one in strategies]


def from_trace(
    data: Path,
    trace: Path,
    nodes: Mapping[str, Sequence[Device]],
    seed: int,
    *,
    is_learned: bool = False,
    says_steps: bool = False,
) -> Workload:
    """Build a workload out of a trace and a cluster.

    Args:
        data: Folder of measurements.
        trace: The trace's file.
        nodes: GPUs by the node's name.
        seed: Of what the jobs train.
        is_learned: Whether strategies learn on it; it is only told here.
        says_steps: Whether jobs say how many steps they have.
    """
    draw = random.Random(f"trace/{seed}")  # noqa: S311  # a simulation, no secret
    most, all_gpus = max(map(len, nodes.values())), sum(map(len, nodes.values()))
    product = _commonest(nodes)
    kinds = [replace(kind, product=product) for kind in measured_profiles(data)]
    steps_s = step_times(data)
    read, jobs = read_trace(trace), deque[SimJob]()
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
                steps=max(1, round(one.duration_s / steps_s[truth.kind])) if says_steps else None,
            )
        )
    told = [f"{pluralize(read.unsorted, 'line')} came after a later one; all were sorted."] if read.unsorted else []
    if large := sum(one.gpus > all_gpus for one in read.jobs):
        told.append(f"Never placed: {pluralize(large, 'job')} of more GPUs than the {all_gpus:,} that there are.")
    largest_mib = max(device.memory_mib - device.reserved_mib for devices in nodes.values() for device in devices)
    if fat := sum(one.truth.memory_mib > largest_mib for one in jobs):
        told.append(
            f"Die of memory until they are given up: {pluralize(fat, 'job')} that need more than the "
            f"{largest_mib:,} MiB of any GPU."
        )
    title = f"{trace.name}: {len(jobs):,} jobs, {all_gpus:,} GPUs"
    if others := {device.product for devices in nodes.values() for device in devices} - {product}:
        told.append(f"Predictions are for {product}; on {', '.join(sorted(others))} every job runs alone.")
    learned, steps = LEARNED if is_learned else UNLEARNED, TELLING if says_steps else SILENT
    assumptions = (*ASSUMPTIONS, learned, steps, *_cluster_of(nodes), *told)
    return Workload("trace", title, list(jobs), nodes, assumptions, notes=told, shown=SHOWN)


def _commonest(nodes: Mapping[str, Sequence[Device]]) -> str:
    """Return the product of which there are the most GPUs."""
    pluralize = Counter(device.product for devices in nodes.values() for device in devices)
    return pluralize.most_common(1)[0][0]


def _cluster_of(nodes: Mapping[str, Sequence[Device]]) -> list[str]:
    """Say what a cluster consists of."""
    kinds = Counter((device.product, len(devices)) for devices in nodes.values() for device in devices[:1])
    parts = [f"{count:,} of {gpus} {product}" for (product, gpus), count in kinds.items()]
    return [f"Nodes: {', '.join(parts)}; more GPUs than a node has make a gang of workers that start together."]


def default_cluster() -> dict[str, list[Device]]:
    """Return Philly's GPUs."""
    return {
        f"node-{begin // PER_NODE:04}": devices_of(f"node-{begin // PER_NODE:04}", PRODUCT, min(PER_NODE, GPUS - begin))
        for begin in range(0, GPUS, PER_NODE)
    }


def read_cluster(path: Path) -> dict[str, list[Device]]:
    """Read a cluster file.

    Raises:
        WorkloadError: It cannot be read, says something twice, or names an unknown product.
    """
    given = _decoded(path)
    try:
        found = msgspec.convert(given, ClusterFile)
        groups = [(group, find_product(group.product).name) for group in found.nodes]
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{path}: {_complaint(str(error), given)}; write {EXAMPLE}") from error
    except UnknownProductError as error:
        raise WorkloadError(f"{path}: {error}") from error
    nodes: dict[str, list[Device]] = {}
    for group, product in groups:
        for _ in range(group.count):
            name = f"node-{len(nodes):04}"
            nodes[name] = devices_of(name, product, group.gpus)
    if not nodes:
        raise WorkloadError(f"{path}: expected at least one node, found none")
    return nodes


def _decoded(path: Path) -> object:
    try:
        text = path.read_bytes()
        given: object = msgspec.yaml.decode(text)
        repeated = _repeated(text)
    except FileNotFoundError as error:
        raise WorkloadError(
            f"expected a cluster file at {path}, found no file; look at the path that --cluster names"
        ) from error
    except OSError as error:
        raise WorkloadError(
            f"expected to read the cluster file {path}, found: {error.strerror}; look at the path that --cluster names"
        ) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        places = _LINE.findall(str(error))  # the last is where reading stopped, others say what it is part of
        found = f"what is none near line {places[-1]}" if places else "something else"
        raise WorkloadError(f"{path}: expected YAML in UTF-8, found {found}; write {EXAMPLE}") from error
    if repeated:
        raise WorkloadError(f"{path}: expected each field once, found {repeated}; keep one of them, as in {EXAMPLE}")
    return given


def _repeated(text: bytes) -> str:
    """Name a field that stands twice in a mapping, of which the decoder takes the last in silence; empty without."""
    import yaml  # half a megabyte that no other workload needs

    waiting, seen = [yaml.compose(text, yaml.SafeLoader)], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias may stand inside of what it means
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            lines = dict[str, int]()
            for key, value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):  # any other is no field, which is told elsewhere
                    if key.value in lines:
                        return f"{key.value} on line {lines[key.value]} and again on line {line}"
                    lines[key.value] = line
                waiting.append(value)
    return ""


def _complaint(said: str, given: object) -> str:
    """Say what is wrong with a cluster file, and what stands there."""
    told = describe_decode_error(said)
    for theirs, ours in _WORDS.items():
        told = re.sub(theirs, ours, told)
    if "found " in told:
        return told
    for name, index in _STEP.findall(said.rpartition("`$")[2]):
        if isinstance(given, dict):
            given = given[name]
        elif isinstance(given, list):
            given = given[int(index)]
    return f"{told}, found {given}"


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
