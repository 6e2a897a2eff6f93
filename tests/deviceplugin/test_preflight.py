"""Rows of the preflight, over files of a node and fake GPUs."""

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pynvml
import pytest
from agent_world import World
from carpool_core.kube.api import NODES
from carpool_core.testing.clock import FakeClock
from carpool_deviceplugin.check import CHECKS, check_node, read_all
from carpool_deviceplugin.commands import listening
from carpool_deviceplugin.mps import PROGRAM as MPS_CONTROL
from carpool_deviceplugin.preflight import (
    NO_INFO,
    Directories,
    Host,
    NodeInfo,
    Outcome,
    Verdict,
    check_host,
    check_system,
)
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.status import node_conditions
from carpool_deviceplugin.testing.gpus import HARDWARE
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from node_world import run, verdicts

CDI_2 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n'
CDI_3 = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n"
CDI_OFF = CDI_3 + "enable_cdi = false\n"
SANDBOX = CDI_2.replace("enable_cdi = true", "sandbox_image = 'pause'")
CONFIG, PROGRAM = "etc/containerd/config.toml", "usr/bin/containerd"
UPSTREAM = (
    "#!/bin/sh\necho containerd github.com/containerd/containerd/v2 v2.0.2 c507a0257ea6462fbd6f5ba4f5c74facb04021f4\n"
)
CRIO = "#!/bin/sh\necho crio version 1.31.2\n"
DEBIAN = "#!/bin/sh\necho 'containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6'\n"


def rows(found) -> dict[str, Outcome]:
    by_name = {one.name: one for one in found}
    for one in by_name.values():
        assert one.found
        assert (one.verdict in ("passed", "skipped")) == (not one.needed) == (not one.advice), one
    return by_name


def host_rows(root: Path, runtime: str = "", os_image: str = "") -> dict[str, Outcome]:
    (root / "plugins").mkdir(exist_ok=True)
    info = NodeInfo(container_runtime_version=runtime, os_image=os_image)
    directories = Directories(Path("/var/lib/carpool"), Path("/var/run/cdi"), Path("/plugins"))
    return rows(check_host(Host(root, root / "proc", info), directories))


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755 if path.parent.name == "bin" else 0o644)


