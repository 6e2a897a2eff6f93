from typing import Any

import pytest
from carpool_core.testing.kube import PatchError, apply, merge
from hypothesis import given
from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(max_size=3), JSON, max_size=4)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


@given(OBJECT, OBJECT)
def test_merging_twice_is_merging_once(target: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge(target, patch)
    assert merge(once, patch) == once


@given(OBJECT)
def test_merging_into_nothing_keeps_all_but_nulls(patch: dict[str, Any]) -> None:
    assert merge({}, patch) == _without_nulls(patch)


@given(OBJECT)
def test_an_empty_patch_changes_nothing(target: dict[str, Any]) -> None:
    assert merge(target, {}) == target
    assert apply(target, []) == target


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "add", "path": "/b", "value": 2}, {"a": [1, 2], "b": 2}),
        ({"op": "add", "path": "/a/1", "value": 9}, {"a": [1, 9, 2]}),
        ({"op": "add", "path": "/a/-", "value": 9}, {"a": [1, 2, 9]}),
        ({"op": "replace", "path": "/a/0", "value": 9}, {"a": [9, 2]}),
        ({"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"op": "remove", "path": "/a"}, {}),
        ({"op": "copy", "from": "/a/0", "path": "/a~1b"}, {"a": [1, 2], "a/b": 1}),
        ({"op": "move", "from": "/a/0", "path": "/c"}, {"a": [2], "c": 1}),
        ({"op": "replace", "path": "", "value": {"x": 1}}, {"x": 1}),
        ({"op": "test", "path": "/a/1", "value": 2}, {"a": [1, 2]}),
    ],
    ids=lambda value: str(value.get("op", "")) + str(value.get("path", "")),
)
def test_operations(operation: dict[str, Any], expected: dict[str, Any]) -> None:
    before = {"a": [1, 2]}
    assert apply(before, [operation]) == expected
    assert before == {"a": [1, 2]}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a/0", "value": 7},
        {"op": "test", "path": "/missing", "value": None},
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "add", "path": "/missing/deep", "value": 1},
        {"op": "add", "path": "/a/7", "value": 1},
        {"op": "replace", "path": "/a/2", "value": 1},
        {"op": "add", "path": "/a/0/deep", "value": 1},
        {"op": "add", "path": "a", "value": 1},
        {"op": "shake", "path": "/a"},
    ],
)
def test_what_does_not_apply(operation: dict[str, Any]) -> None:
    with pytest.raises(PatchError):
        apply({"a": [1, 2]}, [operation])
