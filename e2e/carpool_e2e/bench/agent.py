"""What a node agent costs with eight GPUs and 64 tenants, and how quickly it answers; over fakes, without a GPU."""

import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool_core.resources.node import Reservation
from carpool_core.values import GpuUuid, JobUid, PodUid, SharingMode
from carpool_deviceplugin import mig
from carpool_deviceplugin.gpu import GpuActual, MigInstance
from carpool_deviceplugin.mig import Instance, MigTable, OccupiedSlices, Placement, Profile
from carpool_deviceplugin.mps import PROGRAM, Mps, MpsProgram
from carpool_deviceplugin.partitions import divide
from carpool_deviceplugin.testing.gpus import A100_40, A100_80, H100_80
from carpool_deviceplugin.testing.kubelet import Kubelet

from carpool_e2e.bench.agentprocess import GPUS, READY, SPENT, TENANTS, pod_name, settings_in
from carpool_e2e.bench.memory import resident_mib

TABLES = (A100_40, A100_80, H100_80)
SEED = 7
USED = 0.4
"""How much of what a GPU has is in use, by chance."""
Multiset = frozenset[tuple[Profile, int]]
Layouts = Mapping[Multiset, Sequence[Sequence[Placement]]]


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest of some plans."""

    plans: int
    ms: float
    """Processor time."""


@dataclass(frozen=True, slots=True)
class MigTimes:
    """What was measured."""

    pairs: Slowest
    """Of each pair of multisets: one layout of the first, some of it in use."""
    wholly_used: Slowest
    """Of each layout, all of it in use, with each multiset."""
    first: Slowest
    """Of each multiset on an empty GPU, the first plan of a process: nothing is remembered."""
    division: Slowest
    """Seven instances in use, and seven reservations for which there is no place."""


def measure_mig(tell: Callable[[str], None]) -> MigTimes:
    """Measure all of it; takes about a minute."""
    tell("MIG planner: every pair of multisets, every layout in use, first plans, division")
    pairs = [plan_s for table in TABLES for plan_s in _pairs(table)]
    found = layouts_of(A100_40)  # the three have one geometry: what takes longest is done for one of them
    used = [
        _plan_s(A100_40, there, len(there), wanted) for same in found.values() for there in same for wanted in found
    ]
    return MigTimes(_slowest(pairs), _slowest(used), _slowest(_first(found)), _slowest([_division()]))


def layouts_of(table: MigTable) -> Layouts:
    """Return every layout of a GPU, by its multiset of profiles."""
    places = [place for profile in table.profiles for _, place in profile.placements]
    found: dict[Multiset, list[Sequence[Placement]]] = defaultdict(list)

    def extend(at: int, taken: OccupiedSlices, chosen: tuple[Placement, ...]) -> None:
        if at == len(places):
            found[frozenset(Counter(place.profile for place in chosen).items())].append(chosen)
            return
        extend(at + 1, taken, chosen)
        if taken.fits(places[at]):
            extend(at + 1, taken.plus(places[at]), (*chosen, places[at]))

    extend(0, OccupiedSlices(), ())
    return found


def _pairs(table: MigTable) -> Iterator[float]:
    draw, found = random.Random(SEED), layouts_of(table)  # noqa: S311  # reproducible, not secret
    for same in found.values():
        for wanted in found:
            there = list(draw.choice(same))
            draw.shuffle(there)
            yield _plan_s(table, there, sum(draw.random() < USED for _ in there), wanted)


def _first(found: Layouts) -> Iterator[float]:
    for wanted in found:
        mig.free_counts.cache_clear()
        yield _plan_s(A100_40, (), 0, wanted)


def _plan_s(table: MigTable, there: Sequence[Placement], used: int, wanted: Multiset) -> float:
    """Plan once, with so many of what is there in use; seconds."""
    present = [Instance(number, place) for number, place in enumerate(there)]
    profiles = [profile for profile, count in wanted for _ in range(count)]
    return _took_s(lambda: mig.plan_mig(table, present, set(range(used)), profiles))


def _division() -> float:
    profile, gpu = A100_40.find("1g.5gb"), GpuUuid("GPU-1")
    pods = [PodUid(f"uid-{number}") for number in range(14)]
    mig_instances = tuple(
        MigInstance(Instance(number, place), True, pods[number], frozenset({pods[number]}), True)
        for number, (_, place) in enumerate(profile.placements)
    )
    wanted = [
        Reservation(
            pod_uid=pod,
            pod_namespace="default",
            pod_name=pod,
            job_uid=JobUid(pod),
            job_name=pod,
            gpu_uuids=[gpu],
            mode=SharingMode.MIG,
            mig_profile=profile.name,
        )
        for pod in pods
    ]
    return _took_s(
        lambda: divide(GpuActual(gpu, 1, frozenset(), mig_instances=mig_instances, mig_table=A100_40), A100_40, wanted)
    )


def _took_s(work: Callable[[], object]) -> float:
    began = time.thread_time()  # what others do on the machine meanwhile is not the planner's
    work()
    return time.thread_time() - began


def _slowest(seconds: Iterable[float]) -> Slowest:
    took = list(seconds)
    return Slowest(len(took), 1000 * max(took))


WINDOW_S, SCRAPE_EVERY_S = 60, 15
SCRAPES, ROUNDS, DAEMONS = 200, 3, 20
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
"""What Prometheus asks for."""
_TICKS = os.sysconf("SC_CLK_TCK")

STAND_IN = """#!/bin/sh
# Stands in for nvidia-cuda-mps-control: a daemon that opens its pipe, and a client.
pipe="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
  ln -sf "$(command -v sleep)" "$pipe/../nvidia-cuda-mps"
  setsid "$pipe/../nvidia-cuda-mps" 600 <&- >&- 2>&- &
  : > "$pipe/control"
  exit 0
