"""Says something to a program and reads its answer, which may be anything."""

import os
import selectors
import subprocess
import time
from contextlib import suppress

from carpool_deviceplugin.mps.port import MpsError

LONGEST_ANSWER = 1 << 16
"""In bytes: more than the process IDs of all clients that a daemon can have."""
_LOOK_EVERY_S = 0.01


def talk(program: str, process: "subprocess.Popen[bytes]", text: str, within_s: float) -> tuple[str, str]:
    """Send a text and return what is printed and what is complained of; raises TimeoutExpired, or MpsError for a flood.

    What a daemon says, one of its clients may say in its place: any bytes, and any number of them. The program's end is
    the end of its answer, whoever else holds what it printed to.
    """
    end = time.monotonic() + within_s
    assert process.stdin is not None  # noqa: S101  # all three are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text.encode())
    said = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    with selectors.DefaultSelector() as selector:
        for file in said:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else _LOOK_EVERY_S)
            if not ready and has_ended:
                break
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, within_s)
            for file in (key.fd for key, _ in ready):
                piece = os.read(file, LONGEST_ANSWER)
                said[file] += piece
                if len(said[file]) > LONGEST_ANSWER:
                    raise MpsError(f"expected an answer of {program} of at most {LONGEST_ANSWER:,} bytes, found more")
                if not piece:
                    selector.unregister(file)
    process.wait(max(0.0, end - time.monotonic()))
    output, errors = (one.decode(errors="replace") for one in said.values())
    return output, errors
