"""The chart, rendered by the real helm; each set of values once a session."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_e2e.binaries import ensure

# --import-mode=importlib gives test folders no import path of their own.
sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("docs", "e2e"))]

OPTIONS = ["--namespace=carpool-system", "--skip-tests", "--values=-"]
CHART = Path(__file__).parents[2] / "helm" / "carpool"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """What one call of helm answered."""

    objects: tuple[Manifest, ...]
    error: str

    def one(self, kind: str, name: str) -> Manifest:
        found = [o for o in self.objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"expected one {kind} {name}, found {len(found)}; helm said: {self.error}"
        return found[0]

    def all(self, *kinds: str) -> list[Manifest]:
        return [o for o in self.objects if o["kind"] in kinds]

    @property
    def workloads(self) -> list[Manifest]:
        return self.all("Deployment", "DaemonSet")

    @property
    def containers(self) -> dict[str, Manifest]:
        pods = [w["spec"]["template"]["spec"] for w in self.workloads]
        return {c["name"]: c for pod in pods for c in [*pod.get("initContainers", []), *pod["containers"]]}

    def environment(self, container: str) -> dict[str, str]:
        return {e["name"]: e.get("value", "") for e in self.containers[container].get("env", [])}


Render = Callable[..., Chart]


@pytest.fixture(scope="session")
def helm() -> str:
    return ensure(["helm"])["helm"]


@pytest.fixture(scope="session")
def render(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Render with values given as keywords, `settings={"policy": …}`; images come from localhost by default."""
    cache: dict[str, Chart] = {}
    # A home of its own: neither plugins nor settings of the user who runs the tests count.
    home = str(tmp_path_factory.mktemp("helm-home"))
    environment = {"HOME": home, "PATH": os.environ["PATH"]}

    def call(release: str = "carpool", kube_version: str = "v1.36.3", apis: str = "", **values: Any) -> Chart:
        values = {"global": {"imageRegistry": "localhost"}, **values}
        key = json.dumps([release, kube_version, apis, values], sort_keys=True)
        if key not in cache:
            asked = [f"--kube-version={kube_version}", f"--api-versions={apis}", *OPTIONS]
            command = [helm, "template", release, str(CHART), *asked]
            done = subprocess.run(
                command, input=json.dumps(values), capture_output=True, text=True, check=False, env=environment
            )
            objects = tuple(o for o in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if o)
            cache[key] = Chart(objects if done.returncode == 0 else (), done.stderr if done.returncode else "")
        return cache[key]

    return call


@pytest.fixture(scope="session")
def chart(render: Render) -> Chart:
    """The chart as it comes."""
    return render()


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart of version 0.0.9, whose CRD of jobs lacks `status.restarts`.

    It is made of this one, because no version was released before, and a shallow clone has no earlier commit to build.
    """
    chart = tmp_path_factory.mktemp("previous") / "carpool"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9", "appVersion": "0.0.9"}))
    file = chart / "definitions" / "carpool.dev_gputrainingjobs.yaml"
    crd = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["restarts"]
    crd["metadata"]["annotations"]["carpool.dev/spec"] = "another"
    file.write_text(yaml.dump(crd, Dumper=yaml.CSafeDumper))
    return chart
