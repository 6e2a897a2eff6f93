"""The chart's own pods, made of the images of the Dockerfile, on a real control plane, kubelet and containerd."""

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from carpool_e2e import images
from carpool_e2e.chart import CHART, NAMESPACE, PROJECT, RELEASE
from carpool_e2e.cluster import PODS, Cluster, carpool_command, running, why_no_kubelets
from carpool_e2e.demo.manifests import sleeper
from documents import executed
from kubectl import Watcher
from rich.console import Console

pytestmark = pytest.mark.e2e

MOST_MB = {"operator": 250, "extender": 200, "agent": 200}
"""Largest size of each image's unpacked layers."""

WORKLOADS = (
    "deployment/carpool-operator", "deployment/carpool-scheduler", "daemonset/carpool-node-agent",
    "deployment/carpool-board",
)  # fmt: skip
OPERATOR, SCHEDULER, AGENT, BOARD = WORKLOADS
SIMULATED = f"--set=nodeAgent.simulatedGpus={PODS.kubelet_nodes['a100']}"
VALUES = ("--set=global.imageRegistry=localhost", SIMULATED, "--set=board.enabled=true")
USERS = {f"{OPERATOR} -c operator": 65532, f"{SCHEDULER} -c extender": 65532, f"{AGENT} -c agent": 0,
         f"{BOARD} -c board": 65532}  # fmt: skip
"""User of each container's process."""

PROBE = """
import os, pathlib
print(os.getuid())
for folder in ("/opt/carpool", "/usr"):
    try:
        pathlib.Path(folder, "new").touch()
    except OSError as error:
        print(error.strerror)
"""


VIEW = """
import pathlib, urllib.error, urllib.request
token = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/token").read_text()
for headers in ({}, {"Authorization": f"Bearer {token}"}):
    try:
        print(urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8044/", headers=headers)).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Cluster]:
    """A cluster as an administrator meets it: one node, whose label says that Carpool manages its GPUs."""
    if reason := why_no_kubelets():
        pytest.skip(reason)
    with running(PODS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def installed(machine: Cluster, helm: str) -> Cluster:
    """After `helm install` with no flag but for the registry, the simulated GPUs and the board."""
    run_helm(machine, helm, "install", RELEASE, str(CHART), "--create-namespace", *VALUES)
    return machine


def run_helm(machine: Cluster, helm: str, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(machine.slot.directory),
        "KUBECONFIG": str(machine.kubeconfig),
    }
    command = [helm, *arguments, f"--namespace={NAMESPACE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{machine.kubectl('get', 'pods,events', '-A')}"
    return done.stdout


def test_a_job_that_is_submitted_right_after_the_installation_completes(installed: Cluster) -> None:
    """Pods of the operator, the scheduler with the extender, and the agent carry it there."""
    watcher = Watcher(installed)
    installed.apply(sleeper("first", "sleep 3"))
    watcher.running("first", 180)
    installed.kubectl("wait", "gtj/first", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    (node,) = watcher.read("gpunodes")["items"]
    assert node["status"]["simulated"]


def test_pods_are_ready_and_helm_test_passes(installed: Cluster, helm: str) -> None:
    for workload in WORKLOADS:
        installed.kubectl("rollout", "status", workload, "-n", NAMESPACE, "--timeout=120s", timeout_s=130)
    assert "Succeeded" in run_helm(installed, helm, "test", RELEASE, "--timeout=180s")


@pytest.mark.parametrize(("container", "user"), USERS.items())
def test_a_process_has_the_user_of_the_chart_and_cannot_write_its_files(
    installed: Cluster, container: str, user: int
) -> None:
    arguments = [*container.split(), "-n", NAMESPACE, "--", "python", "-c", PROBE]
    assert installed.kubectl("exec", *arguments).split("\n") == [str(user), *["Read-only file system"] * 2, ""]


def test_board_shows_gpus_to_those_whose_token_may_list_them(installed: Cluster) -> None:
    assert installed.kubectl("exec", BOARD, "-n", NAMESPACE, "--", "python", "-c", VIEW).split() == ["401", "200"]


def test_the_canarys_job_says_what_its_container_got(installed: Cluster, tmp_path: Path) -> None:
    """Over a stand-in for libcuda, which sees another GPU than the simulated one."""
    library, source = tmp_path / "libcuda.so.1", PROJECT / "tests/deviceplugin/cuda/libcuda.c"
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    data = {library.name: base64.b64encode(library.read_bytes()).decode()}
    job = yaml.safe_load((PROJECT / "examples/canary.yaml").read_text())
    pod = job["spec"]["template"]["spec"] | {"volumes": [{"name": "cuda", "configMap": {"name": "cuda"}}]}
    pod["containers"][0] |= {
        "image": f"localhost/{pod['containers'][0]['image']}",
        "env": [{"name": "LD_LIBRARY_PATH", "value": "/cuda"}],
        "volumeMounts": [{"name": "cuda", "mountPath": "/cuda"}],
    }
    job["spec"]["template"]["spec"] = pod
    installed.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cuda"}, "binaryData": data}, job)
    installed.kubectl("wait", "gtj/canary", "--for=condition=Failed", "--timeout=180s", timeout_s=190)
    watcher = Watcher(installed)
    printed = installed.kubectl("logs", watcher.pods("canary")[0]["metadata"]["name"])
    rows = [line.split() for line in printed.splitlines()]
    found = [row[:2] for row in rows if row and row[0] in {"FAILED", "passed", "unknown"}]
    assert found == [["FAILED", "canary-gpus"], ["passed", "canary-mps"], ["passed", "canary-memory"]], printed
    (node,) = watcher.read("gpunodes")["items"]
    needed = next(row[1] for row in rows if row and row[0] == "needed:")
    assert needed in {gpu["uuid"] for gpu in node["status"]["devices"]}, printed
    assert "GPU-11111111" in printed


def test_images_are_small(machine: Cluster) -> None:
    found = {image.name.split("/")[-1].split(":")[0]: image for image in images.listed(images.ensure(Console()))}
    assert found.keys() == MOST_MB.keys()
    for target, image in found.items():
        assert image.size_mb <= MOST_MB[target], image


def container_of(watcher: Watcher, job: str) -> tuple[str, int, str]:
    """ID, restarts and start of the container of a job's only pod."""
    (pod,) = watcher.pods(job)
    (status,) = pod["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"], status["state"]["running"]["startedAt"]


