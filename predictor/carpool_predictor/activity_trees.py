"""Boosted trees as plain numbers: read from JSON, unable to run anything, evaluated all at once.

The trees of a forest stand one after the other in five lists. A node below a split has the larger index, so that
walking always ends; `check` refuses whatever breaks that before anything is predicted.

Walking 300 trees in Python takes a quarter of a millisecond. `Ensemble` does what QuickScorer does (Lucchese et al.,
SIGIR '15): a node whose answer is "right" rules out the leaves on its left; what all such nodes of a tree leave over
begins with the leaf that walking would have found. Which leaves a value rules out, in every tree, is one row of a
table, so that a prediction is the AND of as many rows as there are features.
"""

import bisect
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from carpool_predictor.trees import MalformedError

MAX_LEAVES = 64
"""Bits of the largest mask."""


class Forest(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of regression trees."""

    roots: list[int]
    """Index of each tree's first node."""
    feature: list[int]
    """What a node asks about; -1 in leaves."""
    threshold: list[float]
    """A node goes left where its feature is at most this."""
    left: list[int]
    right: list[int]
    value: list[float]
    """What a leaf adds; 0 in other nodes."""

    def check(self, features: int) -> None:
        """Refuse a forest that could fail or never end.

        Raises:
            MalformedError: Lists of different lengths, an index that points nowhere or back, or a tree too large.
        """
        size = len(self.feature)
        if {len(self.threshold), len(self.left), len(self.right), len(self.value)} != {size}:
            raise MalformedError("expected lists of one length in a forest; build the model again with `carpool train`")
        ahead = all(
            asked == -1 or (0 <= asked < features and node < low < size and node < high < size)
            for node, (asked, low, high) in enumerate(zip(self.feature, self.left, self.right, strict=True))
        )
        if not ahead or any(not 0 <= root < size for root in self.roots):
            raise MalformedError("a node of a forest points nowhere; build the model again with `carpool train`")
        if any(self._is_large(root) for root in self.roots):
            raise MalformedError(f"expected trees of at most {MAX_LEAVES} leaves; build the model with fewer")

    def _is_large(self, root: int) -> bool:
        """Whether a tree has more leaves than fit; counted without recursion, and no further than needed."""
        leaves, waiting = 0, [root]
        while waiting and leaves <= MAX_LEAVES:
            node = waiting.pop()
            if self.feature[node] < 0:
                leaves += 1
            else:
                waiting += (self.left[node], self.right[node])
        return leaves > MAX_LEAVES


class Ensemble:
    """Forests over the same features, evaluated together.

    Args:
        forests: What was checked before.
        features: Number of features.
    """

    def __init__(self, forests: Sequence[Forest], features: int) -> None:
        leaves: list[list[float]] = []
        splits: list[tuple[int, float, int, int]] = []
        for forest in forests:
            for root in forest.roots:
                leaves.append(_walk(forest, root, len(leaves), splits))
        width = max((len(tree) for tree in leaves), default=1)
        mask = next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if np.iinfo(kind).bits >= width)
        full = np.iinfo(mask).max
        self._one = mask(1)
        self._thresholds: list[list[float]] = []
        self._offsets: list[int] = []
        tables: list[NDArray[np.unsignedinteger]] = []
        rows = 0
        for feature in range(features):
            own = sorted(split[1:] for split in splits if split[0] == feature)
            table = np.full((len(own) + 1, len(leaves)), full, mask)
            for row, (_, tree, ruled_out) in enumerate(own, start=1):
                table[row, tree] = full & ~ruled_out
            tables.append(np.bitwise_and.accumulate(table, axis=0))
            self._thresholds.append([threshold for threshold, _, _ in own])
            self._offsets.append(rows)
            rows += len(own) + 1
        self._table = np.concatenate(tables)
        self._values = np.zeros(len(leaves) * width)
        self._first = np.arange(len(leaves)) * width
        for tree, values in enumerate(leaves):
            self._values[tree * width : tree * width + len(values)] = values
        self._starts = np.cumsum([0, *(len(forest.roots) for forest in forests)])[:-1]

    def predict(self, features: Sequence[float]) -> list[float]:
        """Return each forest's sum for one sample."""
        rows = [
            offset + bisect.bisect_left(thresholds, value)
            for offset, thresholds, value in zip(self._offsets, self._thresholds, features, strict=True)
        ]
        left = np.bitwise_and.reduce(self._table.take(rows, axis=0), axis=0)
        # The lowest bit that is set, as a number of a leaf.
        leaf = np.bitwise_count((left & -left) - self._one)
        sums: list[float] = np.add.reduceat(self._values.take(self._first + leaf), self._starts).tolist()
        return sums


def _walk(forest: Forest, root: int, tree: int, splits: list[tuple[int, float, int, int]]) -> list[float]:
    """Return a tree's leaves from left to right; note each split as (feature, threshold, tree, leaves on its left)."""

    def visit(node: int, first: int) -> list[float]:
        if forest.feature[node] < 0:
            return [forest.value[node]]
        below = visit(forest.left[node], first)
        ruled_out = ((1 << len(below)) - 1) << first
        splits.append((forest.feature[node], forest.threshold[node], tree, ruled_out))
        return below + visit(forest.right[node], first + len(below))

    return visit(root, 0)


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """What a forest's errors were on architectures that were held out, by how large its prediction was."""

    edges: list[float]
    """Predictions between which errors are alike, ascending; one fewer than the bins."""
    lower: list[float]
    """5% quantile of (measured - predicted) in each bin."""
    upper: list[float]
    """95% quantile in each bin."""

    def around(self, predicted: float) -> tuple[float, float]:
        """Return the lower and the upper end around a prediction."""
        index = bisect.bisect_left(self.edges, predicted)
        return predicted + self.lower[index], predicted + self.upper[index]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted quantity."""

    forest: Forest
    convolutional: Bins
    """Errors on models with convolutions."""
    plain: Bins
    """Errors on models without."""

    def around(self, median: float, *, convolutional: bool) -> tuple[float, float, float]:
        """Return median, lower and upper end, not yet clipped."""
        return median, *(self.convolutional if convolutional else self.plain).around(median)

    def check(self, features: int) -> None:
        """Refuse what cannot be evaluated.

        Raises:
            MalformedError: As `Forest.check`; or bins and edges do not match.
        """
        self.forest.check(features)
        for bins in (self.convolutional, self.plain):
            if not len(bins.lower) == len(bins.upper) == len(bins.edges) + 1:
                raise MalformedError("expected one bin more than edges; build the model again with `carpool train`")
