"""`carpool agent` and `carpool node`: settings, refusals, inspection, and hostile input."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pynvml
import pytest
from agent_world import agent_on, first_gpu, registry_of, reserve_on
from carpool_core.resources.node import NvmlFigures
from carpool_core.settings import InputError
from carpool_core.testing.kube import FakeKube
from carpool_core.values import PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.app import build, find_devices
from carpool_deviceplugin.commands import agent, inspect_node, listening
from carpool_deviceplugin.commands import node as command
from carpool_deviceplugin.gpu import Access, CreateInstance, NoDevicesError
from carpool_deviceplugin.mig import Placement
from carpool_deviceplugin.mig_instances import read_mig_devices
from carpool_deviceplugin.preflight import Host
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Flow, Node, running, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.timeouts import Intervals
from click.testing import CliRunner, Result
from node_world import inspectable, run
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "CARPOOL_NODE_NAME: expected the name of this Node, found nothing; set it"),
        ({"node_name": "N/../x"}, "CARPOOL_NODE_NAME: expected the name of this Node, found 'N/../x'; set it"),
        ({"node_name": "n" * 254}, r"CARPOOL_NODE_NAME: .*\(254 characters\); set it"),
        ({"node_name": "a-.b"}, "CARPOOL_NODE_NAME: expected the name of this Node, found 'a-.b'"),
        ({"node_name": "10-0-0-1.eu-1.compute.internal"}, "expected libnvidia-ml.so.1, found none"),
        ({"node_name": "n"}, "expected libnvidia-ml.so.1, found none.*set CARPOOL_SIMULATED_GPUS"),
        ({"node_name": "n", "simulated_gpus": "Banana:1"}, "CARPOOL_SIMULATED_GPUS: GPU product 'Banana' is unknown"),
    ],
)
def test_settings_without_usable_gpus_are_refused_and_nothing_is_written(tmp_path, settings, message) -> None:
    with pytest.raises(NoDevicesError, match=message):
        find_devices(AgentSettings(**settings, state_dir=tmp_path / "state"))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("simulated", ["", "Tesla T4:1"], ids=["hardware", "simulated"])
def test_state_directory_that_cannot_be_written(tmp_path, simulated) -> None:
    """Regression: with hardware the agent started, and each step failed on its own."""
    (tmp_path / "state").write_text("a file")
    settings = AgentSettings(node_name="n", simulated_gpus=simulated, state_dir=tmp_path / "state")
    message = r"^CARPOOL_STATE_DIR: expected a directory to write to at '.*/state', found (Not a|File).*; set another$"
    with pytest.raises(NoDevicesError, match=message):
        find_devices(settings, FakeNvml(["T4"]))


KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {token: x}}]
"""


def begin(tmp_path: Path, *arguments: str, kubeconfig: str = KUBECONFIG) -> Result:
    (tmp_path / "kubeconfig").write_text(kubeconfig)
    return CliRunner().invoke(
        agent,
        ["--node-name", "n", "--kubeconfig", str(tmp_path / "kubeconfig"), *arguments],
        env={
            "CARPOOL_SIMULATED_GPUS": "Tesla T4:1",
            "CARPOOL_STATE_DIR": str(tmp_path / "state"),
            "CARPOOL_CDI_DIR": str(tmp_path / "cdi"),
        },
    )