def test_a_running_job_outlives_upgrade_rollback_uninstallation_and_another_installation(
    installed: Cluster, helm: str
) -> None:
    """All pods of Carpool are renewed, go, and come again; then the same container ends as it would have."""
    watcher = Watcher(installed)
    installed.apply(sleeper("lasting", "until [ -e /tmp/end ]; do sleep 0.1; done"))
    watcher.running("lasting", 120)
    before, uid = container_of(watcher, "lasting"), watcher.job("lasting")["metadata"]["uid"]
    for command in (
        ["upgrade", RELEASE, str(CHART), *VALUES, "--set=settings.log.level=debug"],
        ["rollback", RELEASE, "1"],
        ["uninstall", RELEASE, "--wait"],
        ["install", RELEASE, str(CHART), *VALUES],
    ):
        run_helm(installed, helm, *command)
        if command[0] != "uninstall":
            for workload in WORKLOADS:
                installed.kubectl("rollout", "status", workload, "-n", NAMESPACE, "--timeout=120s", timeout_s=130)
        assert container_of(watcher, "lasting") == before, command
    pod = watcher.pods("lasting")[0]["metadata"]["name"]
    installed.kubectl("exec", pod, "--", "/bin/sh", "-c", ": > /tmp/end")
    installed.kubectl("wait", "gtj/lasting", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    job = watcher.job("lasting")
    assert (job["metadata"]["uid"], job["status"].get("restarts", 0)) == (uid, 0)
    assert [attempt["number"] for attempt in job["status"]["attempts"]] == [1]


Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(installed: Cluster, helm: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a line in a checkout, with this cluster's names in place of those in capitals."""
    watcher, folder = Watcher(installed), tmp_path_factory.mktemp("checkout")
    installed.kubectl("apply", "-f", str(PROJECT / "examples/resnet50-cifar.yaml"))
    installed.apply(sleeper("small-a", "echo begun; sleep 3600"), sleeper("ended", "true"))
    watcher.running("small-a", 120)
    installed.kubectl("wait", "gtj/ended", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    (held,) = watcher.reserved("small-a")
    names = {"NODE": "a100", "NAMESPACE": "default", "POD": held["podName"], "UUID": held["gpuUuids"][0]}
    for name in ("Makefile", "examples", "helm"):
        (folder / name).symlink_to(PROJECT / name)
    (folder / "trace.csv").write_text("timestamp,duration,num_gpus\n0,600,1\n")
    programs = [str(Path(path).parent) for path in (carpool_command(), installed.binaries["kubectl"], helm)]
    environment = {**os.environ, "KUBECONFIG": str(installed.kubeconfig), "HOME": str(folder)}
    environment["PATH"] = ":".join([*programs, os.environ["PATH"]])

    def call(command: str) -> "subprocess.CompletedProcess[str]":
        job = "ended" if "=Complete" in command else "small-a"
        line = re.sub(r"\b[A-Z]+\b", lambda found: {**names, "JOB": job}.get(found[0], found[0]), command)
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=environment, cwd=folder,
            timeout=120, check=False,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("command", executed())
def test_a_command_of_the_documents_works(run: Run, command: str) -> None:
    """In their order; a `grep` may find nothing."""
    done = run(command)
    found_nothing = "| grep" in command and done.returncode == 1 and not done.stderr
    assert done.returncode == 0 or found_nothing, f"{done.stdout}{done.stderr}"
