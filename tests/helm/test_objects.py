"""What is installed: names, labels, containers and their settings."""

import importlib
import json
import re
from typing import Any

import click
import pytest

pytestmark = pytest.mark.e2e

COMMANDS = {
    "operator": ("carpool_operator.commands", "operator"),
    "extender": ("carpool_extender.commands", "extender"),
    "agent": ("carpool_deviceplugin.commands", "agent"),
}
"""Container → where the command is that it runs."""


def containers_of(template: dict[str, Any]) -> list[dict[str, Any]]:
    """The extender is an init container that goes on, which starts before the scheduler."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def test_every_object_has_the_common_labels_and_its_namespace(chart: Any) -> None:
    policies = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    cluster_scoped = ("ClusterRole", "ClusterRoleBinding", *policies)
    for one in chart.objects:
        if one["kind"] == "CustomResourceDefinition":
            continue
        labels = {key.removeprefix("app.kubernetes.io/") for key in one["metadata"]["labels"]}
        assert {"name", "instance", "component", "version", "managed-by", "part-of"} <= labels, one["metadata"]["name"]
        wanted = None if one["kind"] in cluster_scoped else "carpool-system"
        if one["metadata"]["name"] == "carpool-scheduler-authentication-reader":
            wanted = "kube-system"
        assert one["metadata"].get("namespace") == wanted, one["metadata"]["name"]


def test_names_follow_the_release_and_the_schedulers_name_does_not(render: Any) -> None:
    other = render(release="gpus", namespaceOverride="elsewhere")
    assert other.one("Deployment", "gpus-carpool-scheduler")["metadata"]["namespace"] == "elsewhere"
    assert (
        "schedulerName: carpool-scheduler\n" in other.one("ConfigMap", "gpus-carpool-scheduler")["data"]["config.yaml"]
    )
    assert other.one("Deployment", "gpus-carpool-operator")["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "carpool",
        "app.kubernetes.io/instance": "gpus",
        "app.kubernetes.io/component": "operator",
    }


def test_operators_elect_a_leader_by_the_lease_of_the_chart(render: Any) -> None:
    chart = render(operator={"replicas": 2})
    spec, lease = chart.one("Deployment", "carpool-operator")["spec"], chart.one("Lease", "carpool-operator")
    [container] = spec["template"]["spec"]["containers"]
    name = f"{lease['metadata']['namespace']}/{lease['metadata']['name']}"
    assert {"name": "CARPOOL_OPERATOR_LEASE", "value": name} in container["env"]
    of_pod = {"fieldRef": {"fieldPath": "metadata.name"}}
    assert {"name": "CARPOOL_OPERATOR_IDENTITY", "valueFrom": of_pod} in container["env"], "two pods of one host differ"
    assert spec["replicas"] == 2


OF_PODS = {"podLabels": {"team": "ml", "app.kubernetes.io/name": "stolen"}, "podAnnotations": {"a": "b"}}
ROLE = {"serviceAccount": {"annotations": {"role": "x"}}}
VARIABLE = [{"name": "CARPOOL_CANDIDATES", "value": "3"}]


def test_pods_and_accounts_take_labels_annotations_and_variables(render: Any) -> None:
    spread = [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}]
    chart = render(
        operator={**OF_PODS, **ROLE, "extraEnv": VARIABLE, "topologySpreadConstraints": spread},
        scheduler={**OF_PODS, **ROLE, "topologySpreadConstraints": spread},
        extender={"extraEnv": VARIABLE},
        nodeAgent={**OF_PODS, **ROLE, "extraEnv": VARIABLE},
        board={**OF_PODS, **ROLE, "enabled": True, "extraEnv": VARIABLE, "topologySpreadConstraints": spread},
        revisionHistoryLimit=1,
    )
    for workload in chart.workloads:
        metadata = workload["spec"]["template"]["metadata"]
        assert (metadata["labels"]["team"], metadata["labels"]["app.kubernetes.io/name"]) == ("ml", "carpool")
        assert metadata["annotations"]["a"] == "b"
        assert workload["spec"]["revisionHistoryLimit"] == 1
        expected = spread if workload["kind"] == "Deployment" else None
        assert workload["spec"]["template"]["spec"].get("topologySpreadConstraints") == expected
    assert [account["metadata"]["annotations"] for account in chart.all("ServiceAccount")] == [{"role": "x"}] * 4
    assert [chart.environment(name)["CARPOOL_CANDIDATES"] for name in (*COMMANDS, "board")] == ["3"] * 4


def test_several_replicas_have_a_disruption_budget(render: Any) -> None:
    assert render().all("PodDisruptionBudget") == []
    two = {"replicas": 2}
    budgets = render(scheduler=two, operator=two, board=two).all("PodDisruptionBudget")
    assert [one["metadata"]["name"] for one in budgets] == ["carpool-operator", "carpool-scheduler"]
    chart = render(scheduler=two, operator=two, board={**two, "enabled": True})
    assert [one["spec"]["maxUnavailable"] for one in chart.all("PodDisruptionBudget")] == [1, 1, 1]
    for workload in chart.all("Deployment"):
        spec = workload["spec"]
        [term] = spec["template"]["spec"]["affinity"]["podAntiAffinity"].values()
        assert term[0]["podAffinityTerm"]["labelSelector"] == spec["selector"], "replicas are on different nodes"
        assert spec["replicas"] == 2


def test_network_policies_leave_the_ports_of_metrics_and_health(render: Any) -> None:
    assert render().all("NetworkPolicy") == []
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    proxy = [{"podSelector": {"matchLabels": {"app": "oauth2-proxy"}}}]
    chart = render(networkPolicies={"enabled": True, "from": peers}, board={"enabled": True, "from": proxy})
    component = "app.kubernetes.io/component"
    policies = {one["metadata"]["labels"][component]: one["spec"] for one in chart.all("NetworkPolicy")}
    for workload in chart.workloads:
        template = workload["spec"]["template"]
        name = template["metadata"]["labels"][component]
        spec = policies.pop(name)
        assert spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        served = {port["containerPort"] for one in containers_of(template) for port in one.get("ports", ())}
        rules = spec.get("ingress", [])
        assert {port["port"] for rule in rules for port in rule["ports"]} == served
        assert all(rule["from"] == (proxy if name == "board" else peers) for rule in rules)
    assert policies == {}


@pytest.mark.parametrize("name", ["carpool-node-agent", "carpool-mps"])
def test_agents_and_mps_have_the_selinux_labels_of_the_values(render: Any, name: str) -> None:
    """Regression: the MPS pod had none, so it could not write its directories."""
    labels = {"type": "spc_t", "level": "s0"}
    pods = render(nodeAgent={"seLinuxOptions": labels}).one("DaemonSet", name)["spec"]["template"]["spec"]
    assert pods["securityContext"]["seLinuxOptions"] == labels


def test_agents_run_on_tainted_gpu_nodes_that_were_given_to_carpool(chart: Any) -> None:
    spec = chart.one("DaemonSet", "carpool-node-agent")["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["nodeSelector"] == {"carpool.dev/node": "managed"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_serves_metrics_and_health(chart: Any, name: str) -> None:
    container = chart.containers[name]
    assert container["ports"] == [
        {"name": "metrics", "containerPort": int(chart.environment(name)["CARPOOL_METRICS_PORT"])}
    ]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_variable_is_a_setting_of_its_process_and_parses(render: Any, name: str) -> None:
    chart = render(
        settings={"namespaces": ["default", "team-a"]}, nodeAgent={"simulatedGpus": "NVIDIA A100-SXM4-40GB:4"}
    )
    assert chart.containers[name]["command"] + chart.containers[name]["args"] == ["carpool", COMMANDS[name][1]]
    command = getattr(importlib.import_module(COMMANDS[name][0]), COMMANDS[name][1])
    options = {p.envvar: p for p in command.params if isinstance(p, click.Option)}
    for variable, value in chart.environment(name).items():
        assert variable in options
        options[variable].type.convert(value, options[variable], None)


def test_extender_and_agents_count_the_same_slots(render: Any) -> None:
    chart = render(settings={"slotsPerGpu": 5})
    assert [chart.environment(name)["CARPOOL_SLOTS_PER_GPU"] for name in ("extender", "agent")] == ["5", "5"]


CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("name", ["operator", "kube-scheduler", "extender", "agent"])
def test_no_process_can_gain_privileges_or_write_its_own_files(render: Any, name: str) -> None:
    chart = render(nodeAgent={"simulatedGpus": "NVIDIA A100-SXM4-40GB:4"})
    assert chart.containers[name]["securityContext"] == CONFINED


def agent_pod(chart: Any) -> Any:
    return chart.one("DaemonSet", "carpool-node-agent")["spec"]["template"]["spec"]


def test_an_agent_of_real_gpus_has_one_capability_and_the_nodes_process_ids(render: Any) -> None:
    """docs/security.md says what each is for; `privileged` would be all devices and all capabilities."""
    chart = render()
    assert chart.containers["agent"]["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    }
    assert chart.containers["mps"]["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN", "SETUID", "SETGID", "KILL"]},
        "appArmorProfile": {"type": "Unconfined"},
    }
    specifications = {"name": "etc-cdi", "mountPath": "/etc/cdi", "readOnly": True}
    assert chart.containers["mps"]["volumeMounts"] == [
        {"name": "state", "mountPath": "/var/lib/carpool"},
        {"name": "shm", "mountPath": "/run/carpool/shm"},
        {"name": "cdi", "mountPath": "/var/run/cdi", "readOnly": True},
        specifications,
    ]
    assert specifications in chart.containers["agent"]["volumeMounts"], "NVIDIA's may stand there, too"
    socket = chart.environment("agent")["CARPOOL_MPS_HOST"]
    assert f"--socket={socket}" in chart.containers["mps"]["args"], "both speak of one socket"
    pod = agent_pod(chart)
    assert (pod["hostPID"], pod["runtimeClassName"]) == (True, "nvidia")
    assert not {"hostNetwork", "hostIPC"} & pod.keys()
    environment = chart.environment("agent")
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert (environment["NVIDIA_MIG_CONFIG_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"]) == ("all", "all")
    assert (environment["CARPOOL_MIG_SWITCH"], environment["CARPOOL_DCGM_EXPORTER"]) == ("false", "")
    assert "CARPOOL_SIMULATED_GPUS" not in environment


def test_agent_and_mps_take_the_management_device(render: Any) -> None:
    """Regression: NVIDIA's toolkit from 1.18 on gives no GPU with MIG on and no instance."""
    device = "management.nvidia.com/gpu=all"
    chart = render(nodeAgent={"visibleDevices": device})
    mps = {one["name"]: one.get("value") for one in chart.containers["mps"]["env"]}
    assert (chart.environment("agent")["NVIDIA_VISIBLE_DEVICES"], mps["NVIDIA_VISIBLE_DEVICES"]) == (device, device)


