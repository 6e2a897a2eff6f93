"""`carpool agent`, as far as it gets without an API server."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from carpool_deviceplugin.app import find_devices
from carpool_deviceplugin.commands import agent
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.nvml import FakeNvml
from click.testing import CliRunner, Result


def test_help_names_every_variable() -> None:
    shown = CliRunner().invoke(agent, ["--help"]).output
    for name in ("NODE_NAME", "SIMULATED_GPUS", "KUBELET", "DEVICE_PLUGIN_DIR", "POD_RESOURCES_SOCKET", "CDI_DIR"):
        assert f"CARPOOL_{name}" in shown


@pytest.mark.parametrize(
    ("settings", "says"),
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
def test_settings_that_lead_to_no_gpus(settings, says) -> None:
    with pytest.raises(NoDevicesError, match=says):
        find_devices(AgentSettings(**settings))


@pytest.mark.parametrize("simulated", ["", "Tesla T4:1"], ids=["hardware", "simulated"])
def test_state_directory_that_cannot_be_written(tmp_path, simulated) -> None:
    """Regression: with hardware the agent started, and each step failed on its own."""
    (tmp_path / "state").write_text("a file")
    settings = AgentSettings(node_name="n", simulated_gpus=simulated, state_dir=tmp_path / "state")
    told = r"^CARPOOL_STATE_DIR: expected a directory to write to at '.*/state', found (Not a|File).*; set another$"
    with pytest.raises(NoDevicesError, match=told):
        find_devices(settings, FakeNvml(["T4"]))


def test_without_hardware_nothing_is_written(tmp_path) -> None:
    with pytest.raises(NoDevicesError, match="expected libnvidia-ml"):
        find_devices(AgentSettings(node_name="n", state_dir=tmp_path / "state"))
    assert not (tmp_path / "state").exists()


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
    said = f"Error: CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {port}: "
    assert (found.exit_code, found.output.startswith(said)) == (2, True), found.output
    assert "address already in use" in found.output
    assert found.output.endswith("; set another\n")


@pytest.mark.parametrize(
    ("setting", "value", "bounds"), [("metrics-port", "99999", "0 to 65535"), ("slots-per-gpu", "0", "1 to 128")]
)
def test_a_number_out_of_bounds_is_a_sentence(tmp_path: Path, setting: str, value: str, bounds: str) -> None:
    found = begin(tmp_path, f"--{setting}", value)
    assert found.exit_code == 2
    assert found.output.endswith(f"expected a number from {bounds}, found {value}\n")


@pytest.mark.parametrize(
    ("directory", "why"), [("/proc/x", "No such"), ("/proc", "No such"), ("state/file/cdi", "Not a directory")]
)
def test_a_cdi_directory_that_cannot_be_had_is_a_sentence(tmp_path: Path, directory: str, why: str) -> None:
    """Regression: the agent started, and no container ever did."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "file").touch()
    found = begin(tmp_path, "--cdi-dir", str(tmp_path / directory))
    assert (found.exit_code, len(found.output.splitlines())) == (2, 1), found.output
    assert found.output.startswith("Error: CARPOOL_CDI_DIR: expected a directory to write to at '/")
    assert f"found {why}" in found.output


@pytest.mark.parametrize("kubeconfig", ["", "no: config"])
def test_no_way_to_an_api_server_is_a_sentence(tmp_path: Path, kubeconfig: str) -> None:
    found = begin(tmp_path, kubeconfig=kubeconfig)
    assert (found.exit_code, len(found.output.splitlines())) == (2, 1), found.output
    assert found.output.startswith("Error: ")
    assert str(tmp_path / "kubeconfig") in found.output


def test_an_api_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """It says so in each warning, and at /readyz; whoever starts it anew does not help."""
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    told = {
        "NODE_NAME": "n",
        "SIMULATED_GPUS": "Tesla T4:1",
        "STATE_DIR": str(tmp_path / "state"),
        "KUBELET": "false",
        "METRICS_PORT": "0",
    }
    environment = {f"CARPOOL_{name}": value for name, value in told.items()}
    with subprocess.Popen(
        [sys.executable, "-m", "carpool_deviceplugin"],
        env={**os.environ, **environment, "KUBECONFIG": str(tmp_path / "kubeconfig")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if "watch failed" in line:
                process.terminate()
    printed = "".join(said)
    assert "cannot reach http://127.0.0.1:1" in printed
    assert ("agent stopped" in printed, "Traceback" in printed, process.returncode) == (True, False, 0), printed


def test_without_gpus_the_command_says_what_to_set() -> None:
    result = CliRunner().invoke(agent, ["--node-name", "n"], env={"CARPOOL_SIMULATED_GPUS": ""})
    assert result.exit_code == 2
    assert "set CARPOOL_SIMULATED_GPUS=" in result.output
