"""The step probe of containers: installs it on the node, mounts it, and reads what it reports.

A report is untrusted: any process of the container may write into the file. So each value is bounded by the time that
has passed, and a report describes only the pod whose file it is.
"""

import os
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import carpool_probe
import structlog
from carpool_core.values import PodUid
from carpool_probe.recorder import FIELDS, RECORD_SIZE, RECORDS, SIZE, header
from msgspec.structs import replace

from carpool_deviceplugin.files import make_for_containers, write_file
from carpool_deviceplugin.gpu import Mount, StepCounts, StepReport

CONTAINER_PROBE = "/run/carpool/probe"
"""Where containers see the probe."""
CONTAINER_FILE = "/run/carpool/steps"
"""Where a container sees the file of its counters."""
PYTHONS = range(8, 20)
"""Minor versions of Python 3 in whose containers the probe starts."""
MIN_STEP_S = 20e-6
"""A process that reports more steps than one in this time is not believed: launching one kernel takes 5 µs."""
_WAITS_FOR = {1: "data", 2: "checkpoint"}
_TRIES = 3
_CLOCK_SLACK_S = 0.01


class _Record(NamedTuple):
    """A process's record; the names and units are those of the file."""

    sequence: int
    started_ns: int
    updated_ns: int
    steps: int
    optimizer_steps: int
    skipped_steps: int
    steps_ns: int
    first_step_ns: int
    samples: int
    data_ns: int
    batches: int
    checkpoint_ns: int
    checkpoints: int
    copy_ns: int
    copies: int
    optimizers: int
    waits_for: int


_FORMAT = struct.Struct(f"={len(FIELDS)}Q")
_EMPTY = _Record._make(bytes(len(FIELDS)))
_Reading = tuple[float, Mapping[int, _Record]]
"""Time of a reading and the records by number."""


class ProbeFiles:
    """The probe and its files in a directory of the node.

    Args:
        directory: The directory; containers see parts of it.
        monotonic: Returns seconds of CLOCK_MONOTONIC, which all containers share.
    """

    def __init__(self, directory: Path, monotonic: Callable[[], float]) -> None:
        self._code, self._files, self._monotonic = directory / "code", directory / "pods", monotonic
        self._last: dict[PodUid, _Reading] = {}
        self._doubted: set[PodUid] = set()
        self._log = structlog.get_logger()

    def install(self) -> None:
        """Write the probe's code for containers; raises OSError.

        `user` is a user base (PYTHONUSERBASE) whose .pth files start the probe, `pythonpath` has the same for
        virtual environments (PYTHONPATH), and `python` the package.
        """
        for directory in (self._code, self._files):
            make_for_containers(directory)
        source = Path(carpool_probe.__file__).parent
        for path in sorted(source.glob("*.py")):
            place = "pythonpath" if path.name == "sitecustomize.py" else "python/carpool_probe"
            write_file(self._code / place / path.name, path.read_bytes())
        start = b"../../../../python\nimport carpool_probe.start\n"
        for minor in PYTHONS:
            write_file(self._code / f"user/lib/python3.{minor}/site-packages/carpool_probe.pth", start)

    def access(self, pod: PodUid) -> tuple[dict[str, str], list[Mount]]:
        """Create a pod's file if it is absent; return the container's variables and mounts. Raises OSError."""
        if "/" in pod or pod.startswith("."):  # no UID, and no name of a file
            return {}, []
        path = self._files / pod
        if not path.exists():
            write_file(path, header().ljust(SIZE, b"\0"))
            path.chmod(0o666)  # containers run as any user
        mounts = [
            Mount(str(self._code), CONTAINER_PROBE, read_only=True),
            Mount(str(path), CONTAINER_FILE),
        ]
        return {"CARPOOL_PROBE_FILE": CONTAINER_FILE, "PYTHONUSERBASE": f"{CONTAINER_PROBE}/user"}, mounts

    def keep(self, pods: Collection[PodUid]) -> None:
        """Remove the files of all other pods."""
        self._last = {pod: last for pod, last in self._last.items() if pod in pods}
        self._doubted.intersection_update(pods)
        for path in self._files.glob("*"):
            if path.name not in pods:
                path.unlink(missing_ok=True)

    def read(self, pod: PodUid) -> StepReport | None:
        """Read a pod's counters; None if its processes report nothing, or nothing credible."""
        records = read_records(self._files / pod)
        if not records:
            return None
        now, last = self._monotonic(), self._last.get(pod)
        self._last[pod] = (now, records)
        then, before = last or (now, records)
        grown: list[StepCounts] = []
        for number, record in records.items():
            earlier = before.get(number, _EMPTY)
            if earlier.started_ns != record.started_ns:
                earlier = _EMPTY
            if why := _implausible(record, earlier, now, now - then):
                self._doubt(pod, why)
                return None
            grown.append(_growth(record, earlier))
        active = [one for one in grown if one.steps] or grown
        since = replace(
            max(grown, key=lambda one: one.steps),
            elapsed_s=now - then,
            samples=sum(one.samples for one in grown),
            data_s=fmean(one.data_s for one in active),
            checkpoint_s=fmean(one.checkpoint_s for one in active),
            copy_s=fmean(one.copy_s for one in active),
            batches=sum(one.batches for one in grown),
        )
        waits_for = next((text for one in records.values() if (text := _WAITS_FOR.get(one.waits_for))), "")
        return StepReport(max(record.steps for record in records.values()), since, waits_for)

    def _doubt(self, pod: PodUid, why: str) -> None:
        if pod not in self._doubted:
            self._doubted.add(pod)
            self._log.warning("step counters ignored", pod=pod, why=why)


