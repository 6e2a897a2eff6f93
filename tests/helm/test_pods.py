"""The chart's own pods, made of the images of the Dockerfile, on a real control plane, kubelet and containerd."""

import base64
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from carpool_e2e import images, release
from carpool_e2e.binaries import cache_root
from carpool_e2e.chart import NAMESPACE, PROJECT, RELEASE
from carpool_e2e.cluster import PODS, Cluster, carpool_command, running, why_no_kubelets
from carpool_e2e.controlplane import make
from carpool_e2e.demo.manifests import sleeper
from carpool_e2e.nodes import BUSYBOX_IMAGE, CONTAINERD_SOCKET
from documents import Shell, executed, life_of_a_release
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
STATE = "/var/lib/carpool"
"""The agent's directory on the node."""
SIMULATED = f"--set=nodeAgent.simulatedGpus={PODS.kubelet_nodes['a100']}"
VALUES = (SIMULATED, "--set=board.enabled=true", "--set=board.tls.existingSecret=board",
          "--set=nodeAgent.extraEnv[0].name=LD_LIBRARY_PATH", f"--set=nodeAgent.extraEnv[0].value={STATE}")  # fmt: skip
VERSION, PREVIOUS = release.versions()["Chart.yaml appVersion"], "0.0.9"
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


STORE = "import base64, pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(base64.b64decode(sys.argv[2]))"