def test_a_port_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    """Regression: it was a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = begin(tmp_path, "--metrics-port", str(port))
    expected = f"Error: CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {port}: "
    assert (found.exit_code, found.output.startswith(expected)) == (2, True), found.output
    assert "address already in use" in found.output
    assert found.output.endswith("; set another\n")


NO_DIRECTORY = "Error: CARPOOL_CDI_DIR: expected a directory to write to at '/.*found {}"


@pytest.mark.parametrize(
    ("arguments", "kubeconfig", "expected"),
    [
        pytest.param(["--metrics-port", "99999"], KUBECONFIG, "a number from 0 to 65535, found 99999$", id="port"),
        pytest.param(["--slots-per-gpu", "49"], KUBECONFIG, "a number from 1 to 48, found 49$", id="slots"),
        pytest.param(["--cdi-dir", "/proc/x"], KUBECONFIG, NO_DIRECTORY.format("No such"), id="no new directory"),
        pytest.param(["--cdi-dir", "/proc"], KUBECONFIG, NO_DIRECTORY.format("No such"), id="no new file"),
        pytest.param(["--cdi-dir", "/dev/null/x"], KUBECONFIG, NO_DIRECTORY.format("Not a directory"), id="no parent"),
        pytest.param([], "", "Error: .*kubeconfig", id="empty kubeconfig"),
        pytest.param([], "no: config", "Error: .*kubeconfig", id="kubeconfig without clusters"),
    ],
)
def test_an_unusable_setting_is_a_sentence(
    tmp_path: Path, arguments: list[str], kubeconfig: str, expected: str
) -> None:
    """Regression: with an unusable CDI directory the agent started, and no container ever did."""
    found = begin(tmp_path, *arguments, kubeconfig=kubeconfig)
    assert found.exit_code == 2, found.output
    assert re.search(expected, found.output.splitlines()[-1]), found.output


def test_agent_waits_for_an_absent_api_server(tmp_path: Path) -> None:
    """Each warning and /readyz report it; a restart would not help."""
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    variables = {"NODE_NAME": "n", "SIMULATED_GPUS": "Tesla T4:1", "KUBELET": "false", "METRICS_PORT": "0"}
    environment = {f"CARPOOL_{name}": value for name, value in variables.items()}
    environment["CARPOOL_STATE_DIR"] = str(tmp_path / "state")
    with subprocess.Popen(
        [Path(sys.executable).with_name("carpool"), "agent"],
        env={**os.environ, **environment, "KUBECONFIG": str(tmp_path / "kubeconfig")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "watch failed" in line:
                process.terminate()
    printed = "".join(lines)
    assert "cannot reach http://127.0.0.1:1" in printed
    assert ("agent stopped" in printed, "Traceback" in printed, process.returncode) == (True, False, 0), printed


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return inspectable(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "7", "--to", "mig:1g.5gb"], "expected the index of a GPU that can be read (0, 1), its UUID, "),
        (["--gpu", "1", "--to", "mig:1g.5gb"], "expected a GPU with MIG, found Tesla T4"),
        (["--gpu", "-1", "--to", "mig:1g.5gb"], "that of a MIG device on it, found '-1'"),
        (["--gpu", "", "--to", "mig:1g.5gb"], "found ''; `carpool node inspect` names them"),
        (["--gpu", "first", "--to", "mig:1g.5gb"], "that of a MIG device on it, found 'first'"),
        (["--to", "mig:1g.5gb"], "Missing option '--gpu'"),
        (["--gpu", "0", "--too", "mig:1g.5gb"], "No such option"),
        (["--gpu", "0", "--to", "mig:9g.90gb"], ": expected a MIG profile out of 7g.40gb, 4g.20gb"),
        (["--gpu", "0", "--to", "mig:3g.20"], "found '3g.20'; name one of those"),
        (["--gpu", "0", "--to", "3g.20gb,1G.5gb"], "found '3g.20gb,1G.5gb'; did you mean 'mig:3g.20gb,1g.5gb'"),
        (["--gpu", "0", "--to", "mig:3g.20gb,$(reboot)"], "found '$(reboot)'"),
        (["--gpu", "0", "--to", "mps"], "expected --to mig:PROFILE"),
        (["--gpu", "0", "--to", "mig:7g.40gb,1g.5gb"], "expected profiles that fit on one GPU together"),
    ],
)
def test_refusals_are_sentences(node: Node, arguments: list[str], message: str) -> None:
    result = run(node, "plan", *arguments)
    assert result.exit_code == 2
    assert message in result.output


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e" + "9" * 10_000


def is_harmless(printed: str) -> bool:
    return len(printed) < 1500 and not {"\x1b", "\x07", "\u202e"} & set(printed)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--to", "mig:", "--gpu"],
        ["plan", "--gpu", "0", "--to"],
        ["plan", "--gpu", "0", "--to", f"mig:{HOSTILE}"],
        ["plan", "--gpu", "0", "--to", f"mig:7g.40gb{',7g.40gb' * 10_000}"],
        ["check", "--gpu"],
        ["check", "--gpu", "0", "--out"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_repeated_input_is_quoted_and_cut(node: Node, arguments: list[str]) -> None:
    """Regression: it was printed unchanged, with control sequences for the terminal."""
    there = node.devices()
    value = [] if any("7g.40gb,7g" in one or HOSTILE in one for one in arguments) else [HOSTILE]
    result = CliRunner().invoke(command, [*arguments, *value], obj=there)
    assert (result.exit_code, result.output != "") == (2, True), result.output
    assert is_harmless(result.output), result.output


@pytest.mark.parametrize("arguments", [["plan", "--to", "MIG:2G.10GB"], ["check", "--only", "contract"]])
def test_a_gpu_may_be_named_by_index_uuid_or_a_mig_device_on_it(node: Node, arguments: list[str]) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    there = node.devices()
    (device,) = read_mig_devices(there.session, there.uuids[0])
    for name in (device.uuid, there.uuids[0], "0"):
        result = CliRunner().invoke(command, [*arguments, "--gpu", name], obj=there)
        assert (result.exit_code, "found" in result.output) == (0, False), result.output
    unknown = CliRunner().invoke(command, [*arguments, "--gpu", f"{device.uuid}0"], obj=there)
    assert (unknown.exit_code, "found 'MIG-" in unknown.output) == (2, True), unknown.output


def test_a_lost_gpu_does_not_move_a_plan_to_another_gpu(tmp_path: Path) -> None:
    """Regression: with GPU 1 lost, `plan --gpu 1` destroyed the instances of GPU 2."""
    node = Node(FakeNvml(["A100-40"] * 3), FakeMpsCommands(), tmp_path)
    for gpu in node.nvml.gpus:
        gpu.mig.is_enabled = gpu.mig.is_pending = True
    run(node, "plan", "--gpu", "2", "--to", "mig:1g.5gb", "--apply")
    node.nvml.gpus[1].is_lost = True
    refused = run(node, "plan", "--gpu", "1", "--to", "mig:", "--apply", "--destroy-others")
    assert (refused.exit_code, "can be read (0, 2)" in refused.output) == (2, True), refused.output
    assert len(node.nvml.gpus[2].mig.instances) == 1
    run(node, "plan", "--gpu", "2", "--to", "mig:", "--apply", "--destroy-others")
    assert node.nvml.gpus[2].mig.instances == {}


def test_names_of_processes_are_quoted(node: Node) -> None:
    """Tenants choose the names of their processes."""
    node.start(0, 42, None)
    (node.root / "proc" / "42" / "stat").write_text("42 (\x1b[2Jowned) S " + " ".join(["0"] * 18) + " 4200 0 0\n")
    inspected = inspection(node)
    assert "process 42 (\\x1b[2Jowned)" in inspected
    assert "\x1b" not in inspected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected nvidia-cuda-mps-control on PATH, found none"),
        (["--shm-dir", "shm"], "Error: expected both --shm-dir and --shm-dir-on-node, or none of them, found one; add"),
    ],
)
def test_host_of_daemons_names_a_missing_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    paths = ["--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path)]
    result = CliRunner().invoke(command, ["mps-host", *paths, *arguments])
    assert (result.exit_code, message in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("path", "state", "message"),
    [
        ("missing/s", "", "--socket: expected to listen on "),
        ("s", "/proc/x", "--state-dir: expected a directory at '/proc/x', found "),
        (HOSTILE, "", "--socket: expected"),
        ("s", f"/proc/{HOSTILE}", "--state-dir: expected"),
    ],
)
def test_host_of_daemons_names_an_unusable_path(tmp_path: Path, path: str, state: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        listening(tmp_path / path, Path(state) if state else tmp_path)
    assert raised.value.exit_code == 2
    assert is_harmless(str(raised.value.message))


@pytest.mark.parametrize("what", ["file", "link", "living", "dead"])
def test_host_of_daemons_replaces_only_a_dead_host(tmp_path: Path, what: str) -> None:
    """Regression: any file was removed, and the socket of a living host, too."""
    path = tmp_path / "s"
    (kept := tmp_path / "kept").write_text("of another program")
    with socket.socket(socket.AF_UNIX) as there:
        match what:
            case "file":
                path.write_text("of another program")
            case "link":
                path.symlink_to(kept)
            case "living":
                there.bind(str(path))
                there.listen()
            case "dead":
                there.bind(str(path))
                there.close()
        before = path.lstat()
        if what == "dead":
            with listening(path, tmp_path):
                assert path.lstat() != before
            return
        found = "another host that answers there" if what == "living" else "something that is no socket"
        with pytest.raises(InputError, match=f"--socket: expected to listen on .*, found {found}; name another one"):
            listening(path, tmp_path)
        assert path.lstat() == before
    assert kept.read_text() == "of another program"


@pytest.mark.parametrize("arguments", [["inspect"], ["plan", "--gpu", "0", "--to", "mig:"]])
def test_simulated_gpus_are_for_the_agent(arguments: list[str]) -> None:
    """Regression: the only advice was to install a driver."""
    nvml = FakeNvml(["T4"])
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    result = CliRunner().invoke(command, arguments, obj=nvml, env={"CARPOOL_SIMULATED_GPUS": "Tesla T4:1"})
    assert result.exit_code == 2
    assert "; CARPOOL_SIMULATED_GPUS is for the agent, and this command needs NVIDIA's driver\n" in result.output


def test_a_plan_reads_its_target_before_the_driver() -> None:
    """Regression: without a driver, only that was found."""
    result = CliRunner().invoke(command, ["plan", "--gpu", "0", "--to", "3g.20gb"])
    assert (result.exit_code, "did you mean 'mig:3g.20gb'" in result.output) == (2, True), result.output


def test_environment_is_the_agents(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = node.nvml.gpus[1].uuid
    (node.root / "state" / "gpus").mkdir(parents=True)
    (node.root / "state" / "gpus" / f"{uuid}.json").write_text('{"mode": "TimeSlicing"}')
    (node.root / "cdi").mkdir()
    (node.root / "cdi" / "odd.json").write_text('{"kind": "nvidia.com/gpu", "devices": 3}')
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(node.root / "state"))
    monkeypatch.setenv("CARPOOL_CDI_DIR", str(node.root / "cdi"))
    result = CliRunner().invoke(command, ["inspect"], obj=node.nvml)
    assert result.exit_code == 0, result.output
    assert "now TimeSlicing" in result.output
    assert f"found {node.root / 'cdi' / 'odd.json'}: expected a CDI specification" in result.output


def test_nothing_is_written_beside_a_living_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.nvml.gpus[0].remap = (0, 0, 1, 0)
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(node.root / "state"))
    for arguments in (["inspect"], ["plan", "--gpu", "0", "--to", "mig:1g.5gb"]):
        result = CliRunner().invoke(command, arguments, obj=node.nvml)
        assert result.exit_code == 0, result.output
    assert not (node.root / "state").exists()
    assert "remapped" in CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    node.devices().inventory()  # an agent, which keeps it
    assert len(list((node.root / "state" / "gpus").glob("*.health.json"))) == 1


@pytest.mark.parametrize("arguments", [["inspect"], ["plan", "--gpu", "0", "--to", "mig:"], ["check"]])
def test_variable_of_the_wrong_kind_is_a_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments, env={"CARPOOL_METRICS_PORT": "many"})
    assert (result.exit_code, result.output) == (2, "Error: CARPOOL_METRICS_PORT: expected an integer, found 'many'\n")


def inspection(node: Node) -> str:
    settings = AgentSettings(cdi_dir=node.root / "cdi", cdi_static_dir=node.root / "etc-cdi")
    return "\n".join(inspect_node(node.devices(), settings, Host(None, node.root)))


def test_inspect_prints_gpus_and_instances_with_their_owners(node: Node) -> None:
    devices = node.devices()
    profile = node.nvml.gpus[0].mig.table.find("1g.5gb")
    devices.apply(devices.uuids[0], CreateInstance(Placement(profile, 0), PodUid("uid-a")))
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb,2g.10gb", "--apply")
    (larger,) = (n for n, i in node.nvml.gpus[0].mig.instances.items() if i.profile.name == "2g.10gb")
    node.start(0, 42, "x", instance=larger)
    printed = inspection(node)
    for text in (
        "driver 580.95.05, CUDA 13.0",
        "GPU 0: NVIDIA A100-SXM4-40GB",
        "; now no mode set",
        "prediction: published figures: 108 SMs, 19.5 TFLOP/s FP32, 312 in 16 bits, 1,555 GB/s",
        "MIG: on, 8 memory slices",
        "1g.5gb         4,864 MiB, 14 SMs, at {0,1,2,3,4,5,6}:1",
        "GPU 1: Tesla T4",
        "MIG: not supported",
    ):
        assert text in printed
    assert re.search(r"40,960 MiB \([1-9]\d* the driver's, 256 more kept free\)", printed)
    instances = [line for line in printed.splitlines() if "    instance " in line]
    assert {line.split("(")[1].split()[0]: line.rpartition("  ")[2] for line in instances} == {
        "1g.5gb": "made for pod uid-a, idle",
        "2g.10gb": "not created by the agent, in use",
    }


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (
            NvmlFigures(cuda_cores=2560),
            "2,560 cores, ? MHz, memory ? MHz x ? bits, ? W\n  prediction: none, because NVML",
        ),
        (
            NvmlFigures(
                cuda_cores=2560, sm_clock_mhz=1590, memory_clock_mhz=5001, memory_bus_bits=256, power_limit_w=70
            ),
            "2,560 cores, 1,590 MHz, memory 5,001 MHz x 256 bits, 70 W\n"
            "  prediction: derived from these: 40 SMs, 8.14 TFLOP/s FP32, 65.13 in 16 bits, 320 GB/s",
        ),
    ],
    ids=["unknown", "derived"],
)
def test_inspect_prints_what_predictions_of_an_unknown_product_use(node: Node, figures, expected: str) -> None:
    node.nvml.gpus[1].hardware = replace(node.nvml.gpus[1].hardware, product="Tesla T5", figures=figures)
    assert f"\n  NVML: {expected}" in inspection(node)


class HostEngine:
    """DCGM's host engine, which measures the first GPU."""

    name, is_scraped = "dcgm", False

    def __init__(self, node: Node) -> None:
        self._uuid = node.nvml.gpus[0].uuid

    def values(self) -> dict:
        return {(self._uuid, None): {"DCGM_FI_PROF_SM_ACTIVE": 0.5}}


