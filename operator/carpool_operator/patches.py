"""The merge patch (RFC 7386) that turns one JSON object into another."""

from collections.abc import Mapping
from typing import Any


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Build the smallest merge patch from `old` to `new`: null for keys that go, lists whole, objects in turn.

    Needed because a status leaves out fields at their defaults, and what a merge patch leaves out stays as it was.
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
