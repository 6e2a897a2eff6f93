"""GPUs behind NVML: description, compute mode, access, MIG switching, reservations and crashes."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from agent_world import GpuAgent, World, agent_on, first_gpu, mig_node, states, status_of
from carpool_core.kube.api import NODES
from carpool_core.kube.errors import Overloaded
from carpool_core.resources.node import Reservation
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode
from carpool_deviceplugin import cdi
from carpool_deviceplugin.cdi import NvidiaCdi
from carpool_deviceplugin.gpu import Access, DeviceError, NoDevicesError, SetMode
from carpool_deviceplugin.mig import MigDevice, MigTable, Placement
from carpool_deviceplugin.mig_instances import create_instance
from carpool_deviceplugin.nvlib import linked_gpus
from carpool_deviceplugin.nvml_devices import NvmlDevices
from carpool_deviceplugin.partitions import plan
from carpool_deviceplugin.reconciler import MIG_CONFIG, NodeLabels
from carpool_deviceplugin.testing.gpus import HARDWARE
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node, running, uid, until
from carpool_deviceplugin.testing.nvml import FakeNvml
from carpool_e2e.chart import PROJECT

EXCLUSIVE, TIME_SLICING, MPS, MIG = SharingMode
READY, PREPARING, FAILED = PartitionState.READY, PartitionState.PREPARING, PartitionState.FAILED


@pytest.mark.parametrize("kind", list(HARDWARE))
def test_every_kind_of_gpu_is_described_and_unsupported_counters_are_absent(tmp_path: Path, kind: str) -> None:
    node = Node(FakeNvml([kind]), FakeMpsCommands(), tmp_path)
    devices = node.devices()
    (gpu,) = devices.uuids
    found = devices.describe(gpu)
    assert (found.product, found.health) == (HARDWARE[kind].product, DeviceHealth.HEALTHY)
    assert found.modes == [EXCLUSIVE, TIME_SLICING, MPS]
    assert found.reserved_mib == HARDWARE[kind].reserved_mib + 256
    assert len(found.mig_profiles) == (len(HARDWARE[kind].mig.profiles) if HARDWARE[kind].mig else 0)
    node.start(0, 42, "a", sm=0.5, dram=0.2)
    for _ in range(3):
        reading = devices.read(gpu)
        node.advance(1)
    assert ("DCGM_FI_PROF_SM_ACTIVE" in reading.counters.values) == HARDWARE[kind].has_gpm
    assert ("DCGM_FI_DEV_ROW_REMAP_FAILURE" in reading.counters.values) == HARDWARE[kind].has_row_remap
    (process,) = reading.processes
    assert (process.sm_s is not None) == HARDWARE[kind].has_gpm
    assert process.busy_s == pytest.approx(0.5, rel=0.1)


def test_nvlinks_are_reported(tmp_path: Path) -> None:
    a, b, alone = (
        Node(FakeNvml(kinds), FakeMpsCommands(), tmp_path / kinds[0]).devices()
        for kinds in (["H100"] * 3, ["A100-40"] * 2, ["T4"] * 2)
    )
    assert [d.nvlink_peers for d in a.inventory()] == [[u for u in a.uuids if u != uuid] for uuid in a.uuids]
    assert [d.nvlink_peers for d in b.inventory()] == [[b.uuids[1]], [b.uuids[0]]]
    assert [d.nvlink_peers for d in alone.inventory()] == [[], []]


@pytest.mark.parametrize(
    ("files", "found", "slots"),
    [
        (["0\n", "0\n", "1\n"], [0, 0, 1], [0, 1]),
        (["1\n", "1\n", "1\n"], [1, 1, 1], [1]),
        (["0\n", "-1\n", "1\n"], [0, None, 1], []),
        ([], [None, None, None], []),
    ],
    ids=["two-nodes", "one-node", "not-known-of-one", "no-files"],
)
def test_numa_nodes_are_those_of_the_pci_devices(tmp_path: Path, files, found, slots) -> None:
    """A slot may become any of the GPUs, so it has the nodes of all."""
    for bus, content in zip(("0000:10:00.0", "0000:11:00.0", "0000:12:00.0"), files, strict=False):
        (tmp_path / "sys/bus/pci/devices" / bus).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / bus / "numa_node").write_text(content)
    devices = Node(FakeNvml(["T4"] * 3), FakeMpsCommands(), tmp_path).devices()
    assert [d.numa_node for d in devices.inventory()] == found
    assert [*devices.numa_nodes] == slots


def test_gpus_at_the_same_switch_are_linked(node: Node) -> None:
    """On a machine with NVSwitch the links end at switches."""
    devices = node.devices()
    first, second = (devices.identity(uuid) for uuid in devices.uuids)
    switch, another = "00000000:C1:00.0", "00000000:C2:00.0"
    apart = [replace(first, nvlink_peers=(switch,)), replace(second, nvlink_peers=(another,))]
    together = [replace(first, nvlink_peers=(switch,)), replace(second, nvlink_peers=(another, switch))]
    for known, peers in ((apart, []), (together, [second.uuid])):
        assert linked_gpus(known[0], {one.uuid: one for one in known}) == peers


def test_process_of_the_host_keeps_new_work_away_and_is_named(node: Node) -> None:
    devices = node.devices()
    node.start(0, 42, None)
    first, second = devices.inventory()
    assert first.health is DeviceHealth.UNHEALTHY
    assert "process 42 (python (3)) on the GPU belong to no pod" in first.health_message
    assert second.health is DeviceHealth.HEALTHY
    with pytest.raises(DeviceError, match="found process 42"):
        devices.apply(devices.uuids[0], SetMode(TIME_SLICING))


def test_a_full_disk_is_an_error(node: Node) -> None:
    devices = node.devices()
    (node.root / "state").write_text("a file where a directory should be")
    with pytest.raises(DeviceError, match=r"expected to keep the GPU's mode there.*free some space|expected to read"):
        devices.apply(devices.uuids[0], SetMode(TIME_SLICING))


def test_damaged_mode_is_idle(node: Node) -> None:
    devices, gpu = first_gpu(node)
    devices.apply(gpu, SetMode(TIME_SLICING))
    (node.root / "state" / "gpus" / f"{gpu}.json").write_text('{"mode": "Tur')
    assert devices.actual(gpu).mode is None


@pytest.mark.parametrize(
    ("kinds", "failing", "message"),
    [([], "", "found a driver and none"), (["T4"], "nvmlDeviceGetName", "nvmlDeviceGetName failed: Unknown Error")],
)
def test_a_node_without_readable_gpus_is_an_error(tmp_path: Path, kinds: list[str], failing: str, message: str) -> None:
    nvml = FakeNvml(kinds)
    nvml.fail_next(failing, pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(NoDevicesError, match=message):
        Node(nvml, FakeMpsCommands(), tmp_path).devices()


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST, "#0: nvmlDeviceGetHandleByIndex failed: GPU is"),
        ("nvmlDeviceGetUUID", pynvml.NVML_ERROR_UNKNOWN, "#0: nvmlDeviceGetUUID failed: Unknown Error"),
        ("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_RESET_REQUIRED, "drain it and run nvidia-smi --gpu-reset"),
        ("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceGetMigMode failed"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED, "which shares the CPU's; Carpool does not"),
    ],
    ids=["lost", "no-uuid", "reset-required", "unknown-error", "unified-memory"],
)
async def test_one_unusable_gpu_of_eight_is_reported_and_the_others_are_used(
    tmp_path: Path, kube: FakeKube, function: str, code: int, reason: str
) -> None:
    """Regression: the agent did not start."""
    node = Node(FakeNvml(["H100"] * 8), FakeMpsCommands(), tmp_path)
    node.nvml.fail_next(function, code)
    devices = node.devices()
    assert len(devices.uuids) == 7
    async with running(agent_on(devices, tmp_path, kube)):
        condition, *_ = await until(lambda: status_of(kube).conditions)
    assert (condition.status, condition.reason) == ("True", "SomeGpusUnhealthy")
    assert condition.message.startswith("7 of 8 GPUs are healthy: ")
    assert reason in condition.message


@pytest.mark.parametrize(
    ("driver", "is_offered"), [("515.105.01", False), ("535.288.01", False), ("550.54.14", True), ("", True)]
)
async def test_mps_is_offered_from_driver_550_on(tmp_path: Path, kube, driver: str, is_offered: bool, reserve) -> None:
    """Regression: older daemons do not know `get_server_status`, so that pods with a fatal fault looked healthy."""
    node = Node(FakeNvml(["T4"]), FakeMpsCommands(), tmp_path)
    node.nvml.driver_version = driver
    devices = node.devices()
    assert (MPS in devices.describe(devices.uuids[0]).modes) == is_offered
    async with running(agent_on(devices, tmp_path, kube)):
        _, condition, *_ = await until(lambda: status_of(kube).conditions)
    assert (condition.type, condition.status) == ("MpsAvailable", str(is_offered))
    if not is_offered:
        assert f"expected driver 550 or newer for MPS, found {driver}" in condition.message
        refused = plan(devices.actual(devices.uuids[0]), [reserve("a", devices.uuids[0], mode=MPS)]).refused
        assert "expected a mode out of Exclusive, TimeSlicing, found MPS" in "".join(refused.values())


@pytest.mark.parametrize(
    ("compute_mode", "modes", "health"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, [EXCLUSIVE, TIME_SLICING, MPS], DeviceHealth.HEALTHY),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, [EXCLUSIVE, MPS], DeviceHealth.HEALTHY),
        (pynvml.NVML_COMPUTEMODE_PROHIBITED, [], DeviceHealth.UNHEALTHY),
    ],
)
def test_compute_mode_withdraws_the_modes_that_it_breaks(
    node: Node, compute_mode: int, modes: list[SharingMode], health: DeviceHealth
) -> None:
    """Regression: time-slicing was offered, and every second program failed."""
    node.nvml.gpus[0].compute_mode = compute_mode
    found = node.devices().inventory()[0]
    assert (found.modes, found.health) == (modes, health)
    assert ("nvidia-smi -i 0 -c 0" in found.health_message) == (not modes)


FIXTURES = Path(__file__).parent / "cdi"


@pytest.fixture
def agent(tmp_path: Path) -> GpuAgent:
    return GpuAgent(mig_node(tmp_path))


def specification(agent: GpuAgent, pod: str, check: Callable[[dict], None] = lambda _: None) -> dict:
    reservation = next(r for r in agent.worker._wanted if r.pod_uid == uid(pod))
    access = {agent.gpu: agent.devices.access(agent.gpu, reservation.pod_uid)}
    spec = cdi.specifications(reservation, ["slot-0"], access)["slot-0"]
    check(spec)
    return spec["devices"][0]["containerEdits"]


async def test_runtime_gets_the_mig_device(agent: GpuAgent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    names = {}
    for pod in "ab":
        env = dict(e.split("=", 1) for e in specification(agent, pod, valid_cdi)["env"])
        names[pod] = env["NVIDIA_VISIBLE_DEVICES"]
        assert (names[pod][:4], env["CARPOOL_GPU_MODE"]) == ("MIG-", "MIG")
        assert "CUDA_MPS_PIPE_DIRECTORY" not in env
    assert names["a"] != names["b"]


@pytest.mark.parametrize("listed", ["0", "0:0"], ids=["whole-gpu", "mig-device-of-another-pod"])
async def test_mig_access_is_composed_from_the_drivers_numbers(agent: GpuAgent, valid_cdi, listed: str) -> None:
    """Regression: an entry `0:0` with /dev/nvidia0 counted as the GPU, and opened another pod's instance."""
    (agent.node.root / "cdi").mkdir()
    theirs = [{"path": "/dev/nvidia0"}, {"path": "/dev/dri/card1"}]
    theirs += [{"path": f"/dev/nvidia-caps/nvidia-cap{minor}"} for minor in (12, 13) if ":" in listed]
    spec = {
        "kind": "nvidia.com/gpu",
        "devices": [{"name": listed, "containerEdits": {"deviceNodes": theirs}}],
        "containerEdits": {"deviceNodes": [{"path": "/dev/nvidiactl"}]},
    }
    (agent.node.root / "cdi" / "nvidia.json").write_text(json.dumps(spec))
    await agent.want(("a", "3g.20gb"))
    (instance,) = agent.instances.values()
    (agent.node.root / "mig-minors").write_text(
        f"config 1\nmonitor 2\ngpu0/gi{instance}/access 30\ngpu0/gi{instance}/ci0/access 31\ngpu0/gi9/access 66\n"
    )
    edits = specification(agent, "a", valid_cdi)
    caps = [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (30, 31)]
    assert [n["path"] for n in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia0", *caps]
    assert "NVIDIA_VISIBLE_DEVICES=void" in edits["env"]


NODES_OF_MIG = [("/dev/nvidia0", 195, 0)] + [(f"/dev/nvidia-caps/nvidia-cap{minor}", 236, minor) for minor in (30, 31)]


def composed(directory: Path) -> Access:
    """The access to a MIG device that the driver's numbers alone describe."""
    (directory / "minors").write_text("gpu0/gi1/access 30\ngpu0/gi1/ci0/access 31\n")
    (directory / "devices").write_text("Character devices:\n195 nvidia-frontend\n236 nvidia-caps\n\nBlock devices:\n")
    (directory / "nvidia.json").write_text('{"kind": "nvidia.com/gpu", "devices": []}')
    return NvidiaCdi([directory], directory / "minors", directory / "devices").mig_device(0, MigDevice("MIG-1", 1, 0))


def test_mig_device_nodes_need_no_file_on_the_node(tmp_path: Path) -> None:
    """Regression: nodes with only a path failed in the container runtime, because new instances have no file yet."""
    nodes = composed(tmp_path).edits["deviceNodes"]
    assert [(n["path"], n["major"], n["minor"]) for n in nodes] == NODES_OF_MIG
    assert {n["type"] for n in nodes} == {"c"}


@pytest.mark.vendor
@pytest.mark.parametrize("has_numbers", [True, False])
def test_the_cdi_library_injects_mig_device_nodes_without_files(tmp_path: Path, reserve, has_numbers: bool) -> None:
    """The library that containerd, CRI-O and NVIDIA's toolkit use."""
    spec = cdi.specifications(reserve("a"), ["slot-0"], {GpuUuid("GPU-1"): composed(tmp_path)})
    if not has_numbers:
        for node in spec["slot-0"]["devices"][0]["containerEdits"]["deviceNodes"]:
            del node["type"], node["major"], node["minor"]
    cdi.write(tmp_path / "specs", spec)
    command = ["go", "run", "./inject", str(tmp_path / "specs"), cdi.device_name("slot-0")]
    done = subprocess.run(command, cwd=PROJECT / "e2e/tools/nvidia", capture_output=True, text=True, check=False)
    if not has_numbers:
        assert (done.returncode, 'failed to stat CDI host device "/dev/nvidia0"' in done.stderr) == (1, True), (
            done.stderr
        )
        return
    found = json.loads(done.stdout)
    assert [(n["path"], n["major"], n["minor"]) for n in found["linux"]["devices"]] == NODES_OF_MIG
    assert "NVIDIA_VISIBLE_DEVICES=void" in found["process"]["env"]


async def test_specification_of_the_mig_device_itself_comes_first(agent: GpuAgent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"))
    device = next(iter(agent.node.nvml.gpus[0].mig.instances.values())).compute[0].uuid
    (agent.node.root / "cdi").mkdir()
    theirs = {"kind": "nvidia.com/gpu", "devices": [{"name": device, "containerEdits": {"env": ["THEIRS=1"]}}]}
    (agent.node.root / "cdi" / "nvidia.json").write_text(json.dumps(theirs))
    assert "THEIRS=1" in specification(agent, "a", valid_cdi)["env"]


async def test_pod_without_an_instance_gets_none(agent: GpuAgent) -> None:
    await agent.want(("a", "3g.20gb"))
    with pytest.raises(DeviceError, match="expected a MIG instance of pod other, found none"):
        agent.devices.access(agent.gpu, PodUid("other"))


@pytest.mark.parametrize("kind", ["A100-40", "H100"])
async def test_mode_is_switched_only_if_allowed_and_idle(tmp_path: Path, kind: str) -> None:
    agent = GpuAgent(mig_node(tmp_path, kind, on=False, may_switch=True))
    profile = "1g.5gb" if kind == "A100-40" else "1g.10gb"
    assert agent.devices.describe(agent.gpu).modes == [EXCLUSIVE, TIME_SLICING, MPS, MIG]
    assert states(await agent.want(("a", EXCLUSIVE))) == {"a": READY}
    agent.node.start(0, 42, "a")
    assert states(await agent.want(("b", profile))) == {"b": PREPARING}
    assert not agent.node.nvml.gpus[0].mig.is_enabled
    agent.node.end(0, 42)
    assert states(await agent.want(("b", profile))) == {"b": READY}
    assert agent.node.nvml.gpus[0].mig.is_enabled
    assert states(await agent.want(("c", TIME_SLICING))) == {"c": READY}
    assert not agent.node.nvml.gpus[0].mig.is_enabled


async def test_xids_are_reported_after_a_reset_in_place(tmp_path: Path) -> None:
    agent = GpuAgent(mig_node(tmp_path, on=False, may_switch=True))
    await agent.want(("a", "1g.5gb"))
    agent.node.nvml.raise_xid(0, 95)
    assert "XID 95" in agent.devices.describe(agent.gpu).health_message


@pytest.mark.parametrize(("may_switch", "modes"), [(False, []), (True, [EXCLUSIVE, TIME_SLICING, MPS])])
def test_mig_without_profiles_is_unhealthy(tmp_path: Path, may_switch: bool, modes: list[SharingMode]) -> None:
    """Regression: such a GPU was offered as a whole one, healthy, and its pods found no device."""
    node = mig_node(tmp_path, may_switch=may_switch)
    node.nvml.gpus[0].mig.table = MigTable(8, ())
    devices = node.devices()
    found = devices.describe(devices.uuids[0])
    assert (found.health, found.modes) == (DeviceHealth.UNHEALTHY, modes)
    assert "MIG is on, but the driver lists no MIG profile: switch it off (nvidia-smi -i 0 -mig 0)" in (
        found.health_message
    )


async def test_mode_is_not_switched_where_not_allowed(tmp_path: Path) -> None:
    agent = GpuAgent(mig_node(tmp_path, on=False))
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert (found.state, agent.node.nvml.gpus[0].mig.is_enabled) == (FAILED, False)
    assert "expected a mode out of Exclusive, MPS, TimeSlicing, found MIG" in found.message
    with pytest.raises(DeviceError, match=r"may not switch it; do it .* or set CARPOOL_MIG_SWITCH"):
        agent.devices.apply(agent.gpu, SetMode(MIG))


async def test_virtual_machine_cannot_reset_and_is_left_as_it_was(tmp_path: Path) -> None:
    agent = GpuAgent(mig_node(tmp_path, on=False, may_switch=True))
    agent.node.nvml.gpus[0].mig.can_reset = False
    found = (await agent.want(("a", "1g.5gb")))["a"]
    assert found.state is FAILED
    assert "takes a reset that cannot be made from here" in found.message
    mig = agent.node.nvml.gpus[0].mig
    assert (mig.is_enabled, mig.is_pending) == (False, False), "no later reset switches it by surprise"


async def test_gpu_with_instances_of_others_is_never_switched(tmp_path: Path) -> None:
    agent = GpuAgent(mig_node(tmp_path, may_switch=True))
    table = agent.node.nvml.gpus[0].mig.table
    create_instance(agent.devices.session, agent.gpu, Placement(table.find("1g.5gb"), 0))
    found = (await agent.want(("a", EXCLUSIVE)))["a"]
    assert found.state is FAILED
    assert "expected a mode out of MIG, found Exclusive" in found.message


async def test_hopper_forgets_its_mode_with_the_driver_and_is_divided_again(tmp_path: Path) -> None:
    agent = GpuAgent(mig_node(tmp_path, "H100", on=False, may_switch=True))
    await agent.want(("a", "3g.40gb"))
    agent.node.nvml.restart_driver()
    assert not agent.node.nvml.gpus[0].mig.is_enabled
    for _ in range(3):
        found = await agent.want(("a", "3g.40gb"))
    assert states(found) == {"a": READY}
    assert set(agent.instances) == {"3g.40gb@4"}


# Another manager.


class Labels:
    """The API server, as far as a Node's labels go."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.kube.seed(NODES, {"metadata": {"name": "n"}})

    async def set(self, value: str | None) -> None:
        await self.kube.patch(NODES, "n", {"metadata": {"labels": {MIG_CONFIG: value}}})

    def manager(self, devices: NvmlDevices) -> NodeLabels:
        return NodeLabels(NodeName("n"), self.kube, devices)


async def test_label_keeps_the_agent_off_and_running_pods_stay(tmp_path: Path) -> None:
    labels = Labels()
    asked: list[NodeLabels] = []
    agent = GpuAgent(mig_node(tmp_path), lambda: asked[0].read())
    asked.append(labels.manager(agent.devices))
    assert agent.devices.describe(agent.gpu).modes == [], "the label was not read yet"
    await asked[0].read()
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}
    agent.node.start(0, 42, "a", instance=next(iter(agent.instances.values())))
    await labels.set("all-1g.5gb")
    found = await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    assert states(found) == {"a": READY, "b": FAILED}, "the label is read before each change"
    assert f"the Node's label {MIG_CONFIG} is all-1g.5gb" in found["b"].message
    described = agent.devices.describe(agent.gpu)
    assert (described.modes, described.health) == ([], DeviceHealth.UNHEALTHY)
    agent.node.end(0, 42)
    await agent.want()
    assert len(agent.instances) == 1, "the other manager owns it"
    with pytest.raises(DeviceError, match="expected no other MIG manager"):
        agent.devices.apply(agent.gpu, SetMode(EXCLUSIVE))
    await labels.set(None)
    await asked[0].read()
    assert states(await agent.want(("c", "7g.40gb"))) == {"c": READY}


RELEASE, UPGRADE = "carpool.dev/release-gpus", "nvidia.com/gpu-driver-upgrade-state"


@pytest.mark.parametrize(
    ("key", "values", "back"),
    [(RELEASE, ["true"], None), (UPGRADE, ["cordon-required", "pod-restart-required"], "uncordon-required")],
)
async def test_label_releases_the_gpus_when_pods_have_ended_and_takes_them_back(
    tmp_path: Path, reserve, key: str, values: list[str], back: str | None
) -> None:
    """For a driver upgrade or a reset: until then, open handles keep the kernel module loaded."""
    world = World(tmp_path)
    nvml, mps = world.node.nvml, world.node.mps

    def pod(name: str) -> Reservation:
        return reserve(name, world.gpu, mode=MPS, pod_uid=uid(name))

    async def label(value: str | None) -> None:
        await world.kube.patch(NODES, "n", {"metadata": {"labels": {key: value}}})

    async with running(world.agent):
        await world.hold(pod("a"))
        world.node.start(0, 42, "a")
        mps.connect(str(world.pipe), 42)
        await label(values[0])
        await until(lambda: "closes its handles when pods and MPS" in world.status.devices[0].health_message)
        assert (nvml.is_open, len(mps.daemons)) == (True, 1), "its pod goes on"
        world.node.end(0, 42)
        await world.hold()
        await until(lambda: not nvml.is_open)
        await until(lambda: "the agent holds no handle of the GPUs" in world.status.devices[0].health_message)
        assert mps.daemons == {}
        await label(values[-1])
        await until(
            lambda: f"{key} is {values[-1]}: the agent holds no handle" in world.status.devices[0].health_message
        )
        nvml.restart_driver()
        nvml.driver_version = "595.45.04"
        await label(back)
        await world.hold(pod("b"))
        await until(lambda: world.devices.driver == "595.45.04")
        assert world.status.devices[0].health is DeviceHealth.HEALTHY


@pytest.mark.parametrize(
    ("state", "is_released"),
    [
        ("upgrade-required", False),
        ("cordon-required", True),
        ("wait-for-jobs-required", True),
        ("pod-deletion-required", True),
        ("drain-required", True),
        ("node-maintenance-required", True),
        ("post-maintenance-required", True),
        ("pod-restart-required", True),
        ("validation-required", True),
        ("upgrade-failed", True),
        ("a-state-of-a-newer-operator", True),
        ("uncordon-required", False),
        ("upgrade-done", False),
    ],
)
async def test_states_of_gpu_operators_driver_upgrade(tmp_path: Path, state: str, is_released: bool) -> None:
    """The states of NVIDIA/k8s-operator-libs; without the label no GPU is released."""
    labels = Labels()
    manager = labels.manager(mig_node(tmp_path).devices())
    await manager.read()
    assert manager.release_reason == ""
    await labels.kube.patch(NODES, "n", {"metadata": {"labels": {UPGRADE: state}}})
    assert await manager.read() == is_released
    assert bool(manager.release_reason) == is_released


async def test_label_that_cannot_be_read_stays_as_it_was(tmp_path: Path) -> None:
    labels = Labels()
    devices = mig_node(tmp_path).devices()
    manager = labels.manager(devices)
    labels.kube.fail_next("get", NODES, Overloaded("busy", status=500))
    assert not await manager.read()
    assert devices.describe(devices.uuids[0]).modes == []
    assert await manager.read()
    labels.kube.fail_next("get", NODES, Overloaded("busy", status=500))
    assert not await manager.read()
    assert devices.describe(devices.uuids[0]).modes == [MIG]


async def test_instances_come_and_go_with_reservations(agent: GpuAgent) -> None:
    assert agent.devices.describe(agent.gpu).modes == [MIG]
    assert states(await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))) == {"a": READY, "b": READY}
    assert {name.partition("@")[0] for name in agent.instances} == {"3g.20gb", "1g.5gb"}
    assert agent.devices.describe(agent.gpu).mode is MIG
    kept = agent.instances
    assert states(await agent.want(("b", "1g.5gb"), ("c", "2g.10gb"))) == {"b": READY, "c": READY}
    assert {name.partition("@")[0] for name in agent.instances} == {"1g.5gb", "2g.10gb"}
    assert [n for n in agent.instances if n.startswith("1g")] == [n for n in kept if n.startswith("1g")]
    await agent.want()
    assert agent.instances == {}
    assert agent.devices.actual(agent.gpu).mode is None


async def test_running_pods_keep_their_instances_and_others_wait(agent: GpuAgent) -> None:
    await agent.want(("a", "7g.40gb"))
    (instance,) = agent.instances.values()
    agent.node.start(0, 42, "a", instance=instance)
    found = (await agent.want(("b", "3g.20gb")))["b"]
    assert (found.state, agent.instances) == (PREPARING, {"7g.40gb@0": instance})
    assert f"waits for the processes of pod {uid('a')}" in found.message
    agent.node.end(0, 42)
    assert states(await agent.want(("b", "3g.20gb"))) == {"b": READY}
    assert set(agent.instances) == {"3g.20gb@4"}


async def test_idle_instance_is_used_again(agent: GpuAgent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "3g.20gb"))
    before = agent.instances
    assert states(await agent.want(("b", "3g.20gb"), ("c", "3g.20gb"))) == {"b": READY, "c": READY}
    assert agent.instances == before


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([("a", "4g.20gb"), ("b", "4g.20gb")], "expected room for 4g.20gb, 4g.20gb, found too little room in the way"),
        ([("a", "3g.20gb"), ("b", "7g.40gb")], "expected room for 3g.20gb, 7g.40gb"),
        ([("a", "1g.5gb"), ("b", "9g.90gb")], "expected migProfile out of 7g.40gb, 4g.20gb"),
        ([("a", "1g.5gb"), ("b", "1g.5gb/../../$(id)" + "x" * 500)], "expected migProfile out of 7g.40gb, 4g.20gb"),
        ([("a", "1g.5gb"), ("b", TIME_SLICING)], "expected a mode out of MIG, found TimeSlicing"),
    ],
)
async def test_a_profile_that_does_not_fit_fails_alone(agent: GpuAgent, wanted, message: str) -> None:
    found = await agent.want(*wanted)
    assert states(found) == {"a": READY, "b": FAILED}
    assert message in found["b"].message
    assert len(found["b"].message) < 400, "hostile names are cut"


async def test_instances_of_others_are_neither_given_out_nor_touched(agent: GpuAgent) -> None:
    session, table = agent.devices.session, agent.node.nvml.gpus[0].mig.table
    create_instance(session, agent.gpu, Placement(table.find("3g.20gb"), 0))
    theirs = agent.instances["3g.20gb@0"]
    agent.node.start(0, 99, "stranger", instance=theirs)
    agent.node.start(0, 98, None, instance=theirs)
    found = await agent.want(("a", "3g.20gb"), ("b", "3g.20gb"))
    assert states(found) == {"a": READY, "b": FAILED}
    assert f"found instance {theirs} (3g.20gb on memory slices 0-3) in the way" in found["b"].message
    assert agent.instances.keys() == {"3g.20gb@0", "3g.20gb@4"}
    assert agent.devices.describe(agent.gpu).health is DeviceHealth.HEALTHY, (
        "processes on foreign instances do not matter"
    )
    await agent.want()
    assert agent.instances == {"3g.20gb@0": theirs}
    assert agent.devices.actual(agent.gpu).mode is None


async def test_replaced_instance_belongs_to_its_creator(agent: GpuAgent) -> None:
    await agent.want(("a", "3g.20gb"))
    mig = agent.node.nvml.gpus[0].mig
    mig.instances.clear()
    create_instance(agent.devices.session, agent.gpu, Placement(mig.table.find("3g.20gb"), 4))
    await agent.want()
    assert set(agent.instances) == {"3g.20gb@4"}


async def test_a_new_agent_continues(agent: GpuAgent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    before = agent.instances
    agent.restart()
    assert states(await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))) == {"a": READY, "b": READY}
    assert agent.instances == before


async def test_running_pods_are_recognised_after_all_state_is_lost(agent: GpuAgent) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    before = agent.instances
    agent.node.start(0, 42, "a", instance=before["3g.20gb@4"])
    shutil.rmtree(agent.node.root / "state")
    agent.restart()
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}
    assert agent.instances == before, "an idle instance without a known creator stays"
    agent.node.end(0, 42)
    await agent.want()
    assert set(agent.instances) == {n for n in before if n.startswith("1g")}


@pytest.mark.parametrize(
    "function", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
async def test_a_failed_creation_is_reported_and_leaves_nothing_behind(agent: GpuAgent, function: str) -> None:
    agent.node.nvml.fail_next(function, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    found = (await agent.want(("a", "3g.20gb")))["a"]
    assert found.state is FAILED
    assert f"{function} failed" in found.message
    await agent.want()
    assert agent.instances == {}
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}


async def test_gpu_that_vanishes_during_a_plan(agent: GpuAgent) -> None:
    def vanish(name: str) -> None:
        if name == "nvmlGpuInstanceCreateComputeInstance":
            agent.node.nvml.gpus[0].is_lost = True

    agent.node.nvml.before_each(vanish)
    found = (await agent.want(("a", "3g.20gb"), ("b", "1g.5gb")))["a"]
    assert found.state is FAILED
    assert "fallen off the bus" in found.message
    agent.node.nvml.before_each(lambda _: None)
    agent.node.nvml.gpus[0].is_lost = False
    await agent.want()
    agent.node.advance(61)
    assert states(await agent.want(("a", "3g.20gb"))) == {"a": READY}
