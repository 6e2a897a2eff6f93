"""Which jobs come together: nobody came first of them, so that a queue may put the longest of them first.

A batch lasts for some seconds from its first job on, however many follow; whoever comes later begins another one.
Between batches the order of arrival holds, so that nobody waits for ever behind longer jobs that keep coming.
"""

BATCH_S = 3.0
"""How long a batch lasts: in about as much time a client applies a hundred manifests."""


class Batches:
    """The batches of jobs that have not begun. Times are of any one clock, in seconds.

    Args:
        lasts_s: How long a batch lasts from its first job on; 0: nobody comes together, but at the same moment.
    """

    def __init__(self, lasts_s: float = BATCH_S) -> None:
        self._lasts_s = lasts_s
        self._ends_at = float("-inf")
        self._came = 0
        self._of: dict[str, tuple[float, int]] = {}

    def came(self, job: str, at: float) -> None:
        """Put a job into the batch that is under way, or begin another one.

        Args:
            job: Its key; one that is known already is put anew.
            at: When it came: no earlier than any job before.
        """
        if at > self._ends_at:
            self._ends_at, self._came = at + self._lasts_s, 0
        self._of[job] = self._ends_at, self._came
        self._came += 1

    def ends_at(self, job: str) -> float | None:
        """Return when a job's batch ends, or has ended; None of a job that is not known."""
        return self._of[job][0] if job in self._of else None

    def before(self, job: str) -> int:
        """Return how many jobs of its batch came before a job; 0 of a job that is not known."""
        return self._of[job][1] if job in self._of else 0

    def forget(self, job: str) -> None:
        """Drop a job that has begun, or is gone."""
        self._of.pop(job, None)
