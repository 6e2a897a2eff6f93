"""Boosted regression trees as plain data: JSON in, a number out. No NumPy, no scikit-learn, no pickle."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from carpool_predictor.cost_models.quickscorer import MAX_LEAVES, Ensemble
from carpool_predictor.features.malformed import MalformedError


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