@pytest.mark.parametrize(
    ("runtime", "files", "verdict", "message"),
    [
        ("containerd://2.1.4", {}, "passed", "containerd 2.1.4 with CDI"),
        ("containerd://1.7.27-k3s1", {}, "unknown", "CDI off unless its configuration sets enable_cdi"),
        ("containerd://1.7.27", {CONFIG: "version = 2\n"}, "FAILED", "with CDI off; set enable_cdi = true"),
        ("containerd://1.7.27", {CONFIG: CDI_2}, "passed", "with CDI"),
        ("", {CONFIG: CDI_2}, "passed", "containerd with CDI"),
        ("", {CONFIG: CDI_3}, "passed", "containerd 2 with CDI"),
        ("", {CONFIG: "version = 2\n"}, "unknown", "run containerd --version; before version 2, set enable_cdi = true"),
        (
            "",
            {CONFIG: "version = 2\n", PROGRAM: DEBIAN},
            "FAILED",
            "containerd 1.7.24~ds1 with CDI off; set enable_cdi",
        ),
        ("", {CONFIG: "version = 2\n", PROGRAM: UPSTREAM}, "passed", "containerd 2.0.2 with CDI"),
        (
            "",
            {"etc/k0s/containerd.toml": "version = 2\n", "var/lib/k0s/bin/containerd": UPSTREAM, PROGRAM: DEBIAN},
            "passed",
            "containerd 2.0.2 with CDI",
        ),
        (
            "",
            {"var/snap/microk8s/current/args/containerd.toml": CDI_2, PROGRAM: "#!/bin/false\n"},
            "passed",
            "with CDI",
        ),
        ("containerd://2.0.0", {CONFIG: CDI_OFF}, "FAILED", "with CDI off"),
        ("containerd://2.0.0", {CONFIG: CDI_3 + "cdi_spec_dirs = ['/var/cdi']\n"}, "FAILED", "cdi_spec_dirs /var/cdi"),
        ("containerd://2.0.0", {CONFIG: CDI_3 + "cdi_spec_dirs = ['/run/cdi/']\n"}, "passed", "with CDI"),
        (
            "containerd://1.7.27",
            {CONFIG: "imports = ['/etc/containerd/conf.d/*.toml']\n", "etc/containerd/conf.d/99-nvidia.toml": CDI_2},
            "passed",
            "with CDI",
        ),
        ("containerd://1.6.33", {}, "FAILED", "update it to 1.7 or newer"),
        ("cri-o://1.31.2", {}, "passed", "cri-o 1.31.2 with CDI"),
        (
            "cri-o://1.31.2",
            {"etc/crio/crio.conf": "[crio.runtime]\ncdi_spec_dirs = ['/x']\n"},
            "FAILED",
            "nodeAgent.cdi",
        ),
        ("cri-o://1.20.0", {}, "FAILED", "found cri-o 1.20.0; update it to 1.28 or newer"),
        ("", {"etc/crio/crio.conf": ""}, "unknown", "run crio --version; before 1.28, update it"),
        (
            "",
            {"etc/crio/crio.conf": "", "usr/bin/crio": CRIO},
            "passed",
            "cri-o 1.31.2 with CDI",
        ),
        (
            "",
            {CONFIG: "version = 2\n", "etc/crio/crio.conf": "", "usr/bin/crio": CRIO, "proc/9/comm": "crio\n"},
            "passed",
            "cri-o 1.31.2 with CDI",
        ),
        ("cri-o://1.31.2", {CONFIG: CDI_3 + "cdi_spec_dirs = ['/x']\n"}, "passed", "cri-o 1.31.2 with CDI"),
        (
            "containerd://1.7.27-k3s1",
            {CONFIG: CDI_2.replace("true", "false"), "var/lib/rancher/k3s/agent/etc/containerd/config.toml": CDI_2},
            "passed",
            "with CDI",
        ),
        (
            "containerd://1.7.27",
            {CONFIG: "imports = ['conf.d/*.toml']\n" + CDI_2, "etc/containerd/conf.d/99-nvidia.toml": SANDBOX},
            "FAILED",
            "with CDI off",
        ),
        (
            "containerd://2.0.0",
            {CONFIG: "imports = ['conf.d/*.toml']\n" + CDI_OFF, "etc/containerd/conf.d/99-nvidia.toml": CDI_3},
            "FAILED",
            "with CDI off",
        ),
        ("containerd://2.0.0", {CONFIG: "imports = ['../containerd/*.toml']\n" + CDI_3}, "passed", "with CDI"),
        ("containerd://2.0.0", {CONFIG: "imports = ['']\n" + CDI_3}, "unknown", "which cannot be read"),
        ("containerd://2.0.0", {CONFIG: "imports = ['**.toml']\n" + CDI_3}, "unknown", "which cannot be read"),
        (
            "",
            {CONFIG: "[plugins\n"},
            "unknown",
            "found '/etc/containerd/config.toml', which cannot be read: Expected ']'",
        ),
        ("", {CONFIG: "version = '2'\n"}, "unknown", "which cannot be read: Expected `int`, got `str`"),
        ("containerd://2.0.0", {CONFIG: CDI_3 + "cdi_spec_dirs = []\n"}, "FAILED", "cdi_spec_dirs empty; add it there"),
        ("docker://24.0.7", {}, "FAILED", "use containerd 1.7 or newer, or CRI-O"),
        ("", {}, "unknown", "see that containerd 2 or CRI-O runs"),
    ],
)
def test_the_runtime_must_read_cdi(tmp_path: Path, runtime: str, files, verdict: str, message: str) -> None:
    """Regressions: containerd 1.7 has CDI off by default, and silently ignores the device. The file of a runtime that
    does not run decided, a section that an imported file replaces counted, and an invalid file or import was a
    traceback, as was a file that imports itself by another path."""
    write(tmp_path, files)
    row = host_rows(tmp_path, runtime)["container-runtime"]
    assert (row.verdict, message in str(row)) == (verdict, True), row


