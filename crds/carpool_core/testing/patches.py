"""JSON patch (RFC 6902) and merge patch (RFC 7386), as the API server applies them."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


class PatchError(ValueError):
    """A JSON patch does not apply; the API server answers 422."""


def merge(target: Any, patch: Any) -> Any:
    """Apply a merge patch: null removes a key, objects merge, all else replaces."""
    if not isinstance(patch, Mapping):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def apply(target: Any, operations: list[Mapping[str, Any]]) -> Any:
    """Apply a JSON patch; all of it or nothing.

    Raises:
        PatchError: A path does not exist, or a test does not hold.
    """
    root = {"": deepcopy(target)}
    for operation in operations:
        _apply_one(root, operation)
    return root[""]


def _apply_one(root: dict[str, Any], operation: Mapping[str, Any]) -> None:
    kind, path = operation["op"], str(operation["path"])
    if kind == "test":
        if _get(root, path) != operation.get("value"):
            raise PatchError(f"testing value {path} failed")
    elif kind == "add":
        _set(root, path, deepcopy(operation["value"]), insert=True)
    elif kind == "replace":
        _get(root, path)
        _set(root, path, deepcopy(operation["value"]), insert=False)
    elif kind == "remove":
        _pop(root, path)
    elif kind == "copy":
        _set(root, path, deepcopy(_get(root, str(operation["from"]))), insert=True)
    elif kind == "move":
        _set(root, path, _pop(root, str(operation["from"])), insert=True)
    else:
        raise PatchError(f"unexpected kind of operation: {kind}")


def _parts(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise PatchError(f"a JSON pointer begins with a slash: {path!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _parent(root: dict[str, Any], path: str) -> tuple[Any, str]:
    *parents, last = _parts(path)
    here: Any = root
    for part in parents:
        here = _child(here, part, path)
    if not isinstance(here, dict | list):
        raise PatchError(f"doc is missing path: {path}: missing value")
    return here, last


def _index(items: list[Any], part: str, path: str, limit: int) -> int:
    if not part.isdigit() or int(part) >= limit:
        raise PatchError(f"index {part!r} of {path} is out of bounds of {len(items)} items")
    return int(part)


def _child(here: Any, part: str, path: str) -> Any:
    if isinstance(here, list):
        return here[_index(here, part, path, len(here))]
    if isinstance(here, dict) and part in here:
        return here[part]
    raise PatchError(f"doc is missing path: {path}: missing value")


def _get(root: dict[str, Any], path: str) -> Any:
    parent, last = _parent(root, path)
    return _child(parent, last, path)


def _set(root: dict[str, Any], path: str, value: Any, *, insert: bool) -> None:
    parent, last = _parent(root, path)
    if isinstance(parent, dict):
        parent[last] = value
    elif not insert:
        parent[_index(parent, last, path, len(parent))] = value
    elif last == "-":
        parent.append(value)
    else:
        parent.insert(_index(parent, last, path, len(parent) + 1), value)


def _pop(root: dict[str, Any], path: str) -> Any:
    value = _get(root, path)
    parent, last = _parent(root, path)
    if isinstance(parent, dict):
        del parent[last]
    else:
        del parent[int(last)]
    return value
