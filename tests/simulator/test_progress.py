"""How far a run is."""

import shutil
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from carpool_simulator.progress import EVERY_S, commit_of, shown
from rich.console import Console


def test_without_a_terminal_a_line_is_printed_now_and_then():
    """Regression: a long run said nothing until its end where its output went to a file."""
    console, moments = Console(file=StringIO(), width=100), iter([0.0, 1.0, EVERY_S, EVERY_S, EVERY_S + 1])
    with shown(console, "philly", lambda: next(moments)) as show:
        for percent in (1, 20, 25):
            show(f"{percent}% of the jobs have ended")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "20% of the jobs have ended\n"


def test_in_a_terminal_one_line_changes():
    console = Console(file=StringIO(), width=100, force_terminal=True)
    with shown(console, "philly") as show:
        show("1% of the jobs have ended")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count("1% of the jobs have ended") == 1


def test_only_a_checkout_has_a_commit(tmp_path):
    assert commit_of(tmp_path / "x.py") == ""
    assert commit_of(Path("/nowhere/x.py")) == ""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git here")
    for arguments in (["init", "-q"], ["add", "."]):
        (tmp_path / "x.py").write_text("")
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / "x.md").write_text("")
        subprocess.run([git, *arguments], cwd=tmp_path, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([git, *who, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path / "x.py")
    assert len(commit) >= 7
    assert commit_of(tmp_path / "y.py") == "", "a file that it does not hold"
    (tmp_path / "docs" / "x.md").write_text("1")
    assert commit_of(tmp_path / "x.py") == commit, "results change documents"
    (tmp_path / "x.py").write_text("1")
    assert commit_of(tmp_path / "x.py") == f"{commit}-dirty"