@pytest.mark.parametrize(
    ("runtime", "verdict"),
    [
        ("containerd://2.1.4", "passed"),
        ("containerd://1.7.27", "unknown"),
        ("containerd://1.6.33", "FAILED"),
        ("cri-o://1.31.2", "passed"),
    ],
)
async def test_in_the_agents_pod_the_nodes_version_of_the_runtime_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, verdict: str
) -> None:
    """containerd 2 and CRI-O have CDI on by default; with containerd 1.7 only the file on the node decides."""
    monkeypatch.setattr(Host, "find", lambda info=NO_INFO: Host(None, tmp_path / "proc", info))
    world = World(tmp_path)
    node = {"metadata": {"name": "n"}, "status": {"nodeInfo": {"containerRuntimeVersion": runtime}}}
    world.kube.seed(NODES, node)
    async with running(world.agent):
        preflight = await until(lambda: next((c for c in world.status.conditions if c.type == "Preflight"), None))
    found = rows(world.agent.reconciler.reporter.preflight)
    assert found["container-runtime"].verdict == verdict
    assert (f"{verdict} container-runtime: " in preflight.message) == (verdict != "passed")
    printed = verdicts(run(world.node, "check").output).keys() - CHECKS
    assert printed == found.keys() == {name for name in found if re.search(rf"\b{name}\b", preflight.message)}


@pytest.mark.parametrize(
    ("label", "enforce", "verdict"),
    [
        ("system_u:system_r:container_t:s0:c1,c2", "1", "FAILED"),
        ("system_u:system_r:container_t:s0:c1,c2", "0", "passed"),
        ("system_u:system_r:spc_t:s0", "1", "passed"),
        ("system_u:system_r:super_t:s0", "1", "passed"),
        ("unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023", "1", "unknown"),
        ("unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023", "0", "passed"),
        ("cri-containerd.apparmor.d (enforce)", "", "passed"),
    ],
)
def test_a_confined_domain_is_reported(tmp_path: Path, label: str, enforce: str, verdict: str) -> None:
    """Regression: root on the node is not confined, so the row passed, but the chart's pods are."""
    write(tmp_path, {"proc/self/attr/current": label + "\n", "sys/fs/selinux/enforce": enforce})
    found = host_rows(tmp_path)["selinux"]
    assert (found.verdict, "set nodeAgent.seLinuxOptions to" in str(found)) == (verdict, verdict != "passed")


@pytest.mark.parametrize(
    ("kthreadd", "user", "capabilities", "lacks"),
    [
        (False, 0, "000001ffffffffff", "the host's PID namespace"),
        (True, 1000, "0000000000000000", "root's rights: its user is 1000"),
        (True, 0, "000001fffeffffff", "capabilities (capsh --decode=1000000 names them)"),
        (True, 0, "000001ffffffffff", "the right to open /proc/1/root"),
    ],
)
def test_a_row_that_needs_the_nodes_files_names_what_the_process_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kthreadd: bool, user: int, capabilities: str, lacks: str
) -> None:
    """Regression: root without some capabilities read the advice to be root with all of them."""
    status = f"Name:\tcarpool\nCapEff:\t{capabilities}\n"
    (tmp_path / "1").mkdir()
    (tmp_path / "1/status").write_text("CapEff:\t000001ffffffffff\n")
    write(tmp_path, {"self/status": status, "2/comm": "kthreadd\n" if kthreadd else "sleep\n"})
    monkeypatch.setattr(os, "geteuid", lambda: user)
    advice = f"run carpool node check as root on the node; this process lacks {lacks}"
    assert check_system(Host(None, tmp_path)).advice.startswith(advice)


