"""`make bench`: measures, and writes docs/benchmarks.md with the machine's size beside the figures."""

import asyncio
import os
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import uvloop
from carpool_core.clock import SystemClock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.client import connect
from carpool_core.settings import KubeSettings
from carpool_simulator.progress import Provenance, provenance
from rich.console import Console

from carpool_e2e.bench import agent, latency, memory, placement, predictions, simulator, throughput
from carpool_e2e.bench.agent import agent_section
from carpool_e2e.bench.measure import played
from carpool_e2e.bench.placement import placement_section
from carpool_e2e.bench.throughput import MOST_ROUNDS, ROUNDS, Throughput, Turn, throughput_section
from carpool_e2e.chart import PROJECT
from carpool_e2e.cluster import BARE, FULL, Cluster, Shape, running

T = TypeVar("T")

RUNS, NODES, GPUS, JOBS = 15, 500, 8, 1000
SETTLE_S = 5
"""How long the extender has to hear of what was written."""

REPORT = PROJECT / "docs" / "benchmarks.md"

Row = tuple[str, float, float]
"""What, measured, and the most that is allowed."""


def machine() -> str:
    """Describe this machine in a sentence."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor() or "unknown processor",
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    software = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} × {model}, {pages:.0f} GiB of memory, {software}"


def main(console: Console) -> None:
    """Run all benchmarks and write the report."""
    made = provenance(SystemClock())
    console.rule("the way of a job")
    with running(Shape(kubelet_nodes=FULL.kubelet_nodes), console) as cluster:
        timelines = asyncio.run(_latency(cluster, console))
        agents = [memory.resident_mib(cluster[f"agent-{node}"].pid) for node in FULL.kubelet_nodes]
    console.rule(f"memory: {NODES} nodes, {JOBS} jobs")
    with running(BARE, console) as cluster:
        asyncio.run(_with_api(cluster, lambda api: memory.populate(api, NODES, GPUS)))
        cluster.processes.start_scheduler()
        cluster["kube-scheduler"].kill()  # the pods shall stay where the benchmark puts them
        cluster.processes.start_operator()
        asyncio.run(_with_api(cluster, lambda api: memory.submit(api, JOBS)))
        operator = memory.resident_mib(cluster["operator"].pid)
        reserved = asyncio.run(_with_api(cluster, memory.reserve))
        time.sleep(SETTLE_S)
        extender = memory.resident_mib(cluster["extender"].pid)
    rows: list[Row] = [
        (f"node agent, {len(agents)} agents with 4 GPUs each, the larger", max(agents), 80),
        (f"extender, {NODES} nodes × {GPUS} GPUs, {reserved:,} reservations, {JOBS:,} jobs", extender, 150),
        (f"operator, {JOBS} jobs with their pods, without PyTorch", operator, 200),
    ]
    REPORT.write_text(report(latency.table(timelines), rows, len(timelines), made), encoding="utf-8")
    renew_agent(console)
    renew_predictions(console)
    renew_placement(console)
    renew_throughput(console)
    renew_simulator(console)
    console.print(f"written: {REPORT.relative_to(PROJECT)}")


def renew_agent(console: Console) -> None:
    """Measure what a node agent costs, and put the section into the report."""
    console.rule("an agent of eight GPUs")
    _renew(lambda: agent_section(agent.measure(console.print)))


def renew_predictions(console: Console) -> None:
    """Measure how quickly predictions come, and put the section into the report."""
    console.rule("predictions")
    _renew(lambda: predictions.section(predictions.measure(lambda told: console.print(told, highlight=False))))


def renew_placement(console: Console) -> None:
    """Measure the extender's speed, and put the section into the report."""
    console.rule("placement")

    def tell(said: str) -> None:
        console.print(said, highlight=False)

    _renew(lambda: placement_section(placement.measure(tell), placement.profile(tell)))


def renew_throughput(console: Console) -> None:
    """Measure the control plane's throughput and kube-scheduler's in turns, and put the section into the report."""
    console.rule("throughput of the control plane")

    def measured(by: Callable[[Cluster, KubeApi, Callable[[str], None]], Awaitable[Throughput]]) -> Throughput:
        with running(BARE, console) as cluster:
            # uvloop, because what the benchmark itself takes of the processors is missing to what it measures.
            return uvloop.run(_with_api(cluster, lambda api: by(cluster, api, console.print)))

    def both() -> Turn:
        turn = Turn(measured(throughput.measure), measured(throughput.measure_stock))
        rates = " and ".join(f"{one.jobs_a_second:.1f}" for one in (turn.ours, turn.theirs))
        console.print(f"{rates} jobs/s, {turn.stolen:.1%} stolen")
        return turn

    _renew(lambda: throughput_section(played(both, ROUNDS, MOST_ROUNDS)))


def renew_simulator(console: Console) -> None:
    """Measure the simulator on its largest trace, and put the section into the report; without the trace leave it."""
    console.rule("the simulator")
    data = os.environ.get(simulator.DATA)
    if data is None:
        console.print(f"{simulator.DATA} is not set, so that there is no trace: the section stays as it was")
        return
    _renew(lambda: simulator.simulator_section(simulator.measure(Path(data), console.print)))


def _renew(measured: Callable[[], list[str]]) -> None:
    made = provenance(SystemClock())
    section = dated(measured(), made)
    REPORT.write_text(predictions.replaced(REPORT.read_text(encoding="utf-8"), section), encoding="utf-8")


def dated(section: list[str], made: Provenance) -> list[str]:
    """Say below a section's heading when it was measured, and what: each can be renewed alone."""
    heading, *rest = section
    return [heading, "", f"Measured {_of(made)}.", *rest]


def _of(made: Provenance) -> str:
    return f"on {made.when} UTC, version {made.version}"


async def _latency(cluster: Cluster, console: Console) -> list[latency.Timeline]:
    async with connect(KubeSettings(kubeconfig=str(cluster.kubeconfig))) as api:
        await latency.measure(api, 1, lambda said: console.print(f"(warm-up) {said}"))
        return await latency.measure(api, RUNS, console.print)


async def _with_api(cluster: Cluster, work: Callable[[KubeApi], Awaitable[T]]) -> T:
    async with connect(KubeSettings(kubeconfig=str(cluster.kubeconfig))) as api:
        return await work(api)


def evaluation(found: float, most: float) -> str:
    """Say whether a figure keeps its target."""
    return "kept" if found <= most else "missed"


def report(steps: list[tuple[str, float, float, float]], memories: list[Row], runs: int, made: Provenance) -> str:
    """Write the report in Markdown, with the sections that a whole run alone renews."""
    lines = [
        "# Benchmarks",
        "",
        f"`make bench` began this {_of(made)}, on {machine()}.",
        "Everything runs on that one machine: the control plane, both kubelets, Carpool and whoever watches them.",
        "",
        "## The way of a job",
        "",
        f"One job after another on an idle cluster ({runs} runs, one more to warm up). Features are given, the",
        "container is busybox. Seen by a client that watches the API server. The whole must take at most 3 s (median).",
        "",
        "| step | median s | least s | most s |",
        "|---|---|---|---|",
        *(f"| {step} | {mid:.2f} | {low:.2f} | {high:.2f} |" for step, mid, low, high in steps),
        "",
        "## Resident memory",
        "",
        "| process | MiB | at most | |",
        "|---|---|---|---|",
        *(f"| {what} | {found:.0f} | {most:.0f} | {evaluation(found, most)} |" for what, found, most in memories),
        "",
    ]
    return "\n".join(lines)
