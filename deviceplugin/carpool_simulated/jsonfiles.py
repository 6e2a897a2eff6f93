"""JSON files that are read by types and replaced whole."""

import json
import math
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from carpool_simulated.errors import DeviceStateError

T = TypeVar("T")


def _kinds(declared: Any) -> tuple[type, ...]:
    return (dict,) if get_origin(declared) is dict else get_args(declared) or (declared,)


def checked(cls: type[T], raw: object, path: Path, do: str) -> T:
    """Build a flat dataclass out of JSON, each field of the type that it is declared with; raises DeviceStateError."""
    if not isinstance(raw, dict):
        raise DeviceStateError(path, expected="a JSON object", found=type(raw).__name__, do=do)
    values: dict[str, Any] = {}
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name not in raw:
            if spec.default is MISSING and spec.default_factory is MISSING:
                raise DeviceStateError(path, expected=f"a field {spec.name!r}", found=f"only {sorted(raw)}", do=do)
            continue
        value, kinds = raw[spec.name], _kinds(spec.type)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise DeviceStateError(path, expected=f"{spec.name!r} to be {names}", found=repr(value)[:80], do=do)
        values[spec.name] = value
    return cls(**values)


def read_json(path: Path, do: str) -> object:
    """Read a JSON file; raises DeviceStateError where there is none or it is not JSON."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as e:
        raise DeviceStateError(path, expected="a file", found="nothing", do=do) from e
    except OSError as e:
        raise DeviceStateError(path, expected="a file that can be read", found=str(e), do=do) from e
    return parsed(text, path, do)


def parsed(text: bytes, path: Path, do: str) -> object:
    """Read JSON; raises DeviceStateError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DeviceStateError(path, expected="JSON", found=repr(text[:60]), do=do) from e


def write_json(path: Path, value: object) -> None:
    """Replace a file whole: readers see the old or the new one."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file whole; nothing that somebody put in its place is followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, 0o644)  # whatever the umask: containers run as any user
        file.write(text)
    temporary.replace(path)