@pytest.mark.parametrize("there", [False, True], ids=["absent", "mounted"])
def test_directories_that_are_not_mounted_are_unknown(tmp_path: Path, there: bool) -> None:
    """Regression: without a view of the node, directories that were to be created there passed, and no plugins did."""
    directories = Directories(tmp_path / "state", tmp_path / "cdi", tmp_path / "plugins")
    for path in (directories.state, directories.cdi, directories.device_plugins):
        path.mkdir() if there else None
    found = rows(check_host(Host(None, tmp_path / "proc"), directories))
    for name in ("directories", "device-plugins"):
        assert found[name].verdict == ("passed" if there else "unknown"), found[name]
    host = Host(tmp_path, tmp_path / "proc")
    plugins = rows(check_host(host, Directories(Path("/state"), Path("/cdi"), Path("/kubelet/plugins"))))[
        "device-plugins"
    ]
    assert (plugins.verdict, plugins.advice.startswith("set CARPOOL_DEVICE_PLUGIN_DIR")) == ("unknown", True)


@pytest.mark.parametrize(
    ("os_image", "verdict", "message", "offered"),
    [
        ("Talos (v1.11.0)", "passed", "Talos (v1.11.0)", "directories below /run or /var; set nodeAgent.cdiDir to"),
        (
            "Bottlerocket OS 1.49.0 (aws-k8s-1.33-nvidia)",
            "passed",
            "Bottlerocket OS 1.49.0",
            "directories below /etc, /run or /var, of which only /var outlasts a restart",
        ),
        (
            "Container-Optimized OS from Google",
            "FAILED",
            "Container-Optimized OS, found Container-Optimized OS from Google; use nodes of another one, and leave",
            "directories below /etc, /run or /var, of which only /var outlasts a restart",
        ),
        ("Ubuntu 24.04.3 LTS", "passed", "Ubuntu 24.04.3 LTS", "set another that is not read-only"),
        ("", "unknown", "not visible here; run carpool node check as root", "set another that is not read-only"),
    ],
)
def test_each_operating_system_and_its_writable_directories_are_rows(
    tmp_path: Path, os_image: str, verdict: str, message: str, offered: str
) -> None:
    """Regression: Container-Optimized OS was named only where a directory could not be written to."""
    found = check_system(Host(None, info=NodeInfo(os_image=os_image)))
    assert (found.verdict, message in str(found)) == (verdict, True)
    assert host_rows(tmp_path, os_image=os_image)["directories"].verdict == "passed"
    write(tmp_path, {"var/lib": ""})  # a file: no directory can be created in it
    row = host_rows(tmp_path, os_image=os_image)["directories"]
    assert "found CARPOOL_STATE_DIR '/var/lib/carpool'; " in str(row)
    assert offered in str(row)


