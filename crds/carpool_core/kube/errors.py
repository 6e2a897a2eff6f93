"""Errors of calls to the Kubernetes API.

KubeError
├── Retryable             try again later: the request may be right
│   ├── Unreachable       no answer: connection refused, reset, timed out
│   ├── Overloaded        429 or 5xx
│   └── Conflict          409: another client wrote first, or the name is taken
└── Refused               the same request will never succeed
    ├── NotFound          404
    ├── Forbidden         401, 403: the credentials lack a right
    ├── Gone              410: the server no longer has that resourceVersion
    └── Invalid           400, 422: the object is invalid
"""

PATCH_DOES_NOT_APPLY = "the server rejected our request"
"""Start of the API server's message if a JSON patch does not apply, such as when a test in it fails."""


class KubeError(Exception):
    """A call to the Kubernetes API failed. `str()` names the call and the answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", server_message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.server_message = server_message or message
        """The server's message without the name of the call."""


class Retryable(KubeError):
    """The same call may succeed later."""


class Unreachable(Retryable):
    """The API server did not answer; a write may have happened."""


class Overloaded(Retryable):
    """The API server answered 429 or 5xx."""


class Conflict(Retryable):
    """A precondition failed or the object exists already. Read it again before the next try."""


class Refused(KubeError):
    """The same call will fail again."""


class NotFound(Refused):
    """The object does not exist."""


class Forbidden(Refused):
    """The credentials lack this right."""


class Gone(Refused):
    """The resourceVersion is too old; list again."""


class Invalid(Refused):
    """The API server rejected the object as invalid."""
