"""What the predictor says when it does not know."""

import msgspec


class Abstention(msgspec.Struct, frozen=True, kw_only=True):
    """No prediction, and why. It travels from the tracing subprocess to the job's condition unchanged."""

    reason: str
    """One CamelCase word for programs, such as `TraceTimedOut`."""
    message: str
    """A sentence for people: what was expected, what was found, what to do."""


class TraceError(Exception):
    """The model cannot be traced; becomes an `Abstention` at the subprocess's border."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def as_abstention(self) -> Abstention:
        """Return the same reason and sentence as a value."""
        return Abstention(reason=self.reason, message=str(self))
