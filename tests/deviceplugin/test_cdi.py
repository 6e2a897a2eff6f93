"""CDI specifications of slots, and NVIDIA's."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from agent_world import first_gpu
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.gpu import Access, DeviceError, Mount
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml


def access(uuid: str) -> Access:
    return Access(
        env={"CARPOOL_SIMULATED_GPUS_DIR": "/run/carpool/gpus"},
        mounts=(Mount(f"/state/{uuid}", f"/run/carpool/gpus/{uuid}"),),
        mps_pipe=Mount(f"/state/mps/{uuid}", "/run/carpool/mps"),
    )


def env_of(spec: dict) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in spec["devices"][0]["containerEdits"].get("env", []))


@pytest.mark.parametrize("mode", [SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING])
def test_without_mps(valid_cdi, reserve, mode) -> None:
    spec = cdi.specifications(reserve("a", mode=mode), ["slot-3"], {GpuUuid("GPU-1"): access("GPU-1")})["slot-3"]
    valid_cdi(spec)
    assert spec["cdiVersion"] == "0.6.0", "as old as its fields allow: annotations"
    assert env_of(spec) == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "CARPOOL_POD_UID": "uid-a",
        "CARPOOL_VISIBLE_GPUS": "GPU-1",
        "CARPOOL_GPU_MODE": mode.value,
        "CARPOOL_SIMULATED_GPUS_DIR": "/run/carpool/gpus",
    }
    (mount,) = spec["devices"][0]["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/state/GPU-1", "/run/carpool/gpus/GPU-1")
    assert "rw" in mount["options"]


def test_slot_k_brings_gpu_k_and_the_first_the_environment(valid_cdi, reserve) -> None:
    reservation = reserve("a", "GPU-1", "GPU-2", mode=SharingMode.EXCLUSIVE)
    specs = cdi.specifications(
        reservation, ["slot-7", "slot-12"], {GpuUuid(u): access(u) for u in reservation.gpu_uuids}
    )
    for spec in specs.values():
        valid_cdi(spec)
    mounts = {slot: spec["devices"][0]["containerEdits"]["mounts"][0]["hostPath"] for slot, spec in specs.items()}
    assert mounts == {"slot-7": "/state/GPU-1", "slot-12": "/state/GPU-2"}
    assert env_of(specs["slot-7"])["CARPOOL_VISIBLE_GPUS"] == "GPU-1,GPU-2"
    assert env_of(specs["slot-12"]) == {}


def test_files_are_written_whole_and_under_their_names(reserve, tmp_path: Path) -> None:
    specs = cdi.specifications(reserve("a"), ["slot-3"], {GpuUuid("GPU-1"): access("GPU-1")})
    for _ in range(2):
        cdi.write(tmp_path / "cdi", specs)
    assert [p.name for p in (tmp_path / "cdi").iterdir()] == ["carpool.dev-slot-3.json"]
    assert json.loads(cdi.path_of(tmp_path / "cdi", "slot-3").read_text()) == specs["slot-3"]
    assert cdi.device_name("slot-3") == "carpool.dev/slot=slot-3"


def test_stale_files_go_and_others_files_stay(reserve, tmp_path: Path) -> None:
    for number, pod in enumerate("ab"):
        specs = cdi.specifications(reserve(pod), [f"slot-{number}"], {GpuUuid("GPU-1"): access("GPU-1")})
        cdi.write(tmp_path, specs)
    (tmp_path / "carpool.dev-slot-9.json").write_text("{half")
    (tmp_path / ".carpool.dev-slot-8.json.77.new").write_text("{half")
    (tmp_path / "nvidia.yaml").write_text("theirs")
    removed = cdi.remove_stale(tmp_path, {PodUid("uid-b")})
    assert set(removed) == {"carpool.dev-slot-0.json", "carpool.dev-slot-9.json", ".carpool.dev-slot-8.json.77.new"}
    assert {p.name for p in tmp_path.iterdir()} == {"carpool.dev-slot-1.json", "nvidia.yaml"}
    assert cdi.remove_stale(tmp_path / "absent", set()) == []
    (tmp_path / "carpool.dev-slot-7.json").mkdir()
    assert cdi.remove_stale(tmp_path, {PodUid("uid-b")}) == [], "a folder in a file's place ends nothing"


FIXTURES = Path(__file__).parent / "cdi"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(FakeNvml(["A100-40", "A100-40"]), FakeMpsCommands(), tmp_path)
    (tmp_path / "cdi").mkdir()
    return found


def edits_of(spec: dict) -> dict:
    return spec["devices"][0]["containerEdits"]


def of_both_gpus(node: Node, reserve) -> dict[str, dict]:
    """Return the specifications of a container with both GPUs, by slot."""
    devices = node.devices()
    wanted = reserve("a", *devices.uuids, mode=SharingMode.EXCLUSIVE)
    return cdi.specifications(wanted, ["slot-0", "slot-1"], {u: devices.access(u) for u in devices.uuids})


@pytest.mark.parametrize("name", ["host.yaml", "driver-container.json"])
def test_the_fixtures_are_sound(valid_cdi, name: str) -> None:
    valid_cdi(yaml.safe_load((FIXTURES / name).read_text()))


def test_by_index_where_uuids_are_not_named(valid_cdi, node: Node, reserve) -> None:
    shutil.copy(FIXTURES / "host.yaml", node.root / "cdi" / "nvidia.yaml")
    specs = of_both_gpus(node, reserve)
    for spec in specs.values():
        valid_cdi(spec)
    first, second = edits_of(specs["slot-0"]), edits_of(specs["slot-1"])
    nodes = [[n["path"] for n in edits["deviceNodes"]] for edits in (first, second)]
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(nodes[0])
    assert "/dev/nvidia1" not in nodes[0], "a slot brings its own GPU only"
    assert nodes[1] == ["/dev/nvidia1"]
    assert [m["containerPath"] for m in first["mounts"]][-1] == "/usr/bin/nvidia-smi"
    assert len(first["hooks"]) == 2
    assert "hooks" not in second, "what each container needs once is given once"
    assert env_of(specs["slot-0"])["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert specs["slot-0"]["cdiVersion"] == "0.6.0"


def test_mps_on_a_real_gpu(valid_cdi, node: Node, reserve) -> None:
    shutil.copy(FIXTURES / "host.yaml", node.root / "cdi" / "nvidia.yaml")
    devices, gpu = first_gpu(node)
    reservation = reserve("a", gpu, mode=SharingMode.MPS, memory_limit_mib=9216, thread_percentage=40)
    spec = cdi.specifications(reservation, ["slot-0"], {gpu: devices.access(gpu)})["slot-0"]
    valid_cdi(spec)
    env = env_of(spec)
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/carpool/mps"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9216M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert env["CARPOOL_MEMORY_LIMIT_MIB"] == "9216"
    mounts = {m["containerPath"]: m["hostPath"] for m in edits_of(spec)["mounts"]}
    assert mounts["/run/carpool/mps"] == str(node.root / "mps" / gpu / "pipe")
    assert mounts["/dev/shm"] == str(node.root / "mps" / gpu / "shm")  # noqa: S108  # where CUDA looks for it


def test_without_a_specification_the_runtime_is_told(node: Node, reserve) -> None:
    specs = of_both_gpus(node, reserve)
    assert env_of(specs["slot-0"])["NVIDIA_VISIBLE_DEVICES"] == ",".join(node.devices().uuids)
    assert env_of(specs["slot-0"])["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_driver_container_and_mig_device() -> None:
    found = NvidiaCdi([FIXTURES])
    gpu = found.find("GPU-22222222-2222-4222-8222-222222222222")
    mig = found.find("MIG-33333333-3333-4333-8333-333333333333")
    assert (gpu.cdi_version, gpu.edits["additionalGids"]) == ("0.7.0", [44])
    assert [n["path"] for n in mig.edits["deviceNodes"]][1:] == [
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    ]
    assert found.find("GPU-absent") is None


@pytest.mark.parametrize("others", [["/dev/nvidia-caps/nvidia-cap12"], ["/dev/nvidia1"]], ids=["mig-device", "all"])
def test_an_entry_that_opens_more_than_the_gpu_is_not_used(tmp_path: Path, others: list[str]) -> None:
    """Regression: a whole GPU got the device files of an ended MIG instance."""
    nodes = [{"path": path} for path in ("/dev/nvidia0", *others)]
    device = {"name": "0:0", "containerEdits": {"deviceNodes": nodes}}
    (tmp_path / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [device]}))
    assert NvidiaCdi([tmp_path]).find("GPU-1", 0) is None
    assert NvidiaCdi([tmp_path]).gpu("GPU-1", 0).needs_runtime_env


def test_newer_version_is_kept(valid_cdi, reserve) -> None:
    gpu = GpuUuid("GPU-1")
    access = {gpu: Access(env={}, mounts=(), edits={"additionalGids": [44]}, cdi_version="0.7.0")}
    spec = cdi.specifications(reserve("a"), ["slot-0"], access)["slot-0"]
    valid_cdi(spec)
    assert spec["cdiVersion"] == "0.7.0"


def test_gpus_before_those_of_another_directory(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "nvidia.json").write_text(
        '{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-1", "containerEdits": {"env": ["FIRST=1"]}}]}'
    )
    assert NvidiaCdi([tmp_path / "first", FIXTURES]).find("GPU-1").edits == {"env": ["FIRST=1"]}
    assert NvidiaCdi([tmp_path / "absent"]).find("GPU-1") is None


def test_specification_that_was_written_again_or_removed_is_seen(tmp_path: Path) -> None:
    cdi, file = NvidiaCdi([tmp_path]), tmp_path / "nvidia.json"
    for driver in ("1", "22"):
        device = {"name": "GPU-1", "containerEdits": {"env": [f"DRIVER={driver}"]}}
        file.write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": [device]}))
        assert cdi.find("GPU-1").edits == {"env": [f"DRIVER={driver}"]}
    file.unlink()
    assert cdi.find("GPU-1") is None


@pytest.mark.parametrize("text", ["kind: nvidia.com/gpu\ndevices: 7", "nvidia.com/gpu: [", '"nvidia.com/gpu'])
def test_damaged_specification_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "nvidia.yaml").write_text(text)
    (tmp_path / "others.yaml").write_text("{not ours, not sound")
    with pytest.raises(DeviceError, match=r"nvidia\.yaml: expected a CDI specification.*nvidia-ctk cdi generate"):
        NvidiaCdi([tmp_path]).find("GPU-1")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"deviceNodes": [3]}, "Expected `object`, got `int`"),
        ({"deviceNodes": None}, "Expected `array`, got `null`"),
        ({"deviceNodes": [{"path": 3}]}, "Expected `str`, got `int`"),
        ({"deviceNodes": [{}]}, "missing required field `path`"),
        ({"env": [1]}, "Expected `str`, got `int`"),
        ({"mounts": {}}, "Expected `array`, got `object`"),
    ],
)
@pytest.mark.parametrize("where", ["device", "all"])
def test_odd_edits_are_a_sentence(tmp_path: Path, edits: dict, message: str, where: str) -> None:
    of_device, of_all = (edits, {}) if where == "device" else ({}, edits)
    content = {
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": of_device}],
        "containerEdits": of_all,
    }
    (tmp_path / "odd.json").write_text(json.dumps(content))
    with pytest.raises(DeviceError, match=r"odd\.json: expected a CDI specification, found ") as raised:
        NvidiaCdi([tmp_path]).find("GPU-1", 0)
    assert message in str(raised.value)
