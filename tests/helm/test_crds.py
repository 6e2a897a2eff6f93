"""The chart's resource definitions are the repository's, and they travel with it."""

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ["carpool.dev_gpunodes.yaml", "carpool.dev_gputrainingjobs.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_they_are_links_to_the_repositorys_own(name: str) -> None:
    assert (ROOT / "helm/carpool/definitions" / name).resolve(strict=True) == ROOT / "crds" / name


def test_none_is_missing() -> None:
    assert sorted(f.name for f in (ROOT / "crds").glob("*.yaml")) == FILES
    assert sorted(f.name for f in (ROOT / "helm/carpool/definitions").iterdir()) == FILES


@pytest.mark.e2e
def test_a_packaged_chart_holds_them(helm: str, tmp_path: Path) -> None:
    subprocess.run([helm, "package", ROOT / "helm/carpool", "-d", tmp_path], check=True, capture_output=True)
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        for name in FILES:
            held = archive.extractfile(f"carpool/definitions/{name}")
            assert held is not None
            assert held.read() == (ROOT / "crds" / name).read_bytes()


@pytest.mark.e2e
def test_they_are_installed_and_kept_unless_they_are_left_out(render: Any) -> None:
    found = render().all("CustomResourceDefinition")
    assert found == [yaml.safe_load((ROOT / "crds" / name).read_text()) for name in FILES]
    assert all(one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for one in found)
    assert render(crds={"enabled": False}).all("CustomResourceDefinition") == []


@pytest.mark.e2e
@pytest.mark.parametrize(("apis", "expected"), [("", []), ("kueue.x-k8s.io/v1beta2", ["Queue"])])
def test_the_wide_columns_have_kueues_queue_where_there_is_kueue(render: Any, apis: str, expected: list[str]) -> None:
    """Regression: the queue of a label was shown, as if the job were in it, in clusters without Kueue."""
    nodes, jobs = (crd["spec"]["versions"][0] for crd in render(apis=apis).all("CustomResourceDefinition"))
    queue = [column for column in jobs["additionalPrinterColumns"] if "kueue" in column["jsonPath"]]
    assert [column["name"] for column in queue if column["priority"] == 1] == expected
    assert "kueue" not in str(nodes)
