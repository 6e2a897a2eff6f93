"""Results as files, and of which version they are."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from carpool_simulator.progress import Provenance, commit_of
from carpool_simulator.reports import results
from carpool_simulator.truth import WorkloadError
from results_world import THEN, line_of, minutes
from simulated_world import ALONE, job, workload


@pytest.mark.parametrize(
    ("was", "now", "found"),
    [
        pytest.param("alone,1", "other,0", "2 seeds of every strategy, found 1 of alone", id="a run short"),
        pytest.param("alone,1", "alone,0", "found seed 0 of alone as its run 1", id="a seed twice"),
        pytest.param(",killed", ",slain", "found KeyError", id="another column"),
        pytest.param(",1\r\n", "\r\n", "found TypeError", id="a cell short"),
        pytest.param("alone,1", "alone,x", "found ValueError", id="no seed"),
        pytest.param("alone,", "", "found", id="no strategy"),
    ],
)
def test_results_that_are_not_whole_are_refused_with_what_is_missing(tmp_path, was, now, found):
    """Regression: a line short ended in a bare ValueError where seeds were compared."""
    results.write(tmp_path, "x", workload(job("a")), [line_of(ALONE, *minutes(1.0, 2.0))], THEN)
    path = tmp_path / "x.csv"
    text = path.read_bytes().decode()
    path.write_bytes(text.replace(was, now).encode())
    with pytest.raises(WorkloadError, match=rf"x\.csv: expected .*{found}.*; run the workload again"):
        results.read(tmp_path, "x")
    path.write_text(text.splitlines()[0])
    with pytest.raises(WorkloadError, match="2 seeds of every strategy, found no run"):
        results.read(tmp_path, "x")


def test_processor_time_is_told_of_one_run(tmp_path):
    line = replace(line_of(ALONE, *minutes(1.0, 2.0, 3.0)), cpu_s=7.5)
    results.write(tmp_path, "x", workload(job("a")), [line], THEN)
    found = results.read(tmp_path, "x")
    assert found is not None
    assert found.about.cpu_s == {"alone": 2.5}


def test_a_commit_is_told_of_a_checkout_and_of_nothing_else(tmp_path):
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


def test_a_checkout_of_which_git_tells_nothing_counts_as_unknown_not_as_clean(tmp_path, monkeypatch):
    """Regression: where `git status` failed or took too long a dirty tree was told to be clean."""
    (tmp_path / ".git").mkdir()
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    monkeypatch.setenv("PATH", str(fake.parent))
    assert commit_of(tmp_path / "x.py") == "unknown", "without git"
    for fails, found in (("status", "abc, changes unknown"), ("describe", "unknown"), ("ls-files", "unknown")):
        fake.write_text(f'#!/bin/sh\ncase "$2" in {fails}) exit 128;; status) ;; *) echo abc;; esac\n')
        fake.chmod(0o755)
        assert commit_of(tmp_path / "x.py") == found
        assert not Provenance(version=f"1.0, commit {found}").is_noted
    assert [Provenance(version=one).is_noted for one in ("1.0", "1.0, commit abc", "1.0, commit abc-dirty", "")] == [
        True,
        True,
        False,
        False,
    ]
