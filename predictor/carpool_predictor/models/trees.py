"""Boosted regression trees as plain data: JSON in, a number out. Reading a forest cannot run code."""

import math
from collections.abc import Sequence

import msgspec

from carpool_predictor.features import MalformedError

_ADVICE = "install carpool again"


class Forest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sum of regression trees, stored one after the other in lists of one length.

    A child has a larger index than its parent, so that each walk ends.
    """

    base: float = 0.0
    """Prediction without any tree."""
    roots: list[int]
    """Index of each tree's first node."""
    feature: list[int]
    """Feature that a node compares; -1 in leaves."""
    threshold: list[float]
    """A node continues on the left where its feature is at most this; 0 in leaves."""
    left: list[int]
    """Index of the left child; 0 in leaves."""
    right: list[int]
    """Index of the right child; 0 in leaves."""
    value: list[float]
    """Summand of a leaf; 0 in other nodes."""

    def predict(self, row: Sequence[float]) -> float:
        """Return the prediction for one sample, given one number per feature."""
        feature, threshold, left, right = self.feature, self.threshold, self.left, self.right
        total = 0.0
        for node in self.roots:
            while (column := feature[node]) >= 0:
                node = left[node] if row[column] <= threshold[node] else right[node]
            total += self.value[node]
        return self.base + total

    def check(self, features: int) -> None:
        """Refuse a forest that could fail or never end; a row has this number of features.

        Raises:
            MalformedError: The lists differ in length, an index is out of range or points backwards, or a number is not
                finite.
        """
        size = len(self.feature)
        if {len(self.threshold), len(self.left), len(self.right), len(self.value)} != {size}:
            raise MalformedError(f"expected the lists of a forest to have one length; {_ADVICE}")
        for node, (column, left, right) in enumerate(zip(self.feature, self.left, self.right, strict=True)):
            if column != -1 and not (0 <= column < features and node < left < size and node < right < size):
                raise MalformedError(f"node {node} of a forest points backwards or out of range; {_ADVICE}")
        if any(not 0 <= root < size for root in self.roots):
            raise MalformedError(f"a root of a forest is out of range; {_ADVICE}")
        if not all(map(math.isfinite, [*self.threshold, *self.value])):
            raise MalformedError(f"a forest holds a number that is not finite; {_ADVICE}")