def test_inspect_prints_the_source_of_each_metric(node: Node) -> None:
    node.sources = (HostEngine(node),)
    lines = [line.strip() for line in inspection(node).splitlines() if "metrics from" in line]
    assert lines[0] == "metrics from dcgm: PROF_SM_ACTIVE"
    assert [line.split(":")[0] for line in lines[1:]] == ["metrics from nvml"] * 2


def host_pids(node: Node) -> None:
    (node.root / "2").mkdir()
    (node.root / "2" / "comm").write_text("kthreadd\n")


def test_inspect_prints_what_the_node_lacks(tmp_path: Path) -> None:
    node = Node(FakeNvml(["T4", "T4"]), FakeMpsCommands(), tmp_path)
    lacks = "FAILED: expected the host's PIDs, to assign processes to pods, found another PID namespace; run with host"
    assert lacks in (printed := inspection(node))
    assert "missing: expected a source of SM activity for each GPU, found none of GPU 0, none of GPU 1" in printed
    host_pids(node)
    assert "the host's PIDs" not in inspection(node)


def test_inspect_checks_the_host_of_daemons_if_one_is_set(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, there = tmp_path / "nvidia-cuda-mps-control", tmp_path / "s"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # without unshare, which only a process that starts daemons needs
    monkeypatch.setenv("CARPOOL_MPS_HOST", str(there))
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path / "state"))
    printed = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert f"expected a socket at '{there}', found none; check the pod carpool-mps" in printed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there))
        printed = CliRunner().invoke(command, ["inspect"], obj=node.nvml).output
    assert "carpool-mps" not in printed
    monkeypatch.delenv("CARPOOL_MPS_HOST")
    assert "unshare on PATH" in CliRunner().invoke(command, ["inspect"], obj=node.nvml).output