fi
read -r command
[ "$command" = get_server_list ] || exit 1
"""


@dataclass(frozen=True)
class Cost:
    """What was measured."""

    core_percent: float
    """CPU time of the agent, in % of one core, without what the fakes spent."""
    fakes_percent: float
    resident_mib: float
    scrape_p99_ms: float
    prestart_p99_ms: float
    mps_ready_s: float
    """The slowest of the daemons."""
    mig: MigTimes
    load: float
    """Of the machine, when the agent had been looked at."""


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile, in ms."""
    return 1000 * statistics.quantiles(seconds, n=100)[98]


def measure(tell: Callable[[str], None], window_s: float = WINDOW_S) -> Cost:
    """Run one agent for a while and look at it from outside."""
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as directory:
        return asyncio.run(_measure(Path(directory), tell, window_s))


async def _measure(root: Path, tell: Callable[[str], None], window_s: float) -> Cost:
    (root / "plugins").mkdir()
    kubelet = Kubelet(settings_in(root).device_plugin_dir, settings_in(root).pod_resources_socket)
    await kubelet.start()
    command = [sys.executable, "-m", "carpool_e2e.bench.agentprocess", str(root)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{await _port(process)}/metrics"
        await kubelet.registered.get()
        await asyncio.sleep(5)  # it has begun
        tell(f"agent with {GPUS} GPUs and {GPUS * TENANTS} tenants: {window_s:g} s, a scrape each {SCRAPE_EVERY_S} s")
        core, fakes = await _cpu(process.pid, url, window_s)
        resident = resident_mib(process.pid)
        scrapes = [await asyncio.to_thread(_scrape, url) for _ in range(SCRAPES)]
        starts = await _starts(kubelet)
    finally:
        process.kill()
        await process.wait()
        await kubelet.stop()
    ready_s = max(mps_ready(root / "daemons"))
    load, mig = os.getloadavg()[0], measure_mig(tell)
    return Cost(core, fakes, resident, p99(scrapes), p99(starts), ready_s, mig, load)


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    async for line in process.stdout:
        word, _, port = line.decode().partition(" ")
        if word == READY:
            return int(port)
    raise RuntimeError(
        f"expected {READY!r} of the agent, found its end: run python -m carpool_e2e.bench.agentprocess DIR"
    )


def _spent_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _cpu(pid: int, url: str, window_s: float) -> tuple[float, float]:
    unreal = _fakes_s(url)
    began, spent = time.monotonic(), _spent_s(pid)
    for _ in range(round(window_s / SCRAPE_EVERY_S)):
        await asyncio.sleep(SCRAPE_EVERY_S)
        last = await asyncio.to_thread(_fakes_s, url)
    elapsed, unreal = time.monotonic() - began, last - unreal
    return 100 * (_spent_s(pid) - spent - unreal) / elapsed, 100 * unreal / elapsed


def _fakes_s(url: str) -> float:
    lines = _page(url).decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{SPENT} ")).split()[1])


def _page(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})  # noqa: S310  # our own, on the loopback address
    with urllib.request.urlopen(request) as answer:  # noqa: S310  # as above
        page: bytes = answer.read()
        return page


