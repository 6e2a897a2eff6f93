"""The GPUs of nodes side by side: reducing along nodes of a few GPUs takes far longer than place by place."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""In `Grid.rows`: the node has no GPU more."""


class Grid(NamedTuple):
    """The GPUs of some nodes."""

    rows: NDArray[np.intp]
    """(places, nodes) The first GPU of each node, then the second, and so on, by their rows; or NOWHERE."""
    node: NDArray[np.intp]
    """(nodes,) Index of each node."""
    has_gaps: bool
    """Whether a node has fewer GPUs than another."""

    def only(self, nodes: NDArray[np.bool_]) -> "Grid":
        """Return some of the nodes; those that are not here have no GPUs.

        Args:
            nodes: Which, by their indices.
        """
        kept = np.flatnonzero(nodes.take(self.node))
        return Grid(self.rows.take(kept, axis=1), self.node.take(kept), self.has_gaps)


def grid_of(alive: NDArray[np.bool_], node: NDArray[np.int32]) -> Grid:
    """Put the GPUs of all nodes side by side.

    Args:
        alive: Whether a GPU has this row, shape (gpus,).
        node: Index of its node, same shape; rows of one node stand together.
    """
    rows = np.flatnonzero(alive)
    of = node.take(rows).astype(np.intp)
    is_first = np.ones(rows.size, np.bool_)
    np.not_equal(of[1:], of[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    run = is_first.cumsum() - 1
    place = np.arange(rows.size) - starts.take(run)
    grid = np.full((int(place.max(initial=-1)) + 1, starts.size), NOWHERE, np.intp)
    grid[place, run] = rows
    return Grid(grid, of.take(starts), grid.size > rows.size)