HOSTILE_ANSWERS = ['"} 1\nDCGM_FI_DEV_GPU_UTIL{pod="x', "../../../etc/passwd", "$(reboot)", "a" * 5000, "\u202e\x00"]


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
async def test_hostile_names_stay_names(devices, tmp_path: Path, reserve, enter, name: str) -> None:
    """The API server refuses such names; the agent does not rely on that."""
    agent = agent_on(devices, tmp_path, FakeKube(), name="n")
    registry, gpu = registry_of(agent), devices.uuids[0]
    hostile = reserve("a", gpu, pod_name=name, job_name=name, pod_namespace=name)
    async with running(agent):
        await reserve_on(agent.reconciler._api, hostile, name="n")
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Ready"])
        with enter(gpu, "a"):
            await until(lambda: agent.reconciler.meters[gpu].usage)
            page = generate_latest(registry).decode()
    used = {
        (s.labels["namespace"], s.labels["pod"], s.labels["training_job"])
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name == "carpool_gpu_tenant_memory_bytes"
    }
    assert used == {(name, name, name)}
    spec = cdi.specifications(hostile, ["slot-0"], {gpu: Access(env={}, mounts=())})
    cdi.write(tmp_path / "cdi", spec)
    assert [p.name for p in (tmp_path / "cdi").iterdir()] == ["carpool.dev-slot-0.json"]