@pytest.mark.parametrize("is_hosted", [False, True], ids=["agent", "carpool-mps"])
def test_the_mps_program_must_be_that_of_the_driver(tmp_path: Path, monkeypatch, is_hosted: bool) -> None:
    """A container that outlives an upgrade of the driver keeps the old program."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    settings = AgentSettings(state_dir=tmp_path, mps_host=str(tmp_path / "sock") if is_hosted else "")
    devices = Node(FakeNvml(["T4"]), FakeMpsCommands(), tmp_path).devices()
    for version, message in (
        ("580.95.05", "nvidia-cuda-mps-control 580.95.05"),
        ("", "nvidia-cuda-mps-control without a version"),
        ("550.163.01", "expected nvidia-cuda-mps-control of driver 580.95.05, found 550.163.01, whose servers"),
    ):
        write(tmp_path, {f"bin/{MPS_CONTROL}": f"GLIBC_2.34\0{version}\0001.2.3"})
        with listening(tmp_path / "sock", tmp_path) if is_hosted else nullcontext():
            if is_hosted:
                write(tmp_path, {f"bin/{MPS_CONTROL}": "\000535.261.03\0"})
            row = rows(check_node(devices, settings, Host(None, tmp_path / "proc")))["mps-program"]
        assert (row.verdict, str(row).startswith(message)) == ("missing" if "; " in str(row) else "passed", True), row


def test_any_other_sentence_is_what_was_found(tmp_path: Path) -> None:
    devices = Node(FakeNvml(["T4"]), FakeMpsCommands(), tmp_path).devices()
    devices.mps_missing = "its file\nis broken"
    found = check_node(devices, AgentSettings(state_dir=tmp_path), Host(None, tmp_path / "proc"))
    row = next(one for one in found if one.name == "mps-program")
    assert (row.verdict, str(row)) == (Verdict.MISSING, devices.mps_missing)


def test_other_programs_that_assign_gpus_are_reported(tmp_path: Path) -> None:
    assert host_rows(tmp_path)["device-plugins"].verdict == "passed"
    write(tmp_path, {"proc/7/comm": "gpu-kubelet-plu\n"})
    assert "gpu-kubelet-plugin (NVIDIA's DRA driver)" in str(host_rows(tmp_path)["device-plugins"])


def old_driver(node: Node) -> None:
    node.nvml.driver_version = "535.288.01"


def not_persistent(node: Node) -> None:
    node.nvml.gpus[0].is_persistent = False


def foreign(node: Node) -> None:
    node.start(0, 42, None)


def hidden(node: Node) -> None:
    """The second GPU's device file is not in the container."""
    node.nvml.gpus += [node.nvml._made(1, HARDWARE["T4"])]
    node.nvml.fail_next("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION)


def display(node: Node) -> None:
    """An X server, and a renderer in a pod, which the pod's reservation counts."""
    node.start(0, 51, None)
    node.start(0, 52, "a")
    for pid in (51, 52):
        del node.nvml.gpus[0].processes[pid]
    node.nvml.gpus[0].graphics_pids += [51, 52, 4_000_000]


def contained(node: Node) -> None:
    (node.root / "proc/2/comm").write_text("sleep\n")


def lost(node: Node) -> None:
    node.nvml.gpus += [node.nvml._made(1, HARDWARE["T4"])]
    node.nvml.fail_next("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST)


def prohibited(node: Node) -> None:
    node.nvml.gpus[0].compute_mode = pynvml.NVML_COMPUTEMODE_PROHIBITED


def leaked(node: Node) -> None:
    """Memory that a process left in the driver."""
    node.nvml.gpus[0].leaked_mib = 20_480


def pending(node: Node) -> None:
    node.nvml.gpus[0].mig.is_pending = True


def manager(node: Node) -> None:
    write(node.root, {"proc/9/comm": "nvidia-mig-mana\n"})


def exporter(node: Node) -> None:
    write(node.root, {"proc/9/comm": "dcgm-exporter\n"})


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (old_driver, "driver", "expected driver 550 or newer for MPS, found 535.288.01"),
        (contained, "host-pids", "found another PID namespace; run with hostPID: true"),
        (
            lost,
            "gpus",
            "then restart the agent); repair them, then restart the agent; until then it uses the others",
        ),
        (prohibited, "compute-mode", "found Prohibited on GPU 0; allow several programs: nvidia-smi -i INDEX -c 0"),
        (not_persistent, "persistence", "found off on GPU 0; run nvidia-persistenced"),
        (hidden, "device-files", "found none of GPU 0; set nodeAgent.visibleDevices to management.nvidia.com/gpu=all"),
        (display, "graphics", "found GPU 0: process 51 (python (3)); stop the display manager"),
        (foreign, "processes", "found GPU 0: process 42 (python (3)); end it"),
        (pending, "mig-state", "GPU 0 changes its MIG mode at its reset"),
        (leaked, "memory", "found 20,480 MiB in use on GPU 0; free it: nvidia-smi -i INDEX --gpu-reset"),
        (manager, "mig-state", "found nvidia-mig-manager, which runs on the node"),
        (exporter, "dcgm-exporter", "found a running dcgm-exporter whose URL is not set"),
    ],
)
def test_a_row_about_the_gpus_names_what_to_do(tmp_path: Path, change, name: str, message: str) -> None:
    node, settings = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path), AgentSettings()
    write(tmp_path, {"proc/2/comm": "kthreadd\n"})
    found = []
    for step in (lambda _: None, change):
        step(node)
        devices = node.devices()
        read_all(devices)
        found.append(rows(check_node(devices, settings, Host(None, tmp_path / "proc")))[name])
    verdict = "FAILED" if name == "host-pids" else "missing"
    assert (found[0].verdict in ("passed", "skipped"), found[1].verdict) == (True, verdict)
    assert message in str(found[1])
    assert found[0].found != found[1].needed.partition(",")[0], "a requirement is not a finding"


