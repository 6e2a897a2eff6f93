"""`python -m carpool_e2e.house`: size of the code, and the files that a filter and a bind enter.

Counts Python files and lines without tests, research and generated code, modules with one importer and fewer than 60
lines, and the product files that a request enters in the extender, on a Kubernetes API in memory.

A request's files are those that its own call path enters, and the tasks that it starts: an asyncio task inherits the
context in which it is created. Watches, the queue's passes and the garbage collection run in contexts of their own.
They run during a bind, too, but they are not part of it, so they are not counted.
"""

import ast
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import msgspec
from carpool_core.kube.pods import Pod
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.app import Extender, build
from carpool_extender.extender_api import BindingArgs, ExtenderArgs
from carpool_extender.settings import ExtenderSettings
from carpool_extender.testing import FakeAgent, gpu_node, pod_of, seed_job, seed_node, seed_pod
from rich.console import Console
from rich.table import Table

from carpool_e2e.chart import PROJECT

SMALL_LINES = 60
NODES = ("a", "b")


def product_files() -> list[Path]:
    """Return the product's Python files, relative to the repository."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    files = (Path(name) for name in listed.split())
    return [f for f in files if f.parts[0] not in ("tests", "research") and "_pb2" not in f.name]


def lines_of(file: Path) -> int:
    """Return the number of lines of a file."""
    return len((PROJECT / file).read_text(encoding="utf-8").splitlines())


def small_modules(files: list[Path]) -> list[Path]:
    """Return modules with one importer and fewer than 60 lines."""
    module_of = {".".join(f.with_suffix("").parts[1:]): f for f in files}
    importers: Counter[Path] = Counter()
    for file in files:
        found = set()
        for node in ast.walk(ast.parse((PROJECT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        importers.update({module_of[name] for name in found if name in module_of} - {file})
    plain = (f for f in files if not f.name.startswith("__"))
    return [f for f in plain if importers[f] == 1 and lines_of(f) < SMALL_LINES]


IS_TRACED: ContextVar[bool] = ContextVar("IS_TRACED", default=False)
"""Whether the running task belongs to the traced request."""


class Trace:
    """Files of the product that the traced request enters, and the moves between them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call."""
        if event != "call" or not IS_TRACED.get():
            return
        name = frame.f_code.co_filename
        if "/carpool_" in name and "/testing" not in name and "carpool_e2e" not in name:
            self.files.add(name)
            self.moves += name != self._last
            self._last = name


async def traced(work: Callable[[], Awaitable[object]]) -> Trace:
    """Run some work and return the product files that it entered."""
    trace = Trace()
    token = IS_TRACED.set(True)
    sys.setprofile(trace)
    try:
        await work()
    finally:
        sys.setprofile(None)
        IS_TRACED.reset(token)
    return trace


def asked(job: str) -> ExtenderArgs:
    """Return kube-scheduler's request about a job's pod."""
    return ExtenderArgs(pod=msgspec.convert(pod_of(job), Pod), node_names=list(NODES))


def binding(job: str) -> BindingArgs:
    """Return kube-scheduler's request to bind a job's pod."""
    return BindingArgs(pod_name=f"{job}-worker-0-1", pod_namespace="default", pod_uid=f"pod-{job}", node=NODES[0])


async def hops() -> dict[str, Trace]:
    """Measure a warm filter that fits, one that is refused, and a warm bind beside a tenant."""
    clock = FakeClock()
    kube = FakeKube(clock)
    agent = FakeAgent(kube)
    for node in NODES:
        seed_node(kube, gpu_node(node, 1))
    for job in ("fits", "again", "refused"):
        seed_job(kube, job, spec={"memory": {"limit": "400Gi"}} if job == "refused" else {})
        seed_pod(kube, job)
    parts: Extender = build(ExtenderSettings(), kube, clock, clock.sleep, gather_s=0)
    running = [asyncio.create_task(parts.run()), asyncio.create_task(agent.serve(NODES[0]))]
    try:
        await parts.informers.wait_synced()
        verbs = parts.service
        for job in ("fits", "refused"):
            await verbs.filter(asked(job))
        measured = {
            "filter that fits": await traced(lambda: verbs.filter(asked("fits"))),
            "refused filter": await traced(lambda: verbs.filter(asked("refused"))),
        }
        first = await verbs.bind(binding("fits"))
        assert not first.error, first.error
        await verbs.filter(asked("again"))
        return measured | {"bind": await traced(lambda: verbs.bind(binding("again")))}
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    """Print both tables."""
    console, files = Console(), product_files()
    sizes = Table(
        "package", "files", "lines", title="Product Python (with e2e, without tests, research, generated code)"
    )
    for package in sorted({f.parts[0] for f in files}):
        mine = [f for f in files if f.parts[0] == package]
        sizes.add_row(package, str(len(mine)), f"{sum(map(lines_of, mine)):,}")
    sizes.add_row("all", str(len(files)), f"{sum(map(lines_of, files)):,}")
    small = small_modules(files)
    console.print(sizes)
    console.print(f"modules with one importer and fewer than {SMALL_LINES} lines: {len(small)}", *map(str, small))
    entered = Table("request", "files entered", "moves between them")
    for name, trace in asyncio.run(hops()).items():
        entered.add_row(name, str(len(trace.files)), str(trace.moves))
    console.print(entered)


if __name__ == "__main__":
    main()
