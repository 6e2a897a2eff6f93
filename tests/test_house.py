"""Rules of the house that no linter knows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(p for p in ROOT.glob("*/carpool_*") if (p / "__init__.py").exists())
LONGEST_MODULE = 400
MODULES = [p for package in PACKAGES for p in sorted(package.rglob("*.py")) if "_pb2" not in p.name]


def test_no_init_file_stands_where_it_would_shadow_a_module() -> None:
    # `operator/__init__.py` would take the place of the standard library's `operator`.
    folders = [ROOT / "operator", ROOT / "tests", *(p for p in (ROOT / "tests").iterdir() if p.is_dir())]
    assert [str(f) for f in folders if (f / "__init__.py").exists()] == []


def test_packages_are_found() -> None:
    assert {p.name for p in PACKAGES} >= {"carpool_core", "carpool_operator", "carpool_extender"}


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_stays_readable(module: Path) -> None:
    text = module.read_text()
    assert ast.get_docstring(ast.parse(text)), "give the module a docstring"
    assert text.count("\n") <= LONGEST_MODULE, f"split the module: it has {text.count(chr(10))} lines"


@pytest.mark.parametrize("module", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_importing_starts_nothing(module: Path) -> None:
    """At the top level of a module stand definitions; calls of `main()` only under the `__main__` guard."""
    for node in ast.parse(module.read_text()).body:
        assert not isinstance(node, ast.For | ast.While | ast.With), f"line {node.lineno} works at import time"
