"""The documentation as pages, and messages that it quotes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path.read_text(encoding="utf-8")
    for folder in ("crds", "deviceplugin", "extender", "operator", "predictor", "helm")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".yaml", ".tpl", ".txt")
]


def test_every_page_is_built_without_a_warning(tmp_path: Path) -> None:
    """A page that no list of contents has, and a link that leads nowhere, are warnings."""
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--builder", "html"]
    done = subprocess.run(
        [*build, "--doctree-dir", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "architecture.html").read_text(encoding="utf-8")
    assert 'class="mermaid"' in page, "drawings are left to Mermaid, which the browser loads"
    page = (tmp_path / "site" / "operations.html").read_text(encoding="utf-8")
    assert 'href="node-agent.html#' in page, "links to documents lead to pages"


def _symptoms() -> list[str]:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = text.partition("| message | where |")[2]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("message", _symptoms())
def test_quoted_messages_are_those_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    assert any(all(part in source for part in parts) for source in SOURCES)


def test_symptoms_are_found() -> None:
    assert len(_symptoms()) > 10
