"""What the commands of `carpool node` are told: named, refused in a sentence, quoted."""

import socket
from pathlib import Path

import pynvml
import pytest
from carpool_deviceplugin.cdi.nvidia import NvidiaCdi
from carpool_deviceplugin.node.commands import listening, mps_host
from carpool_deviceplugin.node.commands import node as command
from carpool_deviceplugin.node.input import InputError
from carpool_deviceplugin.node.inspection import inspect_node
from carpool_deviceplugin.nvml.mig import read_mig_devices
from carpool_deviceplugin.testing.battery import FakeMachine
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_deviceplugin.testing.nvml_node import Node
from click.testing import CliRunner
from node_world import inspectable, run


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return inspectable(tmp_path)


def test_gpu_may_be_named_by_its_uuid_and_modes_in_capitals(node: Node) -> None:
    uuid = node.nvml.gpus[0].uuid
    assert "would create 3g.20gb" in run(node, "plan", "--gpu", uuid, "--to", "MIG:3G.20GB").output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "7", "--to", "mig:1g.5gb"], "expected a GPU from 0 to 1, its UUID, or that of a MIG device on it, "),
        (["--gpu", "1", "--to", "mig:1g.5gb"], "expected a GPU with MIG, found Tesla T4"),
        (["--gpu", "-1", "--to", "mig:1g.5gb"], "that of a MIG device on it, found '-1'"),
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
def test_refusals_are_sentences(node: Node, arguments: list[str], says: str) -> None:
    result = run(node, "plan", *arguments)
    assert result.exit_code == 2
    assert says in result.output


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e" + "9" * 10_000


def is_harmless(printed: str) -> bool:
    return len(printed) < 1500 and not {"\x1b", "\x07", "\u202e"} & set(printed)