@pytest.mark.parametrize("uuid", ["GPU-elsewhere", "GPU-1/../../x", "", "GPU-$(id)", "x" * 10_000])
async def test_a_foreign_or_hostile_gpu_uuid_fails_its_reservation(devices, tmp_path: Path, reserve, uuid: str) -> None:
    agent = agent_on(devices, tmp_path, FakeKube(), name="n")
    async with running(agent):
        await reserve_on(agent.reconciler._api, reserve("a", uuid, mode=SharingMode.MPS), name="n")
        await until(lambda: [p.state.value for p in agent.reconciler.partitions] == ["Failed"])
    assert len(agent.reconciler.partitions[0].message) <= 4096
    assert "expected a GPU out of GPU-" in agent.reconciler.partitions[0].message


@pytest.mark.parametrize("hours", [-1, 1])
def test_nodes_clock_that_jumps_loses_no_work(tmp_path: Path, hours: int) -> None:
    """The driver stamps its samples with the node's clock; after it was set back, all samples looked old."""
    node = Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path)
    devices, gpu = first_gpu(node)
    node.start(0, 42, "a", sm=0.5)
    busy_s = 0.0
    for second in range(21):
        busy_s += sum(p.busy_s for p in devices.read(gpu).processes)
        if second == 10:
            node.nvml.now_us += hours * 3_600_000_000
        node.advance(1)
    assert busy_s == pytest.approx(10, rel=0.15)


async def test_time_of_day_that_jumps_writes_no_storm(devices, tmp_path: Path) -> None:
    """Times in the status follow the wall clock; writes follow the monotonic clock."""

    class Jumping(Flow):
        offset = timedelta()

        def now(self) -> datetime:
            return super().now() + self.offset

    clock, kube = Jumping(), FakeKube()
    settings = AgentSettings(node_name="n", kubelet=False, state_dir=tmp_path)
    agent = build(settings, kube, clock, devices, Intervals(sleep=clock.sleep))
    reporter = agent.reconciler.reporter

    async with running(agent):
        await until(lambda: reporter.writes)
        writes = reporter.writes
        for hours in (-5, 5, 0):
            clock.offset = timedelta(hours=hours)
            await reporter.once()
        assert reporter.writes == writes
