"""A node for the commands of `carpool node`."""

from pathlib import Path

from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.preflight import Verdict
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml
from click.testing import CliRunner, Result


def inspectable(directory: Path) -> Node:
    """An A100 on which MIG is switched on, and a T4."""
    found = Node(FakeNvml(["A100-40", "T4"]), FakeMpsCommands(), directory)
    found.nvml.gpus[0].mig.is_enabled = found.nvml.gpus[0].mig.is_pending = True
    return found


def verdicts(printed: str) -> dict[str, str]:
    """Read the table of `carpool node check`: verdict by name of the row; there is one of each name."""
    rows = [line.split()[:2] for line in printed.splitlines() if line.partition(" ")[0] in {*Verdict}]
    found = {name: verdict for verdict, name in rows}
    assert len(found) == len(rows), printed
    failed = sum(verdict not in ("passed", "skipped") for verdict in found.values())
    assert printed.count(" needed:     ") == printed.count(" what to do: ") == failed, printed
    return found


def run(node: Node, *arguments: str) -> Result:
    """Run a command beside a new agent's eyes."""
    return CliRunner().invoke(command, list(arguments), obj=node.devices())