@pytest.mark.parametrize(
    ("change", "name"), [(foreign, "processes"), (leaked, "memory"), (pending, "mig-state"), (exporter, "sm-activity")]
)
def test_a_fact_that_was_not_read_yet_is_unknown(tmp_path: Path, change, name: str) -> None:
    """Regression: before the first reading, the rows passed."""
    node = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path)
    if change is not pending:
        change(node)
    devices, settings, host = node.devices(), AgentSettings(), Host(None, tmp_path / "proc")
    before = rows(check_node(devices, settings, host))[name]
    assert (before.verdict, before.found) == ("unknown", "GPU 0 not read yet")
    read_all(devices)
    assert rows(check_node(devices, settings, host))[name].verdict != "unknown"


async def test_the_agent_checks_again_after_its_first_reading(tmp_path: Path) -> None:
    """Regression: a process outside of pods was a row two minutes later."""
    world = World(tmp_path, Intervals(preflight_s=1e9))
    foreign(world.node)
    async with running(world.agent):
        found = await until(
            lambda: next((c for c in world.status.conditions if "missing processes" in c.message), None)
        )
    assert "GPU 0: process 42" in found.message


DEFAULT_FIELDS = ("DEV_GPU_UTIL", "DEV_FB_USED", "DEV_POWER_USAGE")
"""Some of dcgm-exporter's, which has no SM activity by default."""


@pytest.mark.parametrize(
    ("fields", "exporter", "activity"),
    [
        ((), "missing: expected the fields of dcgm-exporter, found a page without them", "missing"),
        (DEFAULT_FIELDS, "passed: 3 fields, without DCGM_FI_DEV_", "missing"),
        ((*DEFAULT_FIELDS, "PROF_SM_ACTIVE"), "passed: 4 fields, without DCGM_FI_DEV_", "passed"),
    ],
    ids=["none", "default", "with-activity"],
)
def test_the_fields_of_dcgm_exporter_are_a_row(tmp_path: Path, fields, exporter: str, activity: str) -> None:
    class Page:
        name, is_scraped = "dcgm-exporter", True

        def values(self):
            return {(devices.uuids[0], None): {f"DCGM_FI_{field}": 1.0 for field in fields}}

    devices = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path, sources=(Page(),)).devices()
    read_all(devices)
    settings = AgentSettings(dcgm_exporter="http://localhost:9400/metrics")
    found = rows(check_node(devices, settings, Host(None, tmp_path / "proc")))
    row = found["dcgm-exporter"]
    assert f"{row.verdict}: {row}".startswith(exporter)
    assert found["sm-activity"].verdict == activity


def test_the_condition_has_all_rows(tmp_path: Path) -> None:
    skipped = Outcome(name="x", verdict=Verdict.SKIPPED, found="none")
    found = [*host_rows(tmp_path, "containerd://1.6.33").values(), skipped]
    *_, condition = node_conditions([], (), "", (), FakeClock().now(), found)
    assert (condition.type, condition.status, condition.reason) == ("Preflight", "False", "RequirementMissing")
    passed = "passed: selinux, directories, device-plugins. skipped: x"
    assert condition.message == f"FAILED container-runtime: {found[0]}. {passed}"
