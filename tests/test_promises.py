"""Each promise in a PROMISES.md names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("PROMISES.md"))


def test_promises_are_written_down() -> None:
    folders = {"crds", "deviceplugin", "e2e", "explain", "framework", "helm", "kube", "operator", "predictor", "queue"}
    assert {file.parent.name for file in FILES} >= folders | {"cache", "reservations", "serving"}


@pytest.mark.parametrize("file", FILES, ids=lambda one: str(one.parent.relative_to(TESTS)))
def test_every_promise_names_tests_that_exist(file: Path) -> None:
    defined = {
        name
        for module in TESTS.rglob("*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", module.read_text(), re.MULTILINE)
    }
    missing = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("- "):
            named = {*re.findall(r"\btest_\w+\b(?!\.py)", line.partition("—")[2])}
            if not named or named - defined:
                missing.append(f"line {number}: {', '.join(sorted(named - defined)) or 'no test'}")
    assert missing == []
