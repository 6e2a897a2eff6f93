"""Boosted trees as plain numbers: read from JSON, unable to run anything, evaluated all at once.

The trees of a forest stand one after the other in five lists. A node below a split has the larger index, so that
walking always ends; `check` refuses whatever breaks that before anything is predicted.

Walking 300 trees in Python takes a quarter of a millisecond. `Ensemble` does what QuickScorer does (Lucchese et al.,
SIGIR '15): a node whose answer is "right" rules out the leaves on its left; what all such nodes of a tree leave over
begins with the leaf that walking would have found. Which leaves a value rules out, in all trees, is one large number
out of a table, so that a prediction is the AND of as many numbers as there are features. No NumPy is needed for that.
"""

import bisect
import sys
from collections.abc import Sequence
from operator import getitem

import msgspec

from carpool_predictor.trees import MalformedError

_MASK_BYTES = 2
MAX_LEAVES = 8 * _MASK_BYTES
"""Bits that each tree has for its leaves."""
_FORWARD = 1 if sys.byteorder == "little" else -1
"""The first tree has the lowest bits of the number, which on some machines come last."""
_LOWEST = bytes([0, *((mask & -mask).bit_length() - 1 for mask in range(1, 1 << MAX_LEAVES))])
"""Number of the lowest bit of each mask."""


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
        self._ends: list[tuple[int, int]] = []
        for forest in forests:
            first = len(leaves)
            for root in forest.roots:
                leaves.append(_walk(forest, root, len(leaves), splits))
            self._ends.append((first, len(leaves)))
        self._leaves = leaves
        self._all = (1 << MAX_LEAVES * len(leaves)) - 1
        self._columns = [self._column(splits, feature) for feature in range(features)]

    def _column(self, splits: Sequence[tuple[int, float, int, int]], feature: int) -> tuple[list[float], list[int]]:
        """Return a feature's thresholds, ascending, and what is left of all leaves beyond so many of them."""
        own = sorted(split[1:] for split in splits if split[0] == feature)
        left = [self._all]
        for _, tree, ruled_out in own:
            left.append(left[-1] & ~(ruled_out << MAX_LEAVES * tree))
        return [threshold for threshold, _, _ in own], left

    def predict(self, features: Sequence[float]) -> list[float]:
        """Return each forest's sum for one sample."""
        left = self._all
        for value, (thresholds, beyond) in zip(features, self._columns, strict=True):
            left &= beyond[bisect.bisect_left(thresholds, value)]
        masks = memoryview(left.to_bytes(_MASK_BYTES * len(self._leaves), sys.byteorder)).cast("H")[::_FORWARD]
        found = list(map(getitem, self._leaves, map(_LOWEST.__getitem__, masks)))
        return [sum(found[first:last]) for first, last in self._ends]


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
