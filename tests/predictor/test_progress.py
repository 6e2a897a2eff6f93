"""Progress is shown on terminals only; pipes and logs get the answer alone."""

import os
import pty
import subprocess
import sys

GRAPH = [
    sys.executable, "-c", "from carpool_core.cli import main; main()", "graph", "timm/test_vit", "--num-classes", "3",
]  # fmt: skip


def test_a_trace_is_shown_on_a_terminal_and_its_answer_is_unchanged() -> None:
    """Regression: a trace showed nothing for seconds."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(GRAPH, stdout=subprocess.PIPE, stderr=theirs, check=True)
        os.set_blocking(ours, False)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert "tracing timm/test_vit" in shown
    assert done.stdout.startswith(b"features:\n")
    assert b"\x1b" not in done.stdout


def test_a_trace_is_not_shown_elsewhere() -> None:
    done = subprocess.run(GRAPH, capture_output=True, check=True)
    assert done.stdout.startswith(b"features:\n")
    assert b"tracing" not in done.stderr
