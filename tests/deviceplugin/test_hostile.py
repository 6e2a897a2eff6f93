"""What a container may write into its GPU's directory of claims is its own affair: nobody else is disturbed by it."""

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from carpool_core.resources.node import Tenant
from carpool_core.values import DeviceHealth, GpuUuid, PodUid, SharingMode
from carpool_deviceplugin.controller.status import above_limit, presentable
from carpool_deviceplugin.devices.gpu import SetMode
from carpool_deviceplugin.devices.simulated import SimulatedDevices
from carpool_simulated import state
from carpool_simulated.claims import Claim, encode_claim
from carpool_simulated.device import Device
from structlog.testing import capture_logs

GOOD = {"pod_uid": "uid-b", "pid": 1, "started": 0.0, "memory_mib": 1, "peak_memory_mib": 1}

Claims = Callable[[bytes], Path]


@pytest.fixture
def claims(devices: SimulatedDevices) -> Path:
    devices.apply(devices.uuids[0], SetMode(SharingMode.TIME_SLICING))
    return Path(devices.access(devices.uuids[0]).mounts[1].host_path)


@pytest.fixture
def hold(claims: Path) -> Iterator[Claims]:
    """Write a claim with a right checksum, and hold it as a living process does."""
    handles: list[int] = []

    def of(body: bytes) -> Path:
        path = claims / f"0{len(handles)}.claim"
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT))
        fcntl.flock(handles[-1], fcntl.LOCK_EX)
        os.write(handles[-1], b"%08x %b\n" % (zlib.crc32(body), body))
        return path

    yield of
    for handle in handles:
        os.close(handle)


BODIES = {
    "no JSON": b"nonsense",
    "nested too deep": b"[" * 60_000,
    "a number too long for int": json.dumps(GOOD).replace('"pid": 1', '"pid": ' + "1" * 5000).encode(),
    "negative memory": json.dumps(GOOD | {"memory_mib": -5}).encode(),
    "memory beyond int64": json.dumps(GOOD | {"peak_memory_mib": 2**70}).encode(),
    "energy that makes the sum infinite": json.dumps(GOOD | {"energy_j": 1e308}).encode(),
    "a ratio of two": json.dumps(GOOD | {"sm_active": 2.0}).encode(),
    "a UID that is no text": json.dumps(GOOD | {"pod_uid": "\ud800"}).encode(),
    "a UID as long as a book": json.dumps(GOOD | {"pod_uid": "x" * 10_000}).encode(),
    "larger than any claim": json.dumps(GOOD | {"pod_uid": "x" * 200_000}).encode(),
}


def sees_only_the_neighbour(devices: SimulatedDevices) -> None:
    gpu = devices.uuids[0]
    assert [p.pod_uid for p in devices.read(gpu).processes] == ["uid-a"]
    assert devices.actual(gpu).tenants == {"uid-a"}
    assert devices.inventory()[0].health is DeviceHealth.HEALTHY


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_claim_with_a_right_checksum_and_a_wrong_body_counts_for_nothing(
    devices: SimulatedDevices, hold: Claims, enter, body: bytes
) -> None:
    """One such claim ended the agent, or had every write of the status refused."""
    path = hold(body)
    with capture_logs() as logs, enter(devices.uuids[0], "a") as (gpu,):
        gpu.run(0.001)
        sees_only_the_neighbour(devices)
    assert path.name in logs[0]["first"][0], "it is named"
    assert path.exists(), "a living process holds it"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "device.json")


def folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def secret(path: Path) -> None:
    path.touch()
    path.chmod(0)


@pytest.mark.parametrize("make", [fifo, link, folder, secret])
@pytest.mark.parametrize("name", ["x.claim", "x.new", os.fsdecode(b"\xff.claim")])
def test_what_is_no_claim_keeps_nobody_waiting(
    devices: SimulatedDevices, claims: Path, enter, make: Callable[[Path], None], name: str
) -> None:
    """A FIFO blocked whoever opened it, the agent too; a folder could not be removed, and no mode be changed."""
    make(claims / name)
    with enter(devices.uuids[0], "a"):
        sees_only_the_neighbour(devices)
    assert make is folder or not os.path.lexists(claims / name)
    devices.apply(devices.uuids[0], SetMode(SharingMode.EXCLUSIVE))
    assert devices.actual(devices.uuids[0]).mode is SharingMode.EXCLUSIVE