def built(library: str, folder: Path) -> str:
    """Content of a library in place of NVIDIA's, by its source in tests/deviceplugin, in Base64."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-o", folder / "library", PROJECT / "tests/deviceplugin" / library]
    subprocess.run(command, check=True)
    return base64.b64encode((folder / "library").read_bytes()).decode()


VIEW = """
import pathlib, ssl, urllib.error, urllib.request
trusted = ssl.create_default_context(cafile="/etc/carpool/tls/tls.crt")
token = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/token").read_text()
for headers in ({}, {"Authorization": f"Bearer {token}"}):
    try:
        request = urllib.request.Request("https://127.0.0.1:8044PAGE", headers=headers)
        print(urllib.request.urlopen(request, context=trusted).status)
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
def shell(machine: Cluster, helm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder, own = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("programs")
    programs = [str(own), *(str(Path(path).parent) for path in (carpool_command(), machine.binaries["kubectl"], helm))]
    (first,) = machine.namespaces.values()
    on_the_node = f'nsenter -t {first} -m -p -n --wd="$PWD" -- {machine.binaries["ctr"]} -a {CONTAINERD_SOCKET}'
    (own / "ctr").write_text(f'#!/bin/sh\nexec {on_the_node} "$@"\n')
    (own / "ctr").chmod(0o755)
    environment = {
        "XDG_CACHE_HOME": str(cache_root(os.environ).parent), **os.environ, "HOME": str(folder),
        "PATH": ":".join([*programs, os.environ["PATH"]]), "KUBECONFIG": str(machine.kubeconfig),
        "CARPOOL_OPERATOR_LEASE": f"{NAMESPACE}/{RELEASE}-operator",
    }  # fmt: skip
    names = {"REGISTRY": "localhost", "REGISTRY_OF_YOUR_KUBE_SCHEDULER": "localhost"}
    shell = Shell(folder, environment, names)
    yield shell
    shell.stop()


@pytest.fixture(scope="module")
def installed(machine: Cluster, shell: Shell, previous: Path) -> Cluster:
    """After the documented `helm install` of the version before, with simulated GPUs, and a board with TLS."""
    for image in images.listed(images.ensure(Console())):
        tagged = shell(f"ctr -n k8s.io images tag {image.name} {image.name.replace(VERSION, PREVIOUS)}")
        assert tagged.returncode == 0, tagged.stderr
    make(shell.folder, "ca", "/CN=board", ["DNS:carpool-board.carpool-system", "IP:127.0.0.1"])
    machine.kubectl("create", "namespace", NAMESPACE)
    files = [f"--cert={shell.folder}/ca.crt", f"--key={shell.folder}/ca.key"]
    machine.kubectl("create", "secret", "tls", "board", "-n", NAMESPACE, *files)
    (first, code), *_ = life_of_a_release()
    assert do(machine, shell, first.replace("helm/carpool", str(previous)), *VALUES) == code
    return machine


def do(machine: Cluster, shell: Shell, command: str, *options: str) -> int:
    """Run a command of helm and print what it did."""
    done = shell(command, *map(shlex.quote, options))
    print(f"$ {done.args[-1]}\n{done.stdout}{done.stderr}exit code {done.returncode}\n")
    print(machine.kubectl("get", "pods,gtj", "--all-namespaces"))
    return done.returncode


def test_a_job_that_is_submitted_right_after_the_installation_completes(installed: Cluster) -> None:
    """Pods of the operator, the scheduler with the extender, and the agent carry it there."""
    watcher = Watcher(installed)
    installed.apply(sleeper("first", "sleep 3"))
    watcher.running("first", 180)
    installed.kubectl("wait", "gtj/first", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    (node,) = watcher.read("gpunodes")["items"]
    assert node["status"]["simulated"]


def wait_for_pods(machine: Cluster) -> None:
    for workload in WORKLOADS:
        machine.kubectl("rollout", "status", workload, "-n", NAMESPACE, "--timeout=120s", timeout_s=130)


def test_pods_are_ready_and_helm_test_passes(installed: Cluster, shell: Shell) -> None:
    wait_for_pods(installed)
    assert "Succeeded" in shell(f"helm test {RELEASE} --namespace {NAMESPACE} --timeout=180s").stdout


@pytest.mark.parametrize(("container", "user"), USERS.items())
def test_a_process_has_the_user_of_the_chart_and_cannot_write_its_files(
    installed: Cluster, container: str, user: int
) -> None:
    arguments = [*container.split(), "-n", NAMESPACE, "--", "python", "-c", PROBE]
    assert installed.kubectl("exec", *arguments).split("\n") == [str(user), *["Read-only file system"] * 2, ""]


def seen_by_board(machine: Cluster, page: str) -> list[str]:
    """Statuses of a page without a token and with the board's own."""
    code = VIEW.replace("PAGE", page)
    return machine.kubectl("exec", BOARD, "-n", NAMESPACE, "--", "python", "-c", code).split()


def test_board_shows_gpus_to_those_whose_token_may_list_them(installed: Cluster) -> None:
    assert seen_by_board(installed, "/") == ["401", "200"]


def test_the_canarys_job_says_what_its_container_got(installed: Cluster, tmp_path: Path) -> None:
    """Over a stand-in for libcuda, which sees another GPU than the simulated one."""
    data = {"libcuda.so.1": built("cuda/libcuda.c", tmp_path)}
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


def release_of(machine: Cluster) -> tuple[set[str], bool]:
    """Versions of the images of Carpool's pods, and whether the CRD of jobs has the field that the one before lacks."""
    selected = ["-n", NAMESPACE, "-l", f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component!=mps"]
    pods = json.loads(machine.kubectl("get", "pods", *selected, "-o", "json"))["items"]
    living = [pod["spec"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    containers = [one for pod in living for one in [*pod.get("initContainers", []), *pod["containers"]]]
    versions = {one["image"].rpartition(":")[2] for one in containers if "/carpool/" in one["image"]}
    return versions, '"restarts"' in machine.kubectl("get", "crd", "gputrainingjobs.carpool.dev", "-o", "json")


def test_a_running_job_outlives_what_is_done_to_the_release(installed: Cluster, shell: Shell) -> None:
    """It starts under the version before. Pods are renewed, go, and come again; its container ends as it would have."""
    watcher = Watcher(installed)
    jobs = ("lasting", "ended-meanwhile")
    installed.apply(*(sleeper(job, "until [ -e /tmp/end ]; do sleep 0.1; done") for job in jobs))
    for job in jobs:
        watcher.running(job, 120)
    before, uid = container_of(watcher, "lasting"), watcher.job("lasting")["metadata"]["uid"]
    assert release_of(installed) == ({PREVIOUS}, False)

    def end(job: str) -> None:
        (pod,) = watcher.pods(job)
        installed.kubectl("exec", pod["metadata"]["name"], "--", "/bin/sh", "-c", ": > /tmp/end")

    found = []
    for command, code in life_of_a_release()[1:]:
        step = command.split()[1]
        assert do(installed, shell, command, *(VALUES if step == "install" else ())) == code
        if step == "uninstall":
            end("ended-meanwhile")
        else:
            wait_for_pods(installed)
            found.append((step, *release_of(installed)))
        assert container_of(watcher, "lasting") == before, command
    refused, new, old = ("install", {PREVIOUS}, False), ({VERSION}, True), ({PREVIOUS}, False)
    assert found == [("upgrade", *new), ("rollback", *old), refused, ("install", *new)]
    end("lasting")
    for job in jobs:
        installed.kubectl("wait", f"gtj/{job}", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    status = watcher.job("lasting")["status"]
    assert (watcher.job("lasting")["metadata"]["uid"], status.get("restarts", 0)) == (uid, 0)
    assert [attempt["number"] for attempt in status["attempts"]] == [1]


@pytest.fixture(scope="module")
def run(installed: Cluster, shell: Shell) -> Shell:
    """The shell, when jobs and files are there that commands name, and the agent has a library in place of NVML."""
    watcher = Watcher(installed)
    stored = [f"{STATE}/libnvidia-ml.so.1", built("nvml/libnvidia-ml.c", shell.folder)]
    installed.kubectl("exec", AGENT, "-n", NAMESPACE, "-c", "agent", "--", "python", "-c", STORE, *stored)
    installed.kubectl("apply", "-f", str(PROJECT / "examples/resnet50-cifar.yaml"))
    installed.apply(sleeper("small-a", "echo begun; sleep 3600"), sleeper("ended", "true"))
    watcher.running("small-a", 120)
    installed.kubectl("wait", "gtj/ended", "--for=condition=Complete", "--timeout=120s", timeout_s=130)
    installed.kubectl("create", "serviceaccount", "viewer")
    view = ["--clusterrole=carpool-view", "--serviceaccount=default:viewer"]
    installed.kubectl("create", "clusterrolebinding", "viewer", *view)
    (held,) = watcher.reserved("small-a")
    shell.names |= {"NODE": "a100", "NAMESPACE": "default", "POD": held["podName"], "UUID": held["gpuUuids"][0]}
    shell.names |= {"VIEWER": "viewer", "IMAGE": BUSYBOX_IMAGE, "COMMAND": '[sleep, "20"]'}
    (shell.folder / "trace.csv").write_text("timestamp,duration,num_gpus\n0,600,1\n")
    return shell


@pytest.mark.parametrize("command", executed())
def test_a_command_of_the_documents_works(run: Shell, command: str) -> None:
    """In their order; the search for failed releases finds none."""
    run.names["JOB"] = "ended" if "=Complete" in command else "small-a"
    done = run(command)
    found_none = "release failed" in command and (done.returncode, done.stderr) == (1, "")
    assert done.returncode == 0 or found_none, f"{done.stdout}{done.stderr}"


def test_the_board_shows_the_plan_that_the_documents_put_into_a_config_map(run: Shell, installed: Cluster) -> None:
    """After their commands, `helm upgrade` among them."""
    assert seen_by_board(installed, "/plan") == ["401", "200"]
