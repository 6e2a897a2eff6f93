"""How a run is ended from outside: by a closed terminal, `timeout` or a cancelled CI job, as by Ctrl-C."""

import signal
from types import FrameType

LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
"""Signals whose default action would end the harness at once, and leave its cluster running."""


def as_by_ctrl_c() -> None:
    """Have `LIKE_CTRL_C` raise KeyboardInterrupt in the main thread, once; what nohup ignores stays ignored."""
    for number in LIKE_CTRL_C:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` signals the whole group, and make hands on what it got: the second must not disturb the taking down.
    # A function and not SIG_IGN, which what is started meanwhile would inherit.
    for each in LIKE_CTRL_C:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, _already)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _already(number: int, frame: FrameType | None) -> None:
    """Do nothing: the cluster is being taken down."""