@pytest.mark.parametrize("where", ["socket", "state_dir"])
def test_paths_are_quoted_and_cut(tmp_path: Path, where: str) -> None:
    paths = {"socket": tmp_path / "s", "state_dir": tmp_path, where: tmp_path / HOSTILE}
    with pytest.raises(InputError, match=f"--{where.replace('_', '-')}: expected") as raised:
        listening(**paths)
    assert is_harmless(str(raised.value.message))


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--to", "mig:", "--gpu"],
        ["plan", "--gpu", "0", "--to"],
        ["plan", "--gpu", "0", "--to", f"mig:{HOSTILE}"],
        ["plan", "--gpu", "0", "--to", f"mig:7g.40gb{',7g.40gb' * 10_000}"],
        ["battery", "--gpu"],
        ["battery", "--gpu", "0", "--out"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_what_is_repeated_is_quoted_and_cut(node: Node, arguments: list[str]) -> None:
    """Regression: it was printed as it came, and wrote what it liked on the terminal."""
    there = FakeMachine(node) if arguments[0] == "battery" else node.devices()
    said = [] if any("7g.40gb,7g" in one or HOSTILE in one for one in arguments) else [HOSTILE]
    result = CliRunner().invoke(command, [*arguments, *said], obj=there)
    assert (result.exit_code, result.output != "") == (2, True), result.output
    assert is_harmless(result.output), result.output


@pytest.mark.parametrize("arguments", [["plan", "--to", "mig:", "--gpu", ""], ["battery", "--gpu", ""]])
def test_nothing_is_a_name_that_is_seen(node: Node, arguments: list[str]) -> None:
    there = FakeMachine(node) if arguments[0] == "battery" else node.devices()
    result = CliRunner().invoke(command, arguments, obj=there)
    assert (result.exit_code, "found ''; `carpool node inspect` names them" in result.output) == (2, True)


@pytest.mark.parametrize("arguments", [["plan", "--to", "mig:2g.10gb"], ["battery", "--only", "contract"]])
def test_a_gpu_may_be_named_by_a_mig_device_on_it(node: Node, arguments: list[str]) -> None:
    run(node, "plan", "--gpu", "0", "--to", "mig:1g.5gb", "--apply")
    there = FakeMachine(node)
    (device,) = read_mig_devices(there.devices.session, there.devices.uuids[0])
    for said in (device.uuid, there.devices.uuids[0], "0"):
        obj = there if arguments[0] == "battery" else there.devices
        result = CliRunner().invoke(command, [*arguments, "--gpu", said], obj=obj)
        assert (result.exit_code, "found" in result.output) == (0, False), result.output
    unknown = CliRunner().invoke(command, [*arguments, "--gpu", f"{device.uuid}0"], obj=obj)
    assert (unknown.exit_code, "found 'MIG-" in unknown.output) == (2, True), unknown.output


def test_what_processes_are_called_is_not_printed_as_it_is(node: Node) -> None:
    """A tenant chooses it."""
    node.start(0, 42, None)
    (node.root / "proc" / "42" / "stat").write_text("42 (\x1b[2Jowned) S " + " ".join(["0"] * 18) + " 4200 0 0\n")
    inspected = "\n".join(inspect_node(node.devices(), NvidiaCdi([]), node.root))
    assert "process 42 (\\x1b[2Jowned)" in inspected
    assert "\x1b" not in inspected


def test_host_of_daemons_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(command, ["mps-host", "--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "found missing: nvidia-cuda-mps-control on PATH" in result.output


def test_host_of_daemons_wants_both_names_of_its_memory(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["mps-host", "--socket", str(tmp_path / "s"), "--shm-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2,
        "Error: expected both --shm-dir and --shm-dir-on-node, or none of them, found one; add the other\n",
    )


@pytest.mark.parametrize(
    ("path", "state", "says"),
    [
        ("missing/s", "", "--socket: expected to listen on "),
        ("s", "/proc/x", "--state-dir: expected a directory at '/proc/x', found "),
    ],
)
def test_host_of_daemons_says_where_it_cannot_be(tmp_path: Path, path: str, state: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        listening(tmp_path / path, Path(state) if state else tmp_path)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("what", ["file", "link", "living", "dead"])
def test_host_of_daemons_takes_nobodys_place(tmp_path: Path, what: str) -> None:
    """Regression: any file that root may remove was gone, and a living host's socket, too."""
    path = tmp_path / "s"
    (kept := tmp_path / "kept").write_text("of somebody else")
    with socket.socket(socket.AF_UNIX) as there:
        match what:
            case "file":
                path.write_text("of somebody else")
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
    assert kept.read_text() == "of somebody else"


@pytest.mark.parametrize("arguments", [["inspect"], ["plan", "--gpu", "0", "--to", "mig:"]])
def test_simulated_gpus_are_for_the_agent(arguments: list[str]) -> None:
    """Regression: who had set the variable was told to install a driver, and nothing else."""
    nvml = FakeNvml(["T4"])
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    result = CliRunner().invoke(command, arguments, obj=nvml, env={"CARPOOL_SIMULATED_GPUS": "Tesla T4:1"})
    assert result.exit_code == 2
    assert "; CARPOOL_SIMULATED_GPUS is for the agent, and this command needs NVIDIA's driver\n" in result.output


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
    assert f"wrong: {node.root / 'cdi' / 'odd.json'}: expected a CDI specification" in result.output


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


@pytest.mark.parametrize("arguments", [["inspect"], ["plan", "--gpu", "0", "--to", "mig:"], ["battery"]])
def test_variable_of_the_wrong_kind_is_a_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments, env={"CARPOOL_METRICS_PORT": "many"})
    assert (result.exit_code, result.output) == (
        2,
        "Error: CARPOOL_METRICS_PORT: expected an integer, found 'many'\n",
    )


def test_state_directory_of_the_host_is_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_STATE_DIR", str(tmp_path))
    with mps_host.make_context("mps-host", ["--socket", "s"]) as context:
        assert context.params["state_dir"] == tmp_path
