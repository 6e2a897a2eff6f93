"""What people see while they wait, and that logs and pipes are spared what moves."""

import io
import os
import pty
import subprocess
import sys

import pytest
from carpool_predictor.cli import telling, waiting
from rich.console import Console


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


def written(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_a_log_has_a_line_for_each_step() -> None:
    where = console(is_terminal=False)
    with telling(where) as tell:
        tell("baseline [constant], fold 1 of 5")
        tell("x" * 200)
    assert written(where) == f"  baseline [constant], fold 1 of 5\n  {'x' * 200}\n"


def test_a_terminal_has_one_line_that_changes() -> None:
    where = console(is_terminal=True)
    with telling(where) as tell:
        tell("baseline [constant], fold 1 of 5")
    assert "\n  baseline" not in written(where)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_is_told_to_terminals_only(is_terminal: bool) -> None:
    where = console(is_terminal=is_terminal)
    with waiting("tracing timm/resnet50 …", where):
        pass
    assert ("tracing timm/resnet50 …" in written(where)) is is_terminal


RUN = "from carpool_core.cli import main; main()"
GRAPH = [sys.executable, "-c", RUN, "graph", "timm/test_vit", "--num-classes", "3"]


def test_a_trace_is_told_at_a_terminal_and_its_answer_is_not_touched() -> None:
    """Regression: for seconds nothing was to be seen."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(GRAPH, stdout=subprocess.PIPE, stderr=theirs, check=True)
        os.set_blocking(ours, False)
        seen = os.read(ours, 1 << 16).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert "tracing timm/test_vit" in seen
    assert done.stdout.startswith(b"features:\n")
    assert b"\x1b" not in done.stdout


def test_nobody_else_is_told_of_a_trace() -> None:
    done = subprocess.run(GRAPH, capture_output=True, check=True)
    assert done.stdout.startswith(b"features:\n")
    assert b"tracing" not in done.stderr
