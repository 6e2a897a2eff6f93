"""Which rows changed when, so that whoever worked something out brings it up to date row by row."""

from collections.abc import Sequence

import numpy as np

from carpool_extender.state.view import Rows

LONGEST = 2048
"""Changes that are remembered; who is further behind looks at everything again."""


class Journal:
    """The latest changes of the rows of a cluster."""

    def __init__(self) -> None:
        self._changes: list[Sequence[int]] = []
        self._first = 0
        self._settled = 0

    @property
    def generation(self) -> int:
        """Number of changes until now."""
        return self._first + len(self._changes)

    def note(self, rows: Sequence[int]) -> None:
        """Write down that rows have changed."""
        self._changes.append(rows)
        if len(self._changes) > 2 * LONGEST:
            # What is not settled must stay, however much it is: nothing else tells of it.
            forgotten = min(LONGEST, self._settled - self._first)
            del self._changes[:forgotten]
            self._first += forgotten

    def since(self, generation: int) -> Rows | None:
        """Return the rows that changed after a generation, in rising order; None where that is too long ago."""
        if generation < self._first or self.generation - generation > LONGEST:
            return None
        return _together(self._changes[generation - self._first :])

    def unsettled(self) -> Rows:
        """Return the rows that changed since this was asked last."""
        rows = _together(self._changes[self._settled - self._first :])
        self._settled = self.generation
        return rows


def _together(changes: list[Sequence[int]]) -> Rows:
    # Changes are of a few rows each, for which a set is several times as quick as arrays are.
    rows = sorted(set().union(*changes))
    return np.fromiter(rows, np.intp, len(rows))
