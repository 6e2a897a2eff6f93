"""What a container gets of a divided GPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from carpool_core.values import PodUid
from carpool_deviceplugin.cdi import slots as cdi
from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.testing.mig_agent import MigAgent, mig_node
from carpool_deviceplugin.testing.nvml_node import uid

FIXTURES = Path(__file__).parent / "cdi"


@pytest.fixture
def agent(tmp_path: Path, reserve) -> MigAgent:
    return MigAgent(mig_node(tmp_path), reserve)


def specification(agent: MigAgent, pod: str, check: Callable[[dict], None] = lambda _: None) -> dict:
    reservation = next(r for r in agent.worker._wanted if r.pod_uid == uid(pod))
    access = {agent.gpu: agent.devices.access(agent.gpu, reservation.pod_uid)}
    spec = cdi.specifications(reservation, ["slot-0"], access)["slot-0"]
    check(spec)
    return spec["devices"][0]["containerEdits"]


async def test_runtime_is_told_the_mig_device(agent: MigAgent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"), ("b", "1g.5gb"))
    names = {}
    for pod in "ab":
        env = dict(e.split("=", 1) for e in specification(agent, pod, valid_cdi)["env"])
        names[pod] = env["NVIDIA_VISIBLE_DEVICES"]
        assert (names[pod][:4], env["CARPOOL_GPU_MODE"]) == ("MIG-", "MIG")
        assert "CUDA_MPS_PIPE_DIRECTORY" not in env
    assert names["a"] != names["b"]


async def test_specification_is_composed_of_the_gpus_and_the_instances_files(agent: MigAgent, valid_cdi) -> None:
    (agent.node.root / "cdi").mkdir()
    shutil.copy(FIXTURES / "host.yaml", agent.node.root / "cdi" / "nvidia.yaml")
    await agent.want(("a", "3g.20gb"))
    (instance,) = agent.instances.values()
    (agent.node.root / "mig-minors").write_text(
        f"config 1\nmonitor 2\ngpu0/gi{instance}/access 30\ngpu0/gi{instance}/ci0/access 31\ngpu0/gi9/access 66\n"
    )
    edits = specification(agent, "a", valid_cdi)
    nodes = [n["path"] for n in edits["deviceNodes"]]
    assert {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"} <= set(nodes)
    assert "/dev/nvidia-caps/nvidia-cap66" not in nodes
    assert "NVIDIA_VISIBLE_DEVICES=void" in edits["env"]


async def test_specification_of_the_mig_device_itself_comes_first(agent: MigAgent, valid_cdi) -> None:
    await agent.want(("a", "3g.20gb"))
    device = next(iter(agent.node.nvml.gpus[0].mig.instances.values())).compute[0].uuid
    (agent.node.root / "cdi").mkdir()
    theirs = {"kind": "nvidia.com/gpu", "devices": [{"name": device, "containerEdits": {"env": ["THEIRS=1"]}}]}
    (agent.node.root / "cdi" / "nvidia.json").write_text(json.dumps(theirs))
    assert "THEIRS=1" in specification(agent, "a", valid_cdi)["env"]


async def test_pod_without_an_instance_gets_none(agent: MigAgent) -> None:
    await agent.want(("a", "3g.20gb"))
    with pytest.raises(DeviceError, match="expected a MIG instance of pod other, found none"):
        agent.devices.access(agent.gpu, PodUid("other"))
