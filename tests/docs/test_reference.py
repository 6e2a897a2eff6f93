"""docs/reference/ says what the code is: nothing is left out, and nothing is out of date."""

import ast
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from carpool_core.cli import SUBCOMMANDS
from carpool_core.settings import Setting, settings_of
from carpool_docs import commands, metrics, settings
from carpool_docs.__main__ import FOLDER, PAGES, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def no_collection_amid_a_parse() -> Iterator[None]:
    """What is collected amid `ast.parse` may parse itself, and CPython then loses count (python/cpython#106905)."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return the text under a second-level heading."""
    return page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_has_it(name: str) -> None:
    # In a process of its own: click remembers how a command was first called, and shows its help accordingly.
    code = f"import sys; from carpool_docs.__main__ import PAGES; sys.stdout.write(PAGES[{name!r}]())"
    fresh = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "docs"), os.environ.get("PYTHONPATH", "")])},
    )
    assert read(name) == fresh.stdout, f"docs/reference/{name} is out of date: run `make docs`"


def test_every_reference_page_is_generated() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(PAGES)


def test_every_page_is_written(tmp_path: Path) -> None:
    assert write(tmp_path / "new") == [tmp_path / "new" / name for name in PAGES]


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert f"Usage: carpool {command} " in section(read("commands.md"), f"carpool {command}")


NESTED = [(name, below) for name in SUBCOMMANDS for below in commands.subcommands(name)]


@pytest.mark.parametrize(("name", "below"), NESTED)
def test_every_command_below_another_is_documented(name: str, below: str) -> None:
    assert f"### carpool {name} {below}\n\n```\nUsage: carpool {name} {below} " in read("commands.md")


SETTINGS = [(process, one) for process, cls in settings.PROCESSES.items() for one in settings_of(cls)]


def test_every_process_with_settings_is_known() -> None:
    """A settings module that no page reads would go undocumented."""
    found = {p.parent.name for p in ROOT.glob("*/carpool_*/settings.py") if p.parent.name != "carpool_core"}
    documented = {cls.__module__.split(".")[0] for cls in settings.PROCESSES.values()}
    assert found - {"carpool_docs"} <= documented  # other pages may name settings, too


@pytest.mark.parametrize(("process", "one"), SETTINGS, ids=lambda x: x.flag if isinstance(x, Setting) else x)
def test_every_setting_is_documented(process: str, one: Setting) -> None:
    text = section(read("settings.md"), f"carpool {process}")
    row = next((line for line in text.splitlines() if f"`{one.env}`" in line), "")
    assert one.flag in row
    assert one.help.replace("|", r"\|") in row


@pytest.mark.parametrize(("process", "one"), SETTINGS, ids=lambda x: x.flag if isinstance(x, Setting) else x)
def test_a_setting_says_what_empty_means(process: str, one: Setting) -> None:
    if one.default is None or one.default == "":
        assert re.search(r"(?i)\b(where empty|if empty|when left out|required)\b", one.help), (
            f"{one.env}: say what happens where it is empty"
        )


METRIC = re.compile(r"carpool_(api|operator|extender|agent|gpu|job|build)_[a-z_]+|DCGM_FI_[A-Z_]+")


def _metrics_in(source: str) -> Iterator[str]:
    """Yield the names of metrics in the code, which the generator does not read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
            yield node.value


def test_every_metric_of_the_code_is_documented() -> None:
    packages = [p for p in ROOT.glob("*/carpool_*") if p.name not in ("carpool_docs", "carpool_e2e")]
    files = [file for package in packages for file in package.rglob("*.py")]
    found = {name for file in files for name in _metrics_in(file.read_text(encoding="utf-8"))}
    page = read("metrics.md")
    assert len(found) > 15, "expected to find the metrics in the code"
    assert [name for name in sorted(found) if f"`{name}`" not in page and f"`{name}_total`" not in page] == []


@pytest.mark.parametrize("process", metrics.REGISTRIES)
def test_every_metric_has_a_type_a_unit_and_a_meaning(process: str) -> None:
    found = list(metrics.families(process))
    assert {"carpool_build_info"} < {family.name for family in found}
    assert [f.name for f in found if not (f.type and f.unit and f.help.endswith("."))] == []


def test_units_of_factors_and_flags_are_not_those_of_shares_and_counts() -> None:
    """Regression: a factor above 1 had the unit 0..1, and flags were counts."""
    units = {family.name: family.unit for process in metrics.REGISTRIES for family in metrics.families(process)}
    assert units["carpool_operator_calibration_widening_ratio"] == "1"
    assert units["carpool_operator_calibration_coverage_ratio"] == "0..1"
    assert units["carpool_agent_gpu_healthy"] == units["carpool_job_anomaly"] == "0 or 1"


CRDS = sorted((ROOT / "crds").glob("carpool.dev_*.yaml"))


def _paths(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below
        yield from _paths(inner, below)
        yield from _paths(inner.get("items", {}), f"{below}[]")


def _sentences(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", ()))
        yield from (sentence for inner in schema.values() for sentence in _sentences(inner))


@pytest.mark.parametrize("file", CRDS, ids=lambda file: file.stem)
def test_every_field_and_every_rule_of_a_crd_is_documented(file: Path) -> None:
    crd = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    text = section(read("resources.md"), crd["spec"]["names"]["kind"])
    fields = [path for path in _paths(schema, "") if path.startswith(("spec", "status"))]
    assert len(fields) > 10
    assert [path for path in fields if f"\n| `{path}` |" not in text] == []
    assert [rule for rule in _sentences(schema) if rule not in text] == []
