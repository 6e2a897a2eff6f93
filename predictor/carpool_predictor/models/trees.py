"""Boosted regression trees as plain data: JSON in, a number out. No NumPy, no scikit-learn, no pickle."""

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Protocol

import msgspec

from carpool_predictor.features import MalformedError

_MASK_BYTES = 2
MAX_LEAVES = 8 * _MASK_BYTES
"""Bits that each tree has for its leaves."""
_FORWARD = 1 if sys.byteorder == "little" else -1
"""The first tree has the lowest bits of the number, which on some machines come last."""
_LOWEST = bytes([0, *((mask & -mask).bit_length() - 1 for mask in range(1, 1 << MAX_LEAVES))])
"""Number of the lowest bit of each mask."""


class Nodes(Protocol):
    """Trees that stand one after the other in lists of one length; a node below a split has the larger index."""

    @property
    def roots(self) -> Sequence[int]:
        """Index of each tree's first node."""
        ...

    @property
    def feature(self) -> Sequence[int]:
        """What a node asks about; -1 in leaves."""
        ...

    @property
    def threshold(self) -> Sequence[float]:
        """A node goes left where its feature is at most this."""
        ...

    @property
    def left(self) -> Sequence[int]:
        """Index of the node below, where the answer is "left"."""
        ...

    @property
    def right(self) -> Sequence[int]:
        """Index of the other one."""
        ...

    @property
    def value(self) -> Sequence[float]:
        """What a leaf adds."""
        ...


class Ensemble:
    """Forests over the same features, evaluated together.

    Args:
        forests: What was checked before.
        features: Number of features.
    """

    def __init__(self, forests: Sequence[Nodes], features: int) -> None:
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


def _walk(forest: Nodes, root: int, tree: int, splits: list[tuple[int, float, int, int]]) -> list[float]:
    """Return a tree's leaves from left to right; note each split as (feature, threshold, tree, leaves on its left)."""

    def visit(node: int, first: int) -> list[float]:
        if forest.feature[node] < 0:
            return [forest.value[node]]
        below = visit(forest.left[node], first)
        ruled_out = ((1 << len(below)) - 1) << first
        splits.append((forest.feature[node], forest.threshold[node], tree, ruled_out))
        return below + visit(forest.right[node], first + len(below))

    return visit(root, 0)


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """One regression tree. Node i is a leaf where `left[i]` is 0; the root is node 0."""

    feature: list[int]
    threshold: list[float]
    left: list[int]
    right: list[int]
    value: list[float]


@dataclass(frozen=True)
class _Nodes:
    """The trees of a forest, one after the other."""

    roots: list[int]
    feature: list[int]
    threshold: list[float]
    left: list[int]
    right: list[int]
    value: list[float]


def _in_a_row(trees: Sequence[Tree]) -> _Nodes:
    nodes = _Nodes([], [], [], [], [], [])
    for tree in trees:
        first = len(nodes.value)
        nodes.roots.append(first)
        nodes.feature.extend(asked if low else -1 for asked, low in zip(tree.feature, tree.left, strict=True))
        nodes.threshold.extend(tree.threshold)
        nodes.left.extend(first + low for low in tree.left)
        nodes.right.extend(first + high for high in tree.right)
        nodes.value.extend(tree.value)
    return nodes


class Forest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A sum of trees."""

    features: list[str]
    """Names of the columns, in order."""
    base: float
    trees: list[Tree]

    def at(self, row: Sequence[float]) -> float:
        """Return the prediction for a row, one number a feature."""
        return self.base + self._ensemble.predict(row)[0]

    @cached_property
    def _ensemble(self) -> Ensemble:
        return Ensemble([_in_a_row(self.trees)], len(self.features))

    def check(self) -> None:
        """Make sure that evaluating the trees ends and stays inside them.

        Raises:
            MalformedError: It would not.
        """
        for number, tree in enumerate(self.trees):
            nodes = len(tree.value)
            if not nodes or {nodes} != {len(tree.feature), len(tree.threshold), len(tree.left), len(tree.right)}:
                raise MalformedError(f"tree {number} has columns of different lengths")
            for node, (left, right) in enumerate(zip(tree.left, tree.right, strict=True)):
                if left and not (node < left < nodes and node < right < nodes):
                    raise MalformedError(f"tree {number} points backwards or outside at node {node}")
                if left and not 0 <= tree.feature[node] < len(self.features):
                    raise MalformedError(f"tree {number} asks for feature {tree.feature[node]} at node {node}")
            if tree.left.count(0) > MAX_LEAVES:
                raise MalformedError(f"tree {number} has more than {MAX_LEAVES} leaves")
            if not all(map(math.isfinite, [*tree.threshold, *tree.value])):
                raise MalformedError(f"tree {number} holds a number that is not finite")
