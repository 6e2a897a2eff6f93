"""How other programs are called: docker, kind, kubectl and helm."""

import os
import subprocess
from dataclasses import dataclass
from typing import Protocol

from carpool_e2e.errors import HarnessError


@dataclass(frozen=True)
class Command:
    """A call of another program."""

    arguments: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        """Return it as it would be typed."""
        return " ".join(self.arguments)


class CommandError(HarnessError):
    """A program failed, or is not there; the message says which and what it said."""


class Commands(Protocol):
    """Calls other programs."""

    def run(self, command: Command) -> None:
        """Call a program and show what it says while it works.

        Raises:
            CommandError: It failed.
        """

    def capture(self, command: Command) -> str:
        """Call a program and return what it prints.

        Raises:
            CommandError: It failed.
        """


class Shell:
    """Calls programs that are on PATH."""

    def run(self, command: Command) -> None:
        """Call a program; what it says goes to the terminal."""
        self._call(command, capture=False)

    def capture(self, command: Command) -> str:
        """Call a program and return its standard output."""
        return self._call(command, capture=True)

    def _call(self, command: Command, *, capture: bool) -> str:
        # kind loads an image from an archive, which an image with attestations beside it does not survive whole.
        environment = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        try:
            done = subprocess.run(
                command.arguments, input=command.stdin, capture_output=capture, text=True, env=environment, check=False
            )
        except OSError as error:
            raise CommandError(f"{command.arguments[0]}: expected on PATH, found {error.strerror}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout or "what it said stands above").strip()
            raise CommandError(f"`{command}` failed with status {done.returncode}: {said}")
        return done.stdout or ""
