"""Each term of the glossary is a name in the code, and decision records are short."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TERMS = re.findall(r"^\|[^|]*\| `(\w+)` \|", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
RECORDS = sorted((ROOT / "docs/decisions").glob("*.md"))


def test_the_glossary_has_terms() -> None:
    assert len(TERMS) > 30


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_glossary_is_a_name_in_the_code(term: str) -> None:
    found = subprocess.run(
        ["git", "grep", "-lw", term, "--", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout, f"docs/glossary.md: no Python file has the name {term}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: one.stem)
def test_a_decision_record_has_three_parts_and_at_most_200_words(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert re.match(r"# \d+\. .+\n", text)
    assert [*re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)] == ["Context", "Decision", "Consequence"]
    assert len(text.split()) <= 200


def test_a_decision_record_has_a_number_of_its_own() -> None:
    for number, record in enumerate(sorted(RECORDS), 1):
        assert record.name.startswith(f"{number:04}-")
        assert record.read_text(encoding="utf-8").startswith(f"# {number}. ")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 300
