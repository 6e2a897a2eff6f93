"""The first signal interrupts, those that follow leave the taking down alone, and only a second Ctrl-C does not."""

import subprocess
import sys

import pytest

SCRIPT = """
import signal, sys
from carpool_e2e import processes
processes.as_by_ctrl_c()
first, *others = (signal.Signals[name] for name in sys.argv[1:])
try:
    signal.raise_signal(first)
except KeyboardInterrupt:
    for other in others:
        signal.raise_signal(other)
    print("taken down")
"""


@pytest.mark.parametrize(
    ("numbers", "taken_down"),
    [
        ("INT TERM", True),
        ("INT HUP TERM TERM", True),
        ("TERM TERM", True),
        ("TERM HUP INT", True),
        ("HUP TERM", True),
        ("INT INT", False),
        ("TERM INT INT", False),
    ],
)
def test_what_follows_the_first_signal(numbers: str, taken_down: bool) -> None:
    command = ["env", "--default-signal=HUP,INT,TERM", sys.executable, "-c", SCRIPT]
    names = [f"SIG{number}" for number in numbers.split()]
    ended = subprocess.run([*command, *names], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout == "taken down\n") is taken_down, ended.stderr
    assert (ended.returncode == 0) is taken_down
