"""What a node agent costs with eight GPUs and 64 tenants, and how quickly it answers; over fakes, without a GPU."""

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from carpool_core.values import GpuUuid
from carpool_deviceplugin.mps import PROGRAM, Mps, MpsProgram
from carpool_deviceplugin.testing.kubelet import Kubelet

from carpool_e2e.bench.agent_mig import MigTimes, measure_mig
from carpool_e2e.bench.agentprocess import GPUS, READY, SPENT, TENANTS, pod_name, settings_in
from carpool_e2e.bench.memory import resident_mib

WINDOW_S, SCRAPE_EVERY_S = 60, 15
SCRAPES, ROUNDS, DAEMONS = 200, 3, 20
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
"""What Prometheus asks for."""
_TICKS = os.sysconf("SC_CLK_TCK")

STAND_IN = """#!/bin/sh
# Stands in for nvidia-cuda-mps-control: a daemon that writes its process ID and opens its pipe, and a client.
pipe="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
  ln -sf "$(command -v sleep)" "$pipe/../nvidia-cuda-mps"
  setsid "$pipe/../nvidia-cuda-mps" 600 <&- >&- 2>&- &
  echo $! > "$pipe/nvidia-cuda-mps-control.pid"
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
            _end(mps.directory(gpu) / "pipe" / "nvidia-cuda-mps-control.pid")
    finally:
        os.environ["PATH"] = path
        shutil.rmtree(root)
    return took


def _end(file: Path) -> None:
    """The stand-in knows no `quit`."""
    try:
        os.kill(int(file.read_text()), 15)
    except ProcessLookupError:
        return
