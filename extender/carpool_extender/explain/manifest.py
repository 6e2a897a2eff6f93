"""A job's manifest as its user wrote it: read, and checked by the API server as on `kubectl apply`."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from carpool_core.keys import GROUP_VERSION
from carpool_core.kube.api import GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.errors import Conflict, Forbidden, Invalid
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.schema import describe_decode_error

_NOISE = re.compile(r"\s*(?:, |\* )?<nil>: Invalid value: \"?null\"?: some validation rules were not checked[^,\]\n]*")


STDIN = Path("-")
"""In place of a file: the standard input."""


class ManifestError(ValueError):
    """The manifest would be refused; `str()` says why."""


class Checked(NamedTuple):
    """A job that could be created."""

    job: GpuTrainingJob
    notes: list[str]
    """What should be known of it, as sentences."""
    unchecked: list[str]
    """What could not be checked, as sentences."""


def read(path: Path, namespace: str | None) -> dict[str, Any]:
    """Read a manifest.

    Args:
        path: A YAML file with one GpuTrainingJob; `-` is the standard input.
        namespace: Namespace that the user named; the manifest may name no other. None or empty stays empty.

    Raises:
        ManifestError: There is something else in it.
    """
    try:
        found = msgspec.yaml.decode(sys.stdin.buffer.read() if path == STDIN else path.read_bytes())
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{path}: expected a GpuTrainingJob in one YAML document: {in_one_line(error)}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind != "GpuTrainingJob":
        raise ManifestError(f"{path}: expected a GpuTrainingJob, found {f'a {kind}' if kind else 'no kind'}")
    if (version := found.get("apiVersion")) != GROUP_VERSION:
        raise ManifestError(f"{path}: expected apiVersion {GROUP_VERSION}, found {version or 'none'}")
    metadata = found.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise ManifestError(f"{path}: expected metadata.name, found none; give the job a name")
    own = metadata.get("namespace")
    if namespace and own and own != namespace:
        raise ManifestError(
            f"{path}: the namespace of the manifest, {own}, is not {namespace}, which -n names; leave one of them out"
        )
    return {**found, "metadata": {**metadata, "namespace": own or namespace or ""}}


async def checked(api: KubeApi, manifest: dict[str, Any]) -> Checked:
    """Have the API server check a job without creating it, with the asker's rights.

    Raises:
        ManifestError: It would be refused.
        KubeError: The API server could not be asked.
    """
    metadata = {**manifest["metadata"], "namespace": manifest["metadata"].get("namespace") or api.namespace}
    notes, unchecked, body = list[str](), list[str](), {**manifest, "metadata": metadata}
    try:
        body = await api.create(GPU_TRAINING_JOBS, body, namespace=metadata["namespace"], is_dry_run=True)
    except Invalid as error:
        raise ManifestError(f"the API server would refuse it: {_NOISE.sub('', error.server_message)}") from error
    except Conflict:
        notes.append("a job of this name exists already; what is told here is of another one with this manifest")
    except Forbidden:
        unchecked.append(
            "not checked: whether the API server would take the manifest (you may not create gputrainingjobs in "
            f"namespace {metadata['namespace']})"
        )
    try:
        return Checked(msgspec.convert({**body, "status": {}}, GpuTrainingJob), notes, unchecked)
    except msgspec.ValidationError as error:
        raise ManifestError(describe_decode_error(str(error))) from error


def in_one_line(error: Exception) -> str:
    """Return what a parser of YAML says, which it says on several lines."""
    return " ".join(str(error).split())
