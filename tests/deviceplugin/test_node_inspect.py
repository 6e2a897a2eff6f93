"""`carpool node inspect`, over the fake."""

import re
import socket
from pathlib import Path

import pytest
from carpool_core.values import PodUid
from carpool_deviceplugin.cdi.nvidia import NvidiaCdi
from carpool_deviceplugin.devices.gpu import CreateInstance
from carpool_deviceplugin.mig.layout import Placement
from carpool_deviceplugin.node.commands import node as command
from carpool_deviceplugin.node.inspection import inspect_node
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node
from click.testing import CliRunner
from node_world import inspectable, run


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return inspectable(tmp_path)


def test_inspect_says_what_is_there_and_what_is_missing(node: Node) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:3g.20gb", "--apply")
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert "driver 580.95.05, CUDA 13.0" in lines
    assert "GPU 0: NVIDIA A100-SXM4-40GB" in lines
    assert "MIG: on" in lines
    assert "1g.5gb         4,864 MiB, 14 SMs, at {0,1,2,3,4,5,6}:1" in lines
    assert "instance 1 (3g.20gb on memory slices 4-7)  MIG-" in lines
    assert "GPU 1: Tesla T4" in lines
    assert "MIG: not supported" in lines
    assert "missing: NVIDIA's CDI specification" in lines
    assert "nvidia-ctk cdi generate" in lines
    assert "hostPID: true" in lines


class HostEngine:
    """DCGM's, which knows the first GPU."""

    name, is_public = "dcgm", False

    def __init__(self, node: Node) -> None:
        self._uuid = node.nvml.gpus[0].uuid

    def values(self) -> dict:
        return {(self._uuid, None): {"DCGM_FI_PROF_SM_ACTIVE": 0.5}}


def test_inspect_says_where_metrics_come_from(node: Node) -> None:
    node.sources = (HostEngine(node),)
    lines = [line for line in inspect_node(node.devices(), NvidiaCdi([]), node.root) if "metrics:" in line]
    assert ["DCGM's host engine" in lines[0], "no SM activity" in lines[1]] == [True, True]


def test_inspect_says_whose_instances_are_and_whether_they_are_in_use(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    devices.apply(devices.uuids[0], CreateInstance(Placement(profile, 0), PodUid("uid-a")))
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb,2g.10gb", "--apply")
    (larger,) = (n for n, i in node.nvml.gpus[0].mig.instances.items() if i.profile.name == "2g.10gb")
    node.start(0, 42, "x", instance=larger)
    lines = [line for line in inspect_node(node.devices(), NvidiaCdi([]), node.root) if "    instance " in line]
    assert {line.split("(")[1].split()[0]: line.rpartition("  ")[2] for line in lines} == {
        "1g.5gb": "made for pod uid-a, idle",
        "2g.10gb": "made by somebody else, in use",
    }


@pytest.mark.parametrize(("comm", "is_host"), [("kthreadd\n", True), ("pause\n", False)])
def test_the_hosts_processes_are_known_by_the_kernels(node: Node, comm: str, is_host: bool) -> None:
    (node.root / "2").mkdir()
    (node.root / "2" / "comm").write_text(comm)
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert ("the host's PIDs" not in lines) == is_host


def test_inspect_says_who_could_measure_more(node: Node) -> None:
    missing = "missing, for SM activity before Hopper: DCGM's library"
    assert missing in "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    newer = Node(FakeNvml(["H100"]), FakeMpsCommands(), node.root)
    assert missing not in "\n".join(inspect_node(newer.devices(), NvidiaCdi([]), node.root))


def test_inspect_looks_for_the_host_of_daemons_where_there_is_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, there = tmp_path / "nvidia-cuda-mps-control", tmp_path / "s"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # without unshare, which only a process that starts daemons needs
    monkeypatch.setenv("CARPOOL_MPS_HOST", str(there))
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path / "state"))
    inspected = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert f"missing, for mode MPS: the MPS daemons' host at '{there}'; look at the pod carpool-mps" in inspected
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        inspected = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert "for mode MPS" not in inspected
    monkeypatch.delenv("CARPOOL_MPS_HOST")
    assert "unshare on PATH" in CliRunner().invoke(command, ["inspect"], obj=node.nvml).output


def test_inspect_says_what_is_reserved_for_whom(node: Node) -> None:
    lines = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert re.search(r"40,960 MiB \([1-9]\d* the driver's, 256 more kept free\)", lines), lines
    assert "; now no mode set" in lines
