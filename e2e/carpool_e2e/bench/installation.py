"""Installation: the command by pip, the chart until a first job runs, and the first page of the board."""

import asyncio
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from carpool_core.resources.node import GpuNode, Tenant
from carpool_extender.testing import gpu_node, tenant
from playwright.async_api import async_playwright
from rich.console import Console

from carpool_e2e.bench.measure import Figure, Section
from carpool_e2e.bench.paper import PaperApi, PaperCluster, write_kubeconfig
from carpool_e2e.binaries import FOR_BROWSER, install_packages
from carpool_e2e.chart import CHART, NAMESPACE, PROJECT, RELEASE
from carpool_e2e.cluster import PODS, carpool_command, running
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.errors import MissingError

PEER = "kubernetes<36"
"""The official client of Kubernetes, the largest dependency by files, which the command needs for kubeconfigs."""
RECENT_PIP = "pip>=25"
"""Older ones take two to three times as long to choose packages, so the documents begin with it."""
RUNS = 3
NODES, GPUS, TENANTS = 625, 8, 3
"""Nodes of the board's cluster, GPUs of each, tenants of each GPU."""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def measure(report: Callable[[str], None], console: Console) -> Section:
    """Measure one after another; only the chart needs a cluster."""
    figures = [*_installations(), _first_job(console), _first_paint(console)]
    for figure in figures:
        report(f"{figure.what}: {figure}")
    text = (
        "The wheel with `[cli]`, and the official client alone, into a new virtual environment, in turns; medians of "
        f"{RUNS} runs without pip's cache. The time includes `pip install '{RECENT_PIP}'`, with which the "
        "[documents](kubectl.md#install-it) begin, except in the rows of Python's own pip. `helm install` on one node "
        "that has the images; the job is created right after it. The board's first page in a headless Chromium, opened "
        f"anew {RUNS} times: {NODES * GPUS:,} GPUs with {TENANTS} tenants each."
    )
    return Section("Installation", text, figures)


def _installations() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip(sys.executable, "wheel", "--no-deps", f"--wheel-dir={folder}", str(PROJECT))
        requirement = f"{next(folder.glob('*.whl'))}[cli]"
        pip(sys.executable, "download", f"--dest={folder / 'fetched'}", requirement)
        ways = {"ours": (RECENT_PIP, requirement), "peer": (RECENT_PIP, PEER), "own pip": (requirement,)}
        took = [{way: _install(folder / way, *ways[way]) for way in ways} for _ in range(RUNS)]
        fetched_mb, size_mb = _size_mb(folder / "fetched"), took[0]["ours"][2]
        own = subprocess.run([folder / "own pip/bin/pip", "--version"], capture_output=True, text=True, check=True)
    medians = {way: [median(run[way][at] for run in took) for at in (0, 1)] for way in ways}
    (ours_s, ours_cpu_s), (peer_s, peer_cpu_s), (own_s, own_cpu_s) = medians.values()
    own_pip = " ".join(own.stdout.split()[:2])
    return [
        Figure("`carpool[cli]` by pip, packages to fetch", fetched_mb, "MB", at_most=60),
        Figure("`carpool[cli]` by pip, on disk", size_mb, "MB"),
        Figure("`carpool[cli]` by pip", ours_s, "s", at_most=20),
        Figure("`carpool[cli]` by pip, processor time", ours_cpu_s, "s"),
        Figure(f"`carpool[cli]` by Python's own {own_pip}", own_s, "s", at_most=20),
        Figure(f"`carpool[cli]` by Python's own {own_pip}, processor time", own_cpu_s, "s"),
        Figure(f"`{PEER}` by pip", peer_s, "s"),
        Figure(f"`{PEER}` by pip, processor time", peer_cpu_s, "s"),
    ]


def _install(folder: Path, *requirements: str) -> tuple[float, float, float]:
    """Install into a new environment; return time and processor time in s, and the last requirement's size in MB."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    before_s, began = _children_s(), time.perf_counter()
    for requirement in requirements:
        before_mb = _size_mb(packages)
        pip(str(folder / "bin" / "python"), "install", "--no-cache-dir", requirement)
    return time.perf_counter() - began, _children_s() - before_s, _size_mb(packages) - before_mb


def pip(python: str, *arguments: str) -> None:
    """Run a Python's pip.

    Raises:
        MissingError: It failed, as it does without a package index.
    """
    command = [python, "-m", "pip", *arguments, "--quiet"]
    environment = {**os.environ, "PIP_RETRIES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        (reason, *_) = re.findall(r"ERROR: (.*)", done.stderr) or [done.stderr.strip()]
        raise MissingError(
            f"expected that pip installs packages, found: {reason}. It needs a package index, which "
            "PIP_INDEX_URL may name; the option --only measures another section"
        )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def _first_job(console: Console) -> Figure:
    with running(PODS, console) as cluster:
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        values = f"global.imageRegistry=localhost,nodeAgent.simulatedGpus={PODS.kubelet_nodes['a100']}"
        command = [cluster.binaries["helm"], "install", RELEASE, str(CHART), f"--set={values}"]
        began = time.perf_counter()
        subprocess.run([*command, f"--namespace={NAMESPACE}", "--create-namespace"], env=environment, check=True)
        cluster.apply(sleeper("first"))
        cluster.kubectl("wait", "gtj/first", "--for=condition=Running", "--timeout=300s", timeout_s=310)
        return Figure("`helm install` to the first job running", time.perf_counter() - began, "s", at_most=60)


def full_nodes() -> list[GpuNode]:
    """Return nodes whose GPUs each have tenants with measured use."""
    made = []
    for number in range(NODES):
        name = f"node-{number:03}"
        node = gpu_node(name, GPUS, resource_version="1")
        held = [tenant(f"j{number}-{gpu}-{at}", [f"GPU-{name}-{gpu}"]) for gpu in range(GPUS) for at in range(TENANTS)]
        used = [
            Tenant(pod_uid=one.pod_uid, gpu_uuid=one.gpu_uuids[0], memory_mib=3000, peak_memory_mib=3200,
                   gpu_util_percent=40.0, sm_active_ratio=0.27, settled=True)
            for one in held
        ]  # fmt: skip
        replace = msgspec.structs.replace
        made.append(
            replace(node, spec=replace(node.spec, reservations=held), status=replace(node.status, tenants=used))
        )
    return made


def _first_paint(console: Console) -> Figure:
    install_packages(FOR_BROWSER, console)
    paints_s = asyncio.run(_paints_s())
    return Figure(f"first paint of the board, {NODES * GPUS:,} GPUs", median(paints_s), "s", at_most=1)


async def _paints_s() -> list[float]:
    api = PaperApi(PaperCluster(full_nodes(), [], [], []))
    with tempfile.TemporaryDirectory() as name:
        async with api.serve() as port, async_playwright() as playwright:
            access = await asyncio.to_thread(write_kubeconfig, Path(name), port)
            command = [carpool_command(), "board", f"--kubeconfig={access}", "--port=0"]
            board = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert board.stdout is not None
            address = (await board.stdout.readline()).decode().split()[4]  # "the board is at ADDRESS until Ctrl-C"
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            paints_s = []
            for _ in range(1 + RUNS):
                page = await browser.new_page(viewport={"width": 1200, "height": 800})
                await page.goto(address)
                await page.get_by_text("node-024").wait_for()
                paints_s.append(await page.evaluate(FIRST_PAINT) / 1e3)
                await page.close()
            await browser.close()
            board.terminate()
            await board.wait()
    return paints_s[1:]  # the first warms up
