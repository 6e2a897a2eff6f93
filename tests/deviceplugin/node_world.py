"""A node for the commands of `carpool node`."""

from pathlib import Path

from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml
from click.testing import CliRunner, Result


def inspectable(directory: Path) -> Node:
    """An A100 on which MIG is switched on, and a T4."""
    found = Node(FakeNvml(["A100-40", "T4"]), FakeMpsCommands(), directory)
    found.nvml.gpus[0].mig.is_enabled = found.nvml.gpus[0].mig.is_pending = True
    return found


def run(node: Node, *arguments: str) -> Result:
    """Run a command beside a new agent's eyes."""
    return CliRunner().invoke(command, list(arguments), obj=node.devices())