def read_records(path: Path) -> dict[int, _Record]:
    """Return the records in use; those that change during every try are left out."""
    found: dict[int, _Record] = {}
    try:
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > SIZE:  # a container may have written more, which nothing limits
                file.truncate(SIZE)
            for _ in range(_TRIES):
                first, second = (os.pread(file.fileno(), SIZE, 0) for _ in range(2))
                if len(second) < SIZE or not first.startswith(header()):
                    return {}
                for number in range(RECORDS):
                    one, other = (_Record(*_FORMAT.unpack_from(c, RECORD_SIZE * (number + 1))) for c in (first, second))
                    if one.sequence == other.sequence and not one.sequence % 2 and one.steps:
                        found.setdefault(number, one)
    except OSError:
        return {}
    return found


def _implausible(now: _Record, before: _Record, at_s: float, elapsed_s: float) -> str:
    """Return why a process's counters cannot be true; empty if they can."""
    age_ns = 1e9 * (at_s + _CLOCK_SLACK_S) - now.started_ns
    if not now.started_ns <= now.updated_ns <= now.started_ns + age_ns:
        return f"expected times up to {at_s:.3f} s, found {now.started_ns} to {now.updated_ns} ns"
    if any(new < old for new, old in zip(now[3:15], before[3:15], strict=True)):
        return f"expected counters that grow, found {now} after {before}"
    longest_ns = max(now.steps_ns, now.data_ns, now.checkpoint_ns, now.copy_ns)
    if longest_ns > age_ns:
        return f"expected at most {age_ns / 1e9:.3f} s of steps and waits, found {longest_ns / 1e9:.3f} s"
    seconds = elapsed_s if before is not _EMPTY else age_ns / 1e9
    if (now.steps - before.steps) * MIN_STEP_S > seconds + 1.0:
        return f"expected at most a step each {MIN_STEP_S * 1e6:g} µs, found {now.steps - before.steps} in {seconds} s"
    return ""


def _growth(now: _Record, before: _Record) -> StepCounts:
    first = now.steps > 0 and before.steps == 0  # its time is not in `steps_ns`
    return StepCounts(
        steps=now.steps - before.steps,
        steps_s=(now.steps_ns - before.steps_ns) / 1e9,
        timed_steps=now.steps - before.steps - first,
        samples=now.samples - before.samples,
        data_s=(now.data_ns - before.data_ns) / 1e9,
        checkpoint_s=(now.checkpoint_ns - before.checkpoint_ns) / 1e9,
        copy_s=(now.copy_ns - before.copy_ns) / 1e9,
        batches=now.batches - before.batches,
    )
