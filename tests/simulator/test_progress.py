"""Progress of a run, and the version that it records."""

import subprocess
from io import StringIO
from pathlib import Path

from carpool_simulator.progress import EVERY_S, commit_of, progress
from rich.console import Console


def test_without_a_terminal_a_line_is_printed_now_and_then():
    """Regression: a long run whose output went to a file printed nothing until its end."""
    console, moments = Console(file=StringIO(), width=100), iter([0.0, 1.0, EVERY_S, EVERY_S, EVERY_S + 1])
    with progress(console, "philly", lambda: next(moments)) as show:
        for percent in (1, 20, 25):
            show(f"{percent}% of the jobs have ended")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "20% of the jobs have ended\n"


def test_commit_is_that_of_the_checkout_that_tracks_the_file(tmp_path):
    (tmp_path / "x.py").write_text("")
    assert commit_of(tmp_path / "x.py") == "", "no checkout"
    assert commit_of(Path("/nowhere/x.py")) == ""
    user = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path / "x.py")
    assert len(commit) >= 7
    assert commit_of(tmp_path / "y.py") == "", "an untracked file"
    (tmp_path / "x.py").write_text("1")
    assert commit_of(tmp_path / "x.py") == f"{commit}-dirty"
