"""What can go wrong between Carpool and the Kubernetes API.

KubeError
├── Retryable             try again later: the request may be right
│   ├── Unreachable       no answer: connection refused, reset, timed out
│   ├── Overloaded        429 or 5xx
│   └── Conflict          409: somebody else wrote first, or the name is taken
└── Refused               the request as it is will never succeed
    ├── NotFound          404
    ├── Forbidden         401, 403: a right is missing
    ├── Gone              410: that resourceVersion is no longer known
    └── Invalid           400, 422: the object makes no sense
"""

PATCH_DOES_NOT_APPLY = "the server rejected our request"
"""How the API server begins to say that a JSON patch does not apply, such as where a test in it fails."""


class KubeError(Exception):
    """A call to the Kubernetes API failed. `str()` is the sentence for people: which call, which answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", server_message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.server_message = server_message or message
        """The server's own words, without the call that they answer."""


class Retryable(KubeError):
    """The same call may succeed later."""


class Unreachable(Retryable):
    """The API server gave no answer; whether a write happened is unknown."""


class Overloaded(Retryable):
    """The API server answered 429 or 5xx."""


class Conflict(Retryable):
    """A precondition failed or the object exists already; read again and decide again."""


class Refused(KubeError):
    """The same call will fail again."""


class NotFound(Refused):
    """There is no such object."""


class Forbidden(Refused):
    """The credentials lack this right."""


class Gone(Refused):
    """The resourceVersion is too old to continue from; list again."""


class Invalid(Refused):
    """The API server found the object invalid."""
