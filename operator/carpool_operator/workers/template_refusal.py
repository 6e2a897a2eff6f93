"""What the API server found wrong with the pod that a template makes, said of the template."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from carpool_core.kube.errors import Invalid

_UNREADABLE = re.compile(r'^Pod in version "[^"]*" cannot be handled as a Pod: ')
_INVALID = re.compile(r'^Pod "[^"]*" is invalid: ')
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_WRONG_TYPE = re.compile(r"cannot unmarshal (\w+)(?: \S+)? into Go struct field [^.]+\.(\S+) of type (.+)$")

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "bool": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip
"""Types by the names that the API server's decoder gives them."""

_MOST_PLACES = 3


def is_about_the_pod(error: Invalid) -> bool:
    """Whether the pod itself is wrong; an admission webhook that knows no dry run answers 400, too."""
    return bool(_UNREADABLE.match(error.said) or _INVALID.match(error.said) or error.status == 422)


def sentence(error: Invalid, body: Mapping[str, Any]) -> str:
    """Say which field of the template is wrong, and how.

    Args:
        error: What the API server said.
        body: The pod that it said this of.
    """
    unknown = _UNKNOWN_FIELD.findall(error.said)
    if unknown:
        fields = ", ".join(f"spec.template.{field}" for field in unknown)
        return f"{fields}: a pod has no such field; correct its spelling or remove it"
    if found := _WRONG_TYPE.search(error.said):
        kind, field, wanted = found.groups()
        places = list(_places(body, field.split("."), kind)) or [field]
        fields = ", ".join(f"spec.template.{place}" for place in places[:_MOST_PLACES])
        return f"{fields}: expected {wanted}, found a value of type {kind}"
    said = _INVALID.sub("", _UNREADABLE.sub("", error.said))
    return f"spec.template.{said}" if re.match(r"(spec|metadata)[.\[:]", said) else f"spec.template: {said}"


def _places(value: object, path: Sequence[str], kind: str, at: str = "") -> Iterator[str]:
    """Where below a value the path leads to one of the type, with the indices that the decoder leaves out."""
    if not path:
        if type(value) in _JSON_TYPES.get(kind, ()):
            yield at
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, path, kind, f"{at}[{index}]")
    elif isinstance(value, dict) and path[0] in value:
        yield from _places(value[path[0]], path[1:], kind, f"{at}.{path[0]}".lstrip("."))
