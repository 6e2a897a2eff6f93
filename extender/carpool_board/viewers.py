"""Viewers and their rights. The API server decides both, by each viewer's own credentials."""

import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from cachetools import TTLCache
from carpool_core.clock import Clock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi, ResourceKind
from carpool_core.kube.errors import Forbidden

SELF_REVIEWS = ResourceKind(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)
REMEMBERED_S = 10.0
"""Time for which the API server's answer about a right is remembered, in seconds."""
_MAX_REMEMBERED = 10_000
_BEARER = re.compile(r"Bearer +([A-Za-z0-9._~+/=-]+) *", re.IGNORECASE)

Connect = Callable[[str | None], AbstractAsyncContextManager[KubeApi]]
"""Opens a client with a viewer's token; None means the process's own credentials."""


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a kind; an empty namespace means all of them."""

    verb: str
    kind: ResourceKind
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the right as a sentence has it: `list pods of all namespaces`."""
        if not self.kind.namespaced:
            return f"{self.verb} {self.kind.plural}"
        where = f"in namespace {self.namespace}" if self.namespace else "of all namespaces"
        return f"{self.verb} {self.kind.plural} {where}"


OF_GPUS = (Right("list", GPU_NODES),)
OF_QUEUE = (Right("list", GPU_TRAINING_JOBS), Right("list", PODS), Right("list", GPU_NODES))
"""What `carpool queue` reads."""


def bearer_token(header: str) -> str | None:
    """Return the token of an Authorization header; None if it has none."""
    found = _BEARER.fullmatch(header)
    return None if found is None else found[1]


class Viewers:
    """Asks the API server for the rights of viewers.

    A SelfSubjectAccessReview with the viewer's token answers both questions: whether the token is valid, and whether
    its owner has the right. The board itself needs no rights for that.
    """

    def __init__(self, connect: Connect, clock: Clock, remedy: str) -> None:
        self.connect = connect
        self._remedy = remedy
        self._known: TTLCache[tuple[str, Right], bool] = TTLCache(_MAX_REMEMBERED, REMEMBERED_S, clock.monotonic)

    async def may(self, token: str | None, right: Right) -> bool:
        """Return whether a viewer has a right.

        Raises:
            Forbidden: The API server does not accept the token; `status` is 401.
            KubeError: The API server could not be asked.
        """
        key = ("" if token is None else hashlib.sha256(token.encode()).hexdigest(), right)
        if (known := self._known.get(key)) is not None:
            return known
        attributes = {"verb": right.verb, "group": right.kind.group, "resource": right.kind.plural}
        attributes |= {"namespace": right.namespace} if right.namespace else {}
        attributes |= {"name": right.name} if right.name else {}
        async with self.connect(token) as api:
            answer = await api.create(SELF_REVIEWS, {"spec": {"resourceAttributes": attributes}})
        self._known[key] = allowed = bool(answer.get("status", {}).get("allowed"))
        return allowed

    async def require(self, token: str | None, *rights: Right) -> None:
        """Return if a viewer has all rights.

        Raises:
            Forbidden: One is missing, and the message names it with its remedy.
            KubeError: The API server could not be asked.
        """
        for right in rights:
            if not await self.may(token, right):
                raise Forbidden(f"you may not {right}; {self._remedy}", status=403)
