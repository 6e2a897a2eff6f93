"""Rules of the house that no linter knows."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(p for p in ROOT.glob("*/carpool_*") if (p / "__init__.py").exists())
MODULES = [p for package in PACKAGES for p in sorted(package.rglob("*.py")) if "_pb2" not in p.name]


def test_no_init_file_stands_where_it_would_shadow_a_module() -> None:
    # `operator/__init__.py` would take the place of the standard library's `operator`.
    folders = [ROOT / "operator", ROOT / "tests", *(p for p in (ROOT / "tests").iterdir() if p.is_dir())]
    assert [str(f) for f in folders if (f / "__init__.py").exists()] == []


def test_packages_are_found() -> None:
    assert {p.name for p in PACKAGES} >= {"carpool_core", "carpool_operator", "carpool_extender"}


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text())), "give the module a docstring"


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_importing_starts_nothing(module: Path) -> None:
    """At the top level of a module stand definitions; calls of `main()` only under the `__main__` guard."""
    for node in ast.parse(module.read_text()).body:
        assert not isinstance(node, ast.For | ast.While | ast.With), f"line {node.lineno} works at import time"


@pytest.mark.parametrize(
    ("is_there", "given", "expected"),
    [
        pytest.param(False, "", "", id="no folder, no default"),
        pytest.param(True, "", "shared/data", id="the folder beside the checkout"),
        pytest.param(True, "elsewhere", "elsewhere", id="given"),
    ],
)
def test_ci_names_measurements_only_where_there_are_some(
    tmp_path: Path, is_there: bool, given: str, expected: str
) -> None:
    """Regression: on any other machine CI named a folder beside the checkout that is not there."""
    (tmp_path / "checkout" / ".ci").mkdir(parents=True)
    if is_there:
        (tmp_path / "shared" / "data").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "checkout" / ".ci" / "run")
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "${CARPOOL_DATA:-}"\n')
    make.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CARPOOL_DATA": given}
    done = subprocess.run(
        ["bash", tmp_path / "checkout" / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True
    )
    folder = str(tmp_path / expected) if expected == "shared/data" else expected
    assert {*done.stdout.splitlines()} == {folder}
