"""Boosted trees as plain numbers: read from JSON, unable to run anything; `quickscorer` evaluates them.

The trees of a forest stand one after the other in five lists. A node below a split has the larger index, so that
walking always ends; `check` refuses whatever breaks that before anything is predicted.
"""

import bisect

import msgspec

from carpool_predictor.cost_models.quickscorer import MAX_LEAVES
from carpool_predictor.features.malformed import MalformedError


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