def test_containers_write_in_their_claims_only(devices: SimulatedDevices) -> None:
    access = devices.access(devices.uuids[0])
    assert access.mps_pipe is not None
    everything = [*access.mounts, access.mps_pipe]
    assert [m.container_path.rpartition("/")[2] for m in everything if not m.read_only] == ["claims"]


def test_containers_as_any_user_see_the_device_and_cannot_change_it(devices: SimulatedDevices, claims: Path) -> None:
    devices.read(devices.uuids[0])
    modes = {path.name: path.stat().st_mode & 0o777 for path in [claims.parent, *claims.parent.iterdir()]}
    assert modes.pop("claims") == 0o777
    assert modes.pop(claims.parent.name) == 0o755
    assert set(modes.values()) == {0o644}


def test_links_in_the_place_of_files_are_not_followed(tmp_path: Path) -> None:
    """Root wrote through them, wherever they led."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".mode.json.{os.getpid()}").symlink_to(victim)
    (tmp_path / "mode.json").symlink_to(victim)
    state.write_mode(tmp_path, state.Mode("MPS"))
    assert victim.read_text() == "mine"
    assert state.read_mode(tmp_path).mode == "MPS"


def test_energy_of_the_dead_is_counted_once(device: Device) -> None:
    path = device.claims_directory / "0.claim"
    path.write_bytes(encode_claim(Claim("pod-a", 1, 0.0, 1, 1, energy_j=1e6)))
    before = device.reading().energy_j
    assert before >= 1e6
    device.tidy()
    assert not path.exists()
    assert before <= device.reading().energy_j < 2e6


A, GPU = PodUid("uid-a"), GpuUuid("GPU-1")


@pytest.mark.parametrize(
    "measures",
    [
        {"memory_mib": -5},
        {"peak_memory_mib": 2**63},
        {"gpu_util_percent": float("nan")},
        {"power_w": float("inf")},
        {"step_time_seconds": -1.0},
        {"pod_uid": PodUid("\ud800")},
        {"pod_uid": PodUid("x" * 1000)},
    ],
)
def test_tenant_that_the_api_server_would_refuse_is_left_out_alone(measures) -> None:
    """The status is one object: one bad tenant kept every partition of the node from becoming Ready."""
    good = Tenant(pod_uid=A, gpu_uuid=GPU, memory_mib=5)
    bad = Tenant(**{"pod_uid": PodUid("uid-bad"), "gpu_uuid": GPU, **measures})
    fine, left_out = presentable([bad, good], frozenset())
    assert fine == [good]
    assert len(left_out) == 1


def test_too_many_tenants_do_not_crowd_out_those_with_a_reservation() -> None:
    crowd = [Tenant(pod_uid=PodUid(f"uid-{i:05}"), gpu_uuid=GPU) for i in range(5000)]
    fine, left_out = presentable([*crowd, Tenant(pod_uid=PodUid("uid-z"), gpu_uuid=GPU)], {PodUid("uid-z")})
    assert (len(fine), len(left_out)) == (1024, 3977)
    assert fine[-1].pod_uid == "uid-z"


@pytest.mark.parametrize(
    ("memory_mib", "limit_mib", "is_told"), [(2001, 2000, True), (2000, 2000, False), (9, None, False)]
)
def test_pod_whose_processes_take_more_than_its_limit_together_is_told(reserve, memory_mib, limit_mib, is_told) -> None:
    """MPS holds each process to the limit, the ledger counts it once for the pod: nobody noticed the difference."""
    tenant = Tenant(pod_uid=A, gpu_uuid=GPU, memory_mib=memory_mib)
    found = above_limit([tenant], [reserve("a", GPU, mode=SharingMode.MPS, memory_limit_mib=limit_mib)])
    assert [*found] == ([(A, GPU)] if is_told else [])
    assert all("default/a to take at most 2,000 MiB together, found 2,001 MiB" in why for why in found.values())
