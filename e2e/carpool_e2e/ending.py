"""How a run is ended from outside: by a closed terminal, `timeout` or a cancelled CI job, as by Ctrl-C."""

import signal
from types import FrameType

LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
"""Signals whose default action would end the harness at once, and leave its cluster running."""

_HANDLED = (signal.SIGINT, *LIKE_CTRL_C)


def as_by_ctrl_c() -> None:
    """Have the first of `LIKE_CTRL_C` and Ctrl-C raise KeyboardInterrupt in the main thread.

    Those that follow do nothing, but for a second Ctrl-C. What nohup ignores stays ignored.
    """
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` signals the whole group, make hands on what it got, and CI sends SIGTERM some seconds after SIGINT:
    # the second must not disturb the taking down.
    # A function and not SIG_IGN, which what is started meanwhile would inherit.
    for each in _HANDLED:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, _already)
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _already(number: int, frame: FrameType | None) -> None:
    """Do nothing: the cluster is being taken down. Whoever presses Ctrl-C a second time means it."""
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
