"""Who was told a place a moment ago, and has no reservation yet."""

from collections import OrderedDict
from collections.abc import Iterator

from carpool_core.clock import Clock
from carpool_core.values import PodUid

from carpool_extender.placement.applicant import Applicant

MOMENT_S = 1.0
"""After this time whoever was told a place is not expected to ask for its reservation any more."""
MOST = 16
"""So many are remembered, the latest: kube-scheduler asks for reservations within milliseconds."""


class Lately:
    """Remembers whom it was told for a moment. Nothing is kept for them; they are only not to be taken by surprise.

    Args:
        clock: The time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: OrderedDict[PodUid, tuple[float, Applicant, str]] = OrderedDict()

    def told(self, uid: PodUid, applicant: Applicant, node: str) -> None:
        """Remember that a pod was told a node."""
        self._told[uid] = (self._clock.monotonic() + MOMENT_S, applicant, node)
        while len(self._told) > MOST:
            self._told.popitem(last=False)

    def forget(self, uid: PodUid) -> None:
        """Forget that: it has its reservation, or is asked about once more."""
        self._told.pop(uid, None)

    def __iter__(self) -> Iterator[tuple[Applicant, str]]:
        now = self._clock.monotonic()
        return iter([(applicant, node) for until, applicant, node in self._told.values() if until > now])
