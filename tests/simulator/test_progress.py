"""How far a run is."""

from io import StringIO

from carpool_simulator.progress import EVERY_S, shown
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