def _scrape(url: str) -> float:
    began = time.perf_counter()
    page = _page(url)
    took = time.perf_counter() - began
    assert page.count(b"carpool_gpu_tenant_memory_bytes{") == GPUS * TENANTS
    return took


async def _starts(kubelet: Kubelet) -> list[float]:
    """Each pod's container starts some times, from the kubelet's call to the written specification."""
    took: list[float] = []
    for at in range(GPUS):
        for number in range(TENANTS):
            await kubelet.admit(pod_name(at, number), f"slot-{TENANTS * at + number}")
    names = [pod_name(at, number) for at in range(GPUS) for number in range(TENANTS)] * ROUNDS
    async with kubelet.starting() as start:
        for name in names:
            began = time.perf_counter()
            await start(name)
            took.append(time.perf_counter() - began)
    return took


def mps_ready(root: Path) -> list[float]:
    """Start daemons of a stand-in for NVIDIA's program, through the agent's own code; seconds until each answers."""
    (root / "bin").mkdir(parents=True)
    program = root / "bin" / PROGRAM
    program.write_text(STAND_IN)
    program.chmod(0o755)
    path, took = os.environ["PATH"], []
    os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{path}"
    try:
        commands = MpsProgram(private_shm=os.geteuid() == 0)
        mps = Mps(commands, root / "mps")
        for number in range(DAEMONS):
            gpu = GpuUuid(f"GPU-00000000-0000-4000-8000-{number:012x}")
            began = time.perf_counter()
            mps.start(gpu)
            took.append(time.perf_counter() - began)
            _end(mps.daemon(gpu).record)
    finally:
        os.environ["PATH"] = path
        shutil.rmtree(root)
    return took


def _end(file: Path) -> None:
    """The stand-in knows no `quit`."""
    try:
        os.kill(int(file.read_text().split()[0]), 15)
    except ProcessLookupError:
        return


HEADING = "## A node agent with eight GPUs and 64 tenants"


def rows(cost: Cost) -> list[tuple[str, float, float]]:
    """Return what was measured, in the words of the report, with the most that is allowed."""
    mig = cost.mig
    return [
        (f"processor time, in % of one core, at a scrape each {SCRAPE_EVERY_S} s", cost.core_percent, 0.5),
        ("resident memory, MiB", cost.resident_mib, 80),
        (f"scrape, p99 of {SCRAPES}, ms", cost.scrape_p99_ms, 50),
        (f"PreStartContainer, p99 of {GPUS * TENANTS * ROUNDS}, ms", cost.prestart_p99_ms, 20),
        (f"MPS daemon ready, the slowest of {DAEMONS}, s", cost.mps_ready_s, 1),
        (
            f"MIG planner, the slowest of {mig.pairs.plans:,}: each pair of multisets on A100 (40 and 80 GB) and H100, "
            "one layout each, some of it in use; ms",
            mig.pairs.ms,
            10,
        ),
        (
            f"MIG planner, the slowest of {mig.wholly_used.plans:,}: each layout, all of it in use, with each "
            "multiset; ms",
            mig.wholly_used.ms,
            10,
        ),
        (
            f"MIG planner, the slowest of {mig.first.plans:,} first plans of a process: each multiset on an empty "
            "GPU; ms",
            mig.first.ms,
            10,
        ),
        ("MIG division with seven instances in use and seven reservations too many, ms", mig.division.ms, 10),
    ]


def agent_section(cost: Cost) -> list[str]:
    """Write the section of the report."""
    return [
        HEADING,
        "",
        "Eight H100 of the stateful fake of NVML, eight MPS clients each; API server and MPS daemons in memory, the",
        "kubelet and Prometheus in another process. A real driver's own work is not in the figures, nor is the fakes',",
        f"which was {cost.fakes_percent:.2f}% of a core. The MPS daemon is a script in place of NVIDIA's program. The",
        f"machine's load was {cost.load:.1f} when the agent had been looked at. The planner's times are processor",
        "times.",
        "",
        "| what | found | at most | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {found:.3g} | {most:g} | {'kept' if found <= most else 'missed'} |"
            for what, found, most in rows(cost)
        ),
        "",
    ]