def test_an_upgrade_ends_no_job_behind_an_mps_daemon(render: Any) -> None:
    """The daemons lived in the agent's pod: whatever changed there ended every job of the node that used them."""
    daemons = render().one("DaemonSet", "carpool-mps")["spec"]
    assert daemons["updateStrategy"] == {"type": "OnDelete"}
    assert [c["name"] for c in daemons["template"]["spec"]["containers"]] == ["mps"]
    assert [c["name"] for c in agent_pod(render())["containers"]] == ["agent"]
    assert "updateStrategy" not in render().one("DaemonSet", "carpool-node-agent")["spec"], (
        "the agent is renewed at once"
    )


def test_mps_daemons_run_where_the_agent_does_and_reach_no_api_server(render: Any) -> None:
    chart = render(
        nodeAgent={"runtimeClassName": "", "tolerations": [{"operator": "Exists"}]}, imagePullSecrets=[{"name": "x"}]
    )
    pod = chart.one("DaemonSet", "carpool-mps")["spec"]["template"]["spec"]
    for name in ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets"):
        assert pod[name] == agent_pod(chart)[name]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["hostPID"] is True
    assert not {"hostNetwork", "hostIPC", "runtimeClassName"} & pod.keys()
    assert [v["name"] for v in pod["volumes"]] == ["state", "shm", "cdi", "etc-cdi"]
    shm = next(v for v in pod["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}, "what MPS clients share has a limit"


def test_an_agent_without_mps_and_mig_has_no_capability(render: Any) -> None:
    chart = render(nodeAgent={"capabilities": [], "runtimeClassName": "", "mps": {"enabled": False}})
    assert "mps" not in chart.containers
    assert "CARPOOL_MPS_HOST" not in chart.environment("agent")
    assert chart.containers["agent"]["securityContext"] == CONFINED
    assert "runtimeClassName" not in agent_pod(chart)
    assert "NVIDIA_MIG_CONFIG_DEVICES" not in chart.environment("agent")


def test_simulated_gpus_take_nothing_of_the_node(render: Any) -> None:
    chart = render(nodeAgent={"simulatedGpus": "NVIDIA A100-SXM4-40GB:4"})
    assert not {"hostPID", "runtimeClassName"} & agent_pod(chart).keys()
    assert "/etc/cdi" not in [v["hostPath"]["path"] for v in agent_pod(chart)["volumes"] if "hostPath" in v]
    assert "mps" not in chart.containers
    assert not [name for name in chart.environment("agent") if name.startswith("NVIDIA_")]


def test_dcgm_exporter_of_the_same_node_can_be_named(render: Any) -> None:
    names = [e["name"] for e in render().containers["agent"]["env"]]
    assert names.index("NODE_IP") < names.index("CARPOOL_DCGM_EXPORTER"), "only what stands before can be used"
    url = "http://$(NODE_IP):9400/metrics"
    assert render(nodeAgent={"dcgmExporter": url}).environment("agent")["CARPOOL_DCGM_EXPORTER"] == url
    assert "dcgmExporter" in render(nodeAgent={"dcgmExporter": "file:///etc/passwd"}).error
    assert "capabilities" in render(nodeAgent={"capabilities": ["SYS_PTRACE"]}).error


def test_only_the_agent_and_its_mps_daemons_are_root(chart: Any) -> None:
    for workload in chart.workloads:
        security = workload["spec"]["template"]["spec"]["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        if workload["kind"] == "DaemonSet":
            assert security["runAsUser"] == 0
        else:
            assert security["runAsNonRoot"]
            assert security["runAsUser"] > 0


def test_only_they_see_their_node_and_at_the_nodes_own_paths(chart: Any) -> None:
    for workload in chart.workloads:
        spec = workload["spec"]["template"]["spec"]
        assert not {"hostNetwork", "hostIPC"} & spec.keys()
        assert "hostPID" not in spec or workload["kind"] == "DaemonSet"
        paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
        if workload["kind"] == "Deployment":
            assert paths == {}
            continue
        is_agent = workload["metadata"]["name"] == "carpool-node-agent"
        kubelets = ["/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources", "/var/run/cdi"]
        kubelets = kubelets if is_agent else kubelets[-1:]
        assert sorted(paths.values()) == ["/etc/cdi", "/var/lib/carpool", *kubelets]
        mounts = spec["containers"][0]["volumeMounts"]
        assert {m["name"]: m["mountPath"] for m in mounts if m["name"] != "shm"} == paths
    where = chart.environment("agent")
    assert where["CARPOOL_DEVICE_PLUGIN_DIR"] == "/var/lib/kubelet/device-plugins"
    assert where["CARPOOL_POD_RESOURCES_SOCKET"] == "/var/lib/kubelet/pod-resources/kubelet.sock"
    assert where["CARPOOL_CDI_DIR"] == "/var/run/cdi"
    assert where["CARPOOL_STATE_DIR"] == "/var/lib/carpool"


def test_cdi_directories_are_values(render: Any) -> None:
    """Regression: neither /etc/cdi nor /var/run/cdi can be created on Talos."""
    chart = render(nodeAgent={"cdiDir": "/var/cdi/dynamic", "cdiStaticDir": ""})
    for container in ("agent", "mps"):
        mounts = {m["name"]: m["mountPath"] for m in chart.containers[container]["volumeMounts"]}
        assert (mounts["cdi"], "etc-cdi" in mounts) == ("/var/cdi/dynamic", False)
        assert chart.environment(container)["CARPOOL_CDI_DIR"] == "/var/cdi/dynamic"
    paths = {v["name"]: v["hostPath"]["path"] for v in agent_pod(chart)["volumes"] if "hostPath" in v}
    assert (paths["cdi"], "etc-cdi" in paths) == ("/var/cdi/dynamic", False)


def test_the_traces_memory_fits_into_the_operators_container(chart: Any) -> None:
    limit = re.fullmatch(r"(\d+)Gi", chart.containers["operator"]["resources"]["limits"]["memory"])
    assert limit
    assert int(limit[1]) * 1024 >= int(chart.environment("operator")["CARPOOL_TRACE_MEMORY_MIB"]) + 256


OPERATED = "monitoring.coreos.com/v1/PodMonitor"


@pytest.mark.parametrize(
    ("apis", "monitoring", "expected"),
    [
        pytest.param("", {}, (0, 0), id="without Prometheus Operator"),
        pytest.param(OPERATED, {}, (3, 5), id="with Prometheus Operator"),
        pytest.param(OPERATED, {"podMonitors": False, "dashboards": False}, (0, 0), id="not wanted"),
        pytest.param("", {"podMonitors": True}, (3, 0), id="monitors requested"),
        pytest.param("", {"dashboards": True}, (0, 5), id="dashboards requested"),
    ],
)
def test_monitors_and_dashboards_need_prometheus_operator_or_a_request(
    render: Any, apis: str, monitoring: dict[str, Any], expected: tuple[int, int]
) -> None:
    found = render(apis=apis, monitoring=monitoring)
    dashboards = [one for one in found.all("ConfigMap") if one["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert (len(found.all("PodMonitor")), len(dashboards)) == expected
    assert all(json.loads(text)["panels"] for one in dashboards for text in one["data"].values())


def test_a_monitor_selects_the_pods_of_one_workload(render: Any) -> None:
    chart = render(apis=OPERATED, monitoring={"labels": {"release": "prometheus"}})
    test_every_object_has_the_common_labels_and_its_namespace(chart)
    monitored = []
    for monitor in chart.all("PodMonitor"):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        for workload in chart.workloads:
            template = workload["spec"]["template"]
            if wanted <= template["metadata"]["labels"].items():
                ports = [port["name"] for one in containers_of(template) for port in one.get("ports", ())]
                assert ports.count(endpoint["port"]) == 1
                monitored.append(workload["metadata"]["name"])
    assert sorted(monitored) == ["carpool-node-agent", "carpool-operator", "carpool-scheduler"]
