"""The configuration of kube-scheduler, and the certificates between it and the extender."""

import base64
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_core.keys import RESOURCE_GPU, SCHEDULER_NAME
from carpool_e2e.binaries import ensure

pytestmark = pytest.mark.e2e

PLUGIN_POINTS_AT_MOST = 100 * 20
"""The default plugins score 0..100, and their weights add up to less than 20."""


def config(chart: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(chart.one("ConfigMap", "carpool-scheduler")["data"]["config.yaml"])
    assert isinstance(loaded, dict)
    return loaded


def files(chart: Any) -> dict[str, bytes]:
    data = chart.one("Secret", "carpool-scheduler")["data"]
    return {name: base64.b64decode(value, validate=True) for name, value in data.items()}


def test_it_is_a_second_scheduler_that_sees_every_node(chart: Any) -> None:
    found = config(chart)
    assert (found["apiVersion"], found["kind"]) == ("kubescheduler.config.k8s.io/v1", "KubeSchedulerConfiguration")
    assert [profile["schedulerName"] for profile in found["profiles"]] == [SCHEDULER_NAME]
    assert found["percentageOfNodesToScore"] == 100
    lease = {"resourceNamespace": "carpool-system", "resourceName": "carpool-scheduler"}
    assert found["leaderElection"] == {"leaderElect": True, **lease}


def test_preconditions_reach_the_extender_only_where_they_are_set(render: Any) -> None:
    asked = {"CARPOOL_MOST_SM_ACTIVE", "CARPOOL_MOST_JOINT_SM_ACTIVE", "CARPOOL_LEAST_FREE_MIB", "CARPOOL_MOST_JOBS"}
    shipped = render().environment("extender")
    assert asked.isdisjoint(shipped)
    assert shipped["CARPOOL_SLOWDOWN_QUANTILE"] == "median"
    limits = {"mostSmActive": 0.8, "leastFreeMib": 5120, "mostJobs": 2}
    settings = {"jobPolicies": True, "countPeaks": False, "slowdownQuantile": "upper", "preconditions": limits}
    found = render(settings=settings).environment("extender")
    assert found["CARPOOL_SLOWDOWN_QUANTILE"] == "upper"
    assert {name: found[name] for name in asked & found.keys()} == {
        "CARPOOL_MOST_SM_ACTIVE": "0.8",
        "CARPOOL_LEAST_FREE_MIB": "5120",
        "CARPOOL_MOST_JOBS": "2",
    }
    assert found["CARPOOL_JOB_POLICIES"] == "true"
    assert found["CARPOOL_COUNT_PEAKS"] == "false"


def test_the_extender_decides(chart: Any) -> None:
    (extender,) = config(chart)["extenders"]
    weight = extender.pop("weight")
    assert 1 * weight * 10 > PLUGIN_POINTS_AT_MOST
    assert extender["managedResources"] == [{"name": RESOURCE_GPU, "ignoredByScheduler": False}]
    assert (extender["ignorable"], extender["enableHTTPS"], extender["nodeCacheCapable"]) == (False, True, True)


def test_the_scheduler_waits_longer_than_a_bind_may_take(render: Any) -> None:
    chart = render(settings={"bindTimeoutSeconds": 45})
    assert chart.environment("extender")["CARPOOL_BIND_TIMEOUT_SECONDS"] == "45"
    assert config(chart)["extenders"][0]["httpTimeout"] == "55s"


def test_a_changed_configuration_restarts_the_scheduler(render: Any, chart: Any) -> None:
    def checksum(of: Any) -> Any:
        annotations = of.one("Deployment", "carpool-scheduler")["spec"]["template"]["metadata"]["annotations"]
        return annotations["checksum/config"]

    assert checksum(render(settings={"bindTimeoutSeconds": 46})) != checksum(chart)


def test_the_extender_listens_where_the_scheduler_calls(chart: Any) -> None:
    found = chart.environment("extender")
    assert config(chart)["extenders"][0]["urlPrefix"] == (
        f"https://{found['CARPOOL_EXTENDER_HOST']}:{found['CARPOOL_EXTENDER_PORT']}"
    )


def test_each_side_is_given_its_own_key_and_finds_every_file(chart: Any) -> None:
    volumes = {
        v["name"]: v for v in chart.one("Deployment", "carpool-scheduler")["spec"]["template"]["spec"]["volumes"]
    }
    for container, volume, own in (("kube-scheduler", "client-tls", "client"), ("extender", "server-tls", "server")):
        mounts = {m["name"]: m for m in chart.containers[container]["volumeMounts"]}
        assert mounts[volume] == {"name": volume, "mountPath": "/etc/carpool/tls", "readOnly": True}
        assert {item["path"] for item in volumes[volume]["secret"]["items"]} == {"ca.crt", f"{own}.crt", f"{own}.key"}
    variables = chart.environment("extender")
    assert variables["CARPOOL_EXTENDER_TLS_CERT"] == "/etc/carpool/tls/server.crt"
    assert variables["CARPOOL_EXTENDER_TLS_KEY"] == "/etc/carpool/tls/server.key"
    assert variables["CARPOOL_EXTENDER_CLIENT_CA"] == "/etc/carpool/tls/ca.crt"


def test_mutual_tls_refuses_clients_without_a_certificate(chart: Any, tmp_path: Path) -> None:
    for name, content in files(chart).items():
        (tmp_path / name).write_bytes(content)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "ca.crt")
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    stranger = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    client.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    assert shake_hands(client, server) is None
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(shake_hands(stranger, server))


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLError | None:
    """Let the two sides talk in memory; the error of whoever hung up, None where they agreed."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    agreed = [False, False]
    for _ in range(10):
        for number, side in enumerate(sides):
            try:
                side.do_handshake()
                agreed[number] = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
        if all(agreed):
            return None
    raise AssertionError("the handshake never ended")


def test_certificates_of_the_user_replace_those_of_the_chart(render: Any) -> None:
    chart = render(scheduler={"tls": {"existingSecret": "mine"}})
    assert chart.all("Secret") == []
    volumes = chart.one("Deployment", "carpool-scheduler")["spec"]["template"]["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in volumes if "secret" in v] == ["mine", "mine"]


def test_the_authoritys_key_is_kept_nowhere(chart: Any) -> None:
    assert sorted(files(chart)) == ["ca.crt", "client.crt", "client.key", "server.crt", "server.key"]


def test_the_stock_scheduler_can_read_it(chart: Any, tmp_path: Path) -> None:
    """The binary itself parses the file strictly; it then ends because there is no cluster."""
    (tmp_path / "tls").mkdir()
    for name, content in files(chart).items():
        (tmp_path / "tls" / name).write_bytes(content)
    text = chart.one("ConfigMap", "carpool-scheduler")["data"]["config.yaml"]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], "
        "contexts: [{name: c, context: {cluster: c}}], current-context: c}"
    )
    text = (
        text.replace("/etc/carpool/tls", str(tmp_path / "tls")) + f"\nclientConnection: {{kubeconfig: {kubeconfig}}}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    scheduler = ensure(["kube-scheduler"])["kube-scheduler"]
    file, out = tmp_path / "config.yaml", tmp_path / "out.yaml"
    command = [scheduler, f"--config={file}", f"--write-config-to={out}", "--secure-port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert out.exists(), done.stderr
    written = yaml.safe_load(out.read_text())
    assert written["extenders"][0]["httpTimeout"] == "30s"
    assert written["podMaxBackoffSeconds"] == 2
