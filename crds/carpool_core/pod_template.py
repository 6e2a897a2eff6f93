"""Validation of a job's pod template: what the CRD leaves unchecked, and the API server's errors in its terms. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from carpool_core.kube.errors import Invalid
from carpool_core.resources.job import GpuTrainingJob

_TEMPLATE_FIELDS = frozenset({"metadata", "spec"})
_METADATA_FIELDS = frozenset({"labels", "annotations", "name", "namespace", "creationTimestamp"})
"""The pod takes the first two. Tools print the others, which a template ignores, as in batch/v1 Job."""


def template_error(job: GpuTrainingJob) -> str | None:
    """Return which field of the pod template the pods would lose; None if there is none.

    The CRD checks all other fields, and the API server the pod's spec.
    """
    template = job.spec.template
    unknown = [*sorted(set(template) - _TEMPLATE_FIELDS)]
    unknown += [f"metadata.{field}" for field in sorted(set(template.get("metadata") or {}) - _METADATA_FIELDS)]
    if not unknown:
        return None
    return f"spec.template.{unknown[0]}: a template has no such field; correct its spelling or remove it"


# Errors of the API server about the pod, rephrased for the template

_UNREADABLE = re.compile(r'^Pod in version "[^"]*" cannot be handled as a Pod: ')
_INVALID = re.compile(r'^Pod "[^"]*" is invalid: ')
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_WRONG_TYPE = re.compile(r"cannot unmarshal (\w+)(?: \S+)? into Go struct field [^.]+\.(\S+) of type (.+)$")

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "bool": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip
"""Python types by the names that the API server's decoder uses."""

_MAX_PATHS = 3


def is_about_the_pod(error: Invalid) -> bool:
    """Return whether the API server found the pod itself invalid; admission webhooks may answer 400 or 422, too."""
    return bool(_UNREADABLE.match(error.server_message) or _INVALID.match(error.server_message))


def template_message(error: Invalid, body: Mapping[str, Any]) -> str:
    """Return which field of the template is invalid, and how; `body` is the pod that the error is about."""
    unknown = _UNKNOWN_FIELD.findall(error.server_message)
    if unknown:
        fields = ", ".join(f"spec.template.{field}" for field in unknown)
        return f"{fields}: a pod has no such field; correct its spelling or remove it"
    if found := _WRONG_TYPE.search(error.server_message):
        kind, field, wanted = found.groups()
        paths = list(_paths(body, field.split("."), kind)) or [field]
        fields = ", ".join(f"spec.template.{path}" for path in paths[:_MAX_PATHS])
        return f"{fields}: expected {wanted}, found a value of type {kind}"
    message = _INVALID.sub("", _UNREADABLE.sub("", error.server_message))
    return f"spec.template.{message}" if re.match(r"(spec|metadata)[.\[:]", message) else f"spec.template: {message}"


def _paths(value: object, path: Sequence[str], kind: str, at: str = "") -> Iterator[str]:
    """Yield where the path leads to a value of that type, with the list indices that the decoder leaves out."""
    if not path:
        if type(value) in _JSON_TYPES.get(kind, ()):
            yield at
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths(item, path, kind, f"{at}[{index}]")
    elif isinstance(value, dict) and path[0] in value:
        yield from _paths(value[path[0]], path[1:], kind, f"{at}.{path[0]}".lstrip("."))
