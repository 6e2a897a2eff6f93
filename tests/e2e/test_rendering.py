"""What the harness renders, without starting anything."""

import json
import re
from pathlib import Path

import pytest
import yaml
from carpool_e2e import binaries, chart, controlplane, fleet, images, nodes, processes
from carpool_e2e.cluster import FULL, running
from carpool_e2e.errors import HarnessError, MissingError
from carpool_e2e.nodes import NodeFiles

FILES = NodeFiles(Path("/state/n0"), "a100", "cp0-a100")
TOOLS = [(module, tool) for module in binaries.MODULES for tool in module.tools]


@pytest.mark.parametrize(("module", "tool"), TOOLS, ids=lambda each: each.name)
def test_every_tool_is_pinned_and_stamped(module: binaries.Module, tool: binaries.Tool) -> None:
    assert module.version.startswith("v")
    command = binaries.build_command(module, tool, Path("/out"))
    assert command[-1] == tool.package
    assert not [part for part in command if "{" in part]


def test_named_assets_come_first_then_kubebuilders_then_the_cache(tmp_path: Path) -> None:
    module = binaries.MODULES[1]
    tool = module.tools[0]
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path / "nowhere")}
    assert binaries.find(tool, module, environ) is None
    built = binaries.cache_folder(module, environ) / "etcd"
    for file in (built, tmp_path / "assets" / "etcd", tmp_path / "named"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert binaries.find(tool, module, environ) == built
    environ["KUBEBUILDER_ASSETS"] = str(tmp_path / "assets")
    assert binaries.find(tool, module, environ) == tmp_path / "assets" / "etcd"
    environ["TEST_ASSET_ETCD"] = str(tmp_path / "named")
    assert binaries.find(tool, module, environ) == tmp_path / "named"


def test_a_named_asset_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    module = binaries.MODULES[0]
    with pytest.raises(MissingError, match="TEST_ASSET_KUBE_APISERVER=/none: expected a binary"):
        binaries.find(module.tools[0], module, {"TEST_ASSET_KUBE_APISERVER": "/none", "XDG_CACHE_HOME": str(tmp_path)})


def test_a_binary_of_another_version_on_the_path_is_passed_over(tmp_path: Path) -> None:
    module = binaries.MODULES[0]
    kubectl = next(tool for tool in module.tools if tool.name == "kubectl")
    found = tmp_path / "bin" / "kubectl"
    found.parent.mkdir()
    found.write_text("#!/bin/sh\necho Client Version: v1.27.16\n")
    found.chmod(0o755)
    environ = {"PATH": str(found.parent), "XDG_CACHE_HOME": str(tmp_path)}
    assert binaries.find(kubectl, module, environ) is None
    found.write_text("#!/bin/sh\necho Client Version: v1.36.9\n")
    assert binaries.find(kubectl, module, environ) == found


def test_images_are_built_and_named_by_a_copy_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the archive was named by the sources before a build that read them minutes later."""
    project, folders = tmp_path / "project", [tmp_path / name for name in "abc"]
    project.mkdir()
    (project / ".dockerignore").write_text("*\n!code.py\n")
    (project / "Dockerfile").touch()
    (project / "code.py").write_text("1")
    (project / "other.py").touch()
    monkeypatch.setattr(images, "PROJECT", project)
    first = images.copy_sources(folders[0], "commit")
    assert images.copy_sources(folders[1], "commit") == first != images.copy_sources(folders[2], "another")
    (project / "code.py").write_text("2")
    assert sorted(path.name for path in folders[0].iterdir()) == ["Dockerfile", "code.py"]
    assert (folders[0] / "code.py").read_text() == "1"
    assert images.copy_sources(folders[1], "commit") != first


def test_links_of_different_clusters_and_nodes_share_no_address() -> None:
    links = [nodes.link_of(f"cp{slot}", slot, index) for slot in range(64) for index in range(16)]
    assert len({link.host_address for link in links} | {link.node_address for link in links}) == 2 * len(links)
    assert max(len(link.name) for link in links) <= 15, "the kernel takes no longer names"
    with pytest.raises(HarnessError, match="at most 16"):
        nodes.link_of("cp0", 0, 16)


def test_a_fleet_node_keeps_pods_away_that_would_never_start_there() -> None:
    """Regression: a job without a wish for a product landed on such a node and held its GPU for ever."""
    (taint,) = fleet.node_object(fleet.FleetNode("t4-00", 8))["spec"]["taints"]
    assert taint["effect"] == "NoSchedule"
    assert {key: fleet.TOLERATION[key] for key in ("key", "value", "effect")} == taint


def test_every_image_is_built_from_the_constraints() -> None:
    """Regression: pip took whatever was newest, because the file never reached the build."""
    root = Path(__file__).parents[2]
    commands = re.findall(r"install .*carpool-", (root / "Dockerfile").read_text())
    assert len(commands) == 3
    assert all(" -c constraints.txt " in command for command in commands)
    assert "!constraints.txt" in (root / ".dockerignore").read_text().splitlines()


WORKLOAD = """
kind: Deployment
metadata: {name: w}
spec:
  template:
    spec:
      serviceAccountName: account
      containers:
        - name: c
          command: [kube-scheduler]
          args: [--config=/etc/app/config.yaml, --secure-port=10259]
          env:
            - {name: CERT, value: /etc/tls/tls.crt}
            - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
            - {name: ADDRESS, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
          volumeMounts:
            - {name: config, mountPath: /etc/app}
            - {name: tls, mountPath: /etc/tls}
            - {name: host, mountPath: /var/lib/kubelet}
      volumes:
        - {name: config, configMap: {name: config}}
        - {name: tls, secret: {secretName: tls, items: [{key: server.crt, path: tls.crt}]}}
        - {name: host, hostPath: {path: /var/lib/kubelet}}
"""
OBJECTS = """
{kind: ConfigMap, metadata: {name: config}, data: {config.yaml: "certFile: /etc/tls/tls.crt, at: 127.0.0.1:8888"}}
---
{kind: Secret, metadata: {name: tls}, data: {server.crt: Y2VydA==, server.key: a2V5}}
"""


def test_a_container_becomes_a_process_with_the_charts_own_arguments(tmp_path: Path) -> None:
    rendered = chart.Rendered(tuple(yaml.safe_load_all(OBJECTS)))
    adaptation = chart.Adaptation(
        tmp_path, "n1", "198.18.0.2", {"127.0.0.1:8888": "127.0.0.1:21005", "=10259": "=21006"}, {"X": "y"}
    )
    local = chart.localize(rendered, yaml.safe_load(WORKLOAD), "c", adaptation)
    tls = tmp_path / "c" / "etc" / "tls"
    assert local.command == ["kube-scheduler", f"--config={tmp_path}/c/etc/app/config.yaml", "--secure-port=21006"]
    assert local.environment == {"CERT": f"{tls}/tls.crt", "NODE": "n1", "ADDRESS": "198.18.0.2", "X": "y"}
    assert local.files == {
        tmp_path / "c" / "etc" / "app" / "config.yaml": f"certFile: {tls}/tls.crt, at: 127.0.0.1:21005",
        tls / "tls.crt": "cert",
    }
    local.write_files()
    assert (tls / "tls.crt").stat().st_mode & 0o777 == 0o600


def test_a_kubeconfig_that_is_being_read_stays_whole(tmp_path: Path) -> None:
    """Regression: the extender read the file that was just being written again for the scheduler beside it."""
    plane = controlplane.ControlPlane(tmp_path, processes.choose(0), {"admin": "a"})
    plane.pki.mkdir()
    plane.ca_file.write_text("authority")
    with plane.write_kubeconfig("account", "first").open() as reader:
        again = plane.write_kubeconfig("account", "second")
        assert json.load(reader)["users"][0]["user"]["token"] == "first"
    assert json.loads(again.read_text())["users"][0]["user"]["token"] == "second"
    assert again.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.glob("*kubeconfig*")] == ["account.kubeconfig"]


def test_no_cluster_starts_with_packages_that_its_containers_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a PYTHONPATH to another checkout no training started, and tests waited for its measurements."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere/e2e")
    with pytest.raises(HarnessError, match="expected no PYTHONPATH"), running(FULL):
        pass
