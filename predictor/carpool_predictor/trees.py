"""Boosted regression trees as plain data: JSON in, a number out. No NumPy, no scikit-learn, no pickle."""

import math
from collections.abc import Sequence

import msgspec


class MalformedError(ValueError):
    """An artifact does not hold what it should; the message says what is wrong."""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """One regression tree. Node i is a leaf where `left[i]` is 0; the root is node 0."""

    feature: list[int]
    threshold: list[float]
    left: list[int]
    right: list[int]
    value: list[float]

    def at(self, row: Sequence[float]) -> float:
        """Return the leaf's value for a row of features."""
        node = 0
        while self.left[node]:
            below = row[self.feature[node]] <= self.threshold[node]
            node = self.left[node] if below else self.right[node]
        return self.value[node]


class Forest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sum of trees."""

    features: list[str]
    """Names of the columns, in order."""
    base: float
    trees: list[Tree]

    def at(self, row: Sequence[float]) -> float:
        """Return the prediction for a row, one number a feature."""
        return self.base + sum(tree.at(row) for tree in self.trees)

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
            if not all(map(math.isfinite, [*tree.threshold, *tree.value])):
                raise MalformedError(f"tree {number} holds a number that is not finite")
