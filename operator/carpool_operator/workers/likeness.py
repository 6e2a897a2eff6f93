"""Whether a pod that was there already is the one that Carpool would have made."""

from collections.abc import Mapping, Sequence
from typing import Any

_MAY_GROW = frozenset({"volumes", "volumeMounts", "tolerations", "imagePullSecrets"})
"""Lists to which the API server's own admission adds items."""

_DECISIVE = frozenset(
    {"command", "args", "env", "envFrom", "lifecycle", "initContainers", "hostNetwork", "hostPID", "hostIPC"}
)
"""What the API server never adds by itself, and what would make another program of a container."""


def is_as_built(found: Mapping[str, Any], built: Mapping[str, Any]) -> bool:
    """Whether a pod holds all that Carpool puts into such a pod: what it was killed before recording, it may keep.

    A pod that differs is told apart even where only an admission webhook or a unit's spelling made it differ; then
    it is made again, which costs its start.

    Args:
        found: The pod, as the API server returns it.
        built: The pod's body, as it would be created.
    """
    return all(_holds(found.get(part), built[part], part) for part in ("metadata", "spec"))


def _holds(found: Any, wanted: Any, key: str) -> bool:
    if isinstance(wanted, Mapping):
        return not wanted or (isinstance(found, Mapping) and _holds_fields(found, wanted))
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return not wanted or (isinstance(found, Sequence) and _holds_items(found, wanted, key))
    return wanted in (None, found) or str(found) == str(wanted)


def _holds_fields(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    is_altered = any(found.get(name) for name in _DECISIVE if not wanted.get(name))
    return not is_altered and all(_holds(found.get(name), value, name) for name, value in wanted.items())


def _holds_items(found: Sequence[Any], wanted: Sequence[Any], key: str) -> bool:
    if key in _MAY_GROW:
        return all(any(_holds(item, one, key) for item in found) for one in wanted)
    return len(found) == len(wanted) and all(_holds(*pair, key) for pair in zip(found, wanted, strict=True))
