"""The configuration of kube-scheduler, and the certificates between it and the extender."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_core.clock import SystemClock
from carpool_core.keys import RESOURCE_GPU, SCHEDULER_NAME
from carpool_e2e.binaries import ensure
from carpool_extender.certificates import Certificates
from carpool_extender.settings import TlsSettings

pytestmark = pytest.mark.e2e

SIDES = ("kube-scheduler", "extender")
FILES_OF_CERT_MANAGER = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}

PLUGIN_POINTS_AT_MOST = 100 * 20
"""The default plugins score 0..100, and their weights add up to less than 20."""


def config(chart: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(chart.one("ConfigMap", "carpool-scheduler")["data"]["config.yaml"])
    assert isinstance(loaded, dict)
    return loaded


def pod(chart: Any) -> dict[str, Any]:
    found = chart.one("Deployment", "carpool-scheduler")["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def test_it_is_a_second_scheduler_that_sees_every_node(chart: Any) -> None:
    found = config(chart)
    assert (found["apiVersion"], found["kind"]) == ("kubescheduler.config.k8s.io/v1", "KubeSchedulerConfiguration")
    assert [profile["schedulerName"] for profile in found["profiles"]] == [SCHEDULER_NAME]
    assert found["percentageOfNodesToScore"] == 100
    lease = {"resourceNamespace": "carpool-system", "resourceName": "carpool-scheduler"}
    times = {"leaseDuration": "12s", "renewDeadline": "8s"}
    assert found["leaderElection"] == {"leaderElect": True, **times, **lease}


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


def test_the_extender_makes_the_certificates_and_the_scheduler_gets_its_own_folder(chart: Any) -> None:
    """The extender's key never leaves its container; nothing is stored in the cluster."""
    assert chart.all("Secret") == []
    (volume,) = [v for v in pod(chart)["volumes"] if v["name"] == "tls"]
    assert volume["emptyDir"]["medium"] == "Memory"
    mounts = {name: {m["name"]: m for m in chart.containers[name]["volumeMounts"]}["tls"] for name in SIDES}
    folder = {"name": "tls", "mountPath": "/etc/carpool/tls"}
    assert mounts == {"extender": folder, "kube-scheduler": {**folder, "subPath": "client", "readOnly": True}}
    assert chart.environment("extender")["CARPOOL_EXTENDER_TLS_DIR"] == folder["mountPath"]
    (extender,) = pod(chart)["initContainers"]
    assert (extender["name"], extender["restartPolicy"]) == ("extender", "Always"), "it starts before the scheduler"


def test_certificates_of_the_user_replace_those_of_the_extender(render: Any) -> None:
    """In the form in which cert-manager writes them."""
    chart = render(scheduler={"tls": {"existingSecret": "mine"}})
    assert chart.all("Secret") == []
    (volume,) = [v for v in pod(chart)["volumes"] if v["name"] == "tls"]
    assert volume["secret"]["secretName"] == "mine"
    for name in SIDES:
        assert {"name": "tls", "mountPath": "/etc/carpool/tls", "readOnly": True} in chart.containers[name][
            "volumeMounts"
        ]
    found, (asked,) = chart.environment("extender"), config(chart)["extenders"]
    assert "CARPOOL_EXTENDER_TLS_DIR" not in found
    names = ("CARPOOL_EXTENDER_TLS_CERT", "CARPOOL_EXTENDER_TLS_KEY", "CARPOOL_EXTENDER_CLIENT_CA")
    expected = {f"{what}File": f"/etc/carpool/tls/{file}" for what, file in FILES_OF_CERT_MANAGER.items()}
    assert dict(zip(expected, (found[name] for name in names), strict=True)) == asked["tlsConfig"] == expected


def test_the_stock_scheduler_can_read_it(chart: Any, tmp_path: Path) -> None:
    """The binary itself parses the file strictly; it then ends because there is no cluster."""
    Certificates(TlsSettings(tmp_path / "tls"), SystemClock()).files()
    text = chart.one("ConfigMap", "carpool-scheduler")["data"]["config.yaml"]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], "
        "contexts: [{name: c, context: {cluster: c}}], current-context: c}"
    )
    text = (
        text.replace("/etc/carpool/tls", str(tmp_path / "tls" / "client"))
        + f"\nclientConnection: {{kubeconfig: {kubeconfig}}}\n"
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
