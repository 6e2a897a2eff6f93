"""Kubeconfig files, one or several, read as kubectl reads them: whoever says something first is believed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carpool_core.kube.credentials import KubeConfigError


class Entry(NamedTuple):
    """A cluster, a user or a context."""

    said: Mapping[str, Any]
    file: Path
    """Where it stands; its relative paths begin beside that file."""


class KubeConfig:
    """What files say together.

    Args:
        names: One file, or several as `KUBECONFIG` lists them, of which those that are not there count for nothing.

    Raises:
        KubeConfigError: None can be read, or one is no kubeconfig.
    """

    def __init__(self, names: str) -> None:
        self.name = names
        # Whole paths, because a plugin beside a file would else be looked for wherever PATH leads.
        paths = [Path(name).expanduser().absolute() for name in names.split(os.pathsep) if name]
        there = [path for path in paths if is_there(path)] if len(paths) > 1 else paths
        if not there:
            raise KubeConfigError(f"expected a kubeconfig at one of {names}, found none")
        self._read = [(path, _read(path)) for path in there]

    def current(self) -> str:
        """Return the name of the current context.

        Raises:
            KubeConfigError: There is none.
        """
        for _, said in self._read:
            if context := said.get("current-context"):
                return str(context)
        raise KubeConfigError(
            f"the kubeconfig {self.name} has no current-context: run `kubectl config use-context NAME`"
        )

    def named(self, singular: str, name: str) -> Entry:
        """Return the context, the cluster or the user of that name.

        Raises:
            KubeConfigError: There is none.
        """
        plural = f"{singular}s"
        for file, said in self._read:
            for entry in _entries(said, plural, file):
                if entry.get("name") == name:
                    return Entry(dict(entry.get(singular) or {}), file)
        raise KubeConfigError(
            f"the kubeconfig {self.name} names the {singular} {name!r}, which is not among its {plural}"
        )


def is_there(path: Path) -> bool:
    """Say whether a kubeconfig exists.

    Raises:
        KubeConfigError: That may not be looked at.
    """
    try:
        return path.exists()
    except OSError as error:
        raise KubeConfigError(
            f"cannot look at the kubeconfig {path}: {error.strerror}; set KUBECONFIG (or --kubeconfig) to one "
            "that may be read"
        ) from error


def _entries(said: Mapping[str, Any], plural: str, file: Path) -> Sequence[Mapping[str, Any]]:
    entries = said.get(plural) or []
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise KubeConfigError(f"expected a list of {plural} with names in the kubeconfig {file}, found {entries!r}")
    return entries


def _read(path: Path) -> Mapping[str, Any]:
    import yaml  # half a megabyte that a pod never needs

    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise KubeConfigError(f"cannot read the kubeconfig {path}: {error}") from error
    if said is not None and not isinstance(said, dict):
        raise KubeConfigError(f"expected a kubeconfig in {path}, found {type(said).__name__}")
    return said or {}
