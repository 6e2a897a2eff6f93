"""A cluster of kind: when it is the way to go, how it comes up, and how it is removed."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from carpool_e2e import binaries
from carpool_e2e.chart import PROJECT
from carpool_e2e.cluster import FULL
from carpool_e2e.errors import HarnessError, MissingError
from carpool_e2e.kind.commands import Command, CommandError, Commands
from carpool_e2e.kind.render import NEEDS, Need, Plan, cluster_name
from carpool_e2e.tools import CONTROL_PLANE_TOOLS, MODULES, NODE_TOOLS, parse_version
from carpool_e2e.workloads.pod import environment_paths

FOLDER = PROJECT / "out" / "kind"
"""Where the cluster's kubeconfig and lock are."""


def plan(folder: Path = FOLDER) -> Plan:
    """Return this user's cluster for this checkout: the nodes of the harness that have a kubelet, and no others."""
    return Plan(cluster_name(os.getuid()), folder / "kubeconfig", FULL.kubelet_nodes, environment_paths())


def out_of_reach(environ: Mapping[str, str]) -> list[str]:
    """Return the binaries of the harness that are nowhere and cannot be built, because there is no Go."""
    if shutil.which("go", path=environ.get("PATH", os.defpath)):
        return []
    wanted = CONTROL_PLANE_TOOLS | NODE_TOOLS
    tools = [(tool, module) for module in MODULES for tool in module.tools if tool.name in wanted]
    return [tool.name for tool, module in tools if binaries.find(tool, module, environ) is None]


def lacking(commands: Commands) -> list[str]:
    """Return what kind's cluster needs and this machine lacks, a sentence each."""
    found = [] if sys.platform == "linux" else [f"Linux, whose Python the containers see; found {sys.platform}"]
    return [*found, *(sentence for need in NEEDS if (sentence := _lacks(commands, need)))]


def _lacks(commands: Commands, need: Need) -> str:
    at_least = ".".join(map(str, need.at_least))
    wanted = f"{need.program} {at_least} or later ({need.why})"
    try:
        printed = commands.capture(Command((need.program, *need.ask)))
    except CommandError as error:
        return f"{wanted}; found: {error}"
    version = parse_version(printed)
    return "" if version and version >= need.at_least else f"{wanted}; found {printed.strip() or 'no version'}"


def require(commands: Commands, binaries_missing: list[str]) -> None:
    """Make sure that kind can stand in for the binaries.

    Raises:
        MissingError: It cannot; the message says what of either way is missing.
    """
    if missing := lacking(commands):
        raise MissingError(
            f"{', '.join(binaries_missing)}: expected on PATH or under KUBEBUILDER_ASSETS, found neither. Install Go "
            "to build them (https://go.dev/dl, 1.26 or later), or what a cluster of kind needs:\n  "
            + "\n  ".join(missing)
        )


@dataclass
class KindCluster:
    """A running cluster."""

    plan: Plan
    kept: bool = False
    """Whether it outlives the `with` block."""


@contextmanager
def running(commands: Commands, plan: Plan, console: Console) -> Iterator[KindCluster]:
    """Run a cluster of kind for the duration of a `with` block; one that an earlier run left is replaced.

    Raises:
        HarnessError: A step failed, or another process has the cluster. Nothing but the images is left.
    """
    plan.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    with _held(plan.kubeconfig.parent) as free:
        if not free:
            raise HarnessError(f"kind's cluster {plan.name} is in use by another process; end that one first")
        _remove(commands, plan)
        cluster = KindCluster(plan)
        try:
            _up(commands, plan, console)
            yield cluster
        finally:
            if not cluster.kept:
                _remove(commands, plan)


def clean(commands: Commands, plan: Plan) -> bool:
    """Remove the cluster of an earlier run, and return whether there was one; one that is in use stays.

    The images stay in Docker, whose cache they are.

    Raises:
        CommandError: There may be one, but kind does not answer.
    """
    with _held(plan.kubeconfig.parent) as free:
        try:
            return free and _remove(commands, plan)
        except CommandError:
            if plan.kubeconfig.exists():
                raise
            return False  # no kind, or no engine, and no cluster was ever made from here


def _up(commands: Commands, plan: Plan, console: Console) -> None:
    for build in plan.builds():
        console.print(f"$ {build}", highlight=False, markup=False)
        commands.run(build)
    console.print(f"Starting kind's cluster {plan.name} with {len(plan.gpus)} workers")
    commands.run(plan.create())
    commands.run(plan.load())
    scheduler = commands.capture(plan.ask_scheduler()).strip()
    commands.run(plan.install(scheduler))
    for label in [*plan.gpus][1:]:
        commands.run(plan.apply_agents(commands.capture(plan.render_agents(scheduler, label)), label))
        commands.run(plan.wait_for_agents(label))


def _remove(commands: Commands, plan: Plan) -> bool:
    there = plan.name in commands.capture(Command(("kind", "get", "clusters"))).split()
    if there:
        commands.run(plan.delete())
    plan.kubeconfig.unlink(missing_ok=True)
    return there


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the cluster's lock; false where another process does. Without the folder nobody does, and none is made."""
    if not folder.exists():
        yield True
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
