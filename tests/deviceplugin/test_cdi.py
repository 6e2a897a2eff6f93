"""What a slot brings into a container."""

import json
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.cdi import slots as cdi
from carpool_deviceplugin.devices.gpu import Access, Mount


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


def test_mps_limits_cannot_be_missed(valid_cdi, reserve) -> None:
    reservation = reserve("a", mode=SharingMode.MPS, memory_limit_mib=9216, thread_percentage=40)
    spec = cdi.specifications(reservation, ["slot-0"], {GpuUuid("GPU-1"): access("GPU-1")})["slot-0"]
    valid_cdi(spec)
    env = env_of(spec)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9216M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == "/run/carpool/mps"
    assert env["CARPOOL_MEMORY_LIMIT_MIB"] == "9216"
    assert [m["hostPath"] for m in spec["devices"][0]["containerEdits"]["mounts"]] == [
        "/state/GPU-1",
        "/state/mps/GPU-1",
    ]


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
