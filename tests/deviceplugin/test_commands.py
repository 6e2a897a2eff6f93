"""`carpool agent`, as far as it gets without an API server."""

import pytest
from carpool_deviceplugin.app import find_devices
from carpool_deviceplugin.commands import agent
from carpool_deviceplugin.devices import NoDevicesError
from carpool_deviceplugin.settings import AgentSettings
from click.testing import CliRunner


def test_help_names_every_variable() -> None:
    shown = CliRunner().invoke(agent, ["--help"]).output
    for name in ("NODE_NAME", "SIMULATED_GPUS", "KUBELET", "DEVICE_PLUGIN_DIR", "POD_RESOURCES_SOCKET", "CDI_DIR"):
        assert f"CARPOOL_{name}" in shown


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "CARPOOL_NODE_NAME: expected the name of this Node"),
        ({"node_name": "n"}, "expected libnvidia-ml.so.1, found none.*set CARPOOL_SIMULATED_GPUS"),
        ({"node_name": "n", "simulated_gpus": "Banana:1"}, "CARPOOL_SIMULATED_GPUS: GPU product 'Banana' is unknown"),
        ({"node_name": "n", "simulated_gpus": "Tesla T4:1", "slots_per_gpu": 0}, "CARPOOL_SLOTS_PER_GPU: expected 1"),
    ],
)
def test_settings_that_lead_to_no_gpus(settings, says) -> None:
    with pytest.raises(NoDevicesError, match=says):
        find_devices(AgentSettings(**settings))


def test_state_directory_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(NoDevicesError, match="CARPOOL_STATE_DIR: expected to write to"):
        find_devices(AgentSettings(node_name="n", simulated_gpus="Tesla T4:1", state_dir=tmp_path / "state"))


def test_without_gpus_the_command_says_what_to_set() -> None:
    result = CliRunner().invoke(agent, ["--node-name", "n"], env={"CARPOOL_SIMULATED_GPUS": ""})
    assert result.exit_code == 1
    assert "set CARPOOL_SIMULATED_GPUS=" in result.output
