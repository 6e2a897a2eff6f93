"""What the API server found wrong with the pod that a template makes, said of the template."""

import re

from carpool_core.kube.errors import Invalid

_UNREADABLE = re.compile(r'^Pod in version "[^"]*" cannot be handled as a Pod: ')
_INVALID = re.compile(r'^Pod "[^"]*" is invalid: ')
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_WRONG_TYPE = re.compile(r"cannot unmarshal (\S+) into Go struct field [^.]+\.(\S+) of type (.+)$")


def is_about_the_pod(error: Invalid) -> bool:
    """Whether the pod itself is wrong; an admission webhook that knows no dry run answers 400, too."""
    return bool(_UNREADABLE.match(error.said) or _INVALID.match(error.said) or error.status == 422)


def sentence(error: Invalid) -> str:
    """Say which field of the template is wrong, and how."""
    unknown = _UNKNOWN_FIELD.findall(error.said)
    if unknown:
        fields = ", ".join(f"spec.template.{field}" for field in unknown)
        return f"{fields}: a pod has no such field; correct its spelling or remove it"
    if found := _WRONG_TYPE.search(error.said):
        kind, field, wanted = found.groups()
        return f"spec.template.{field}: expected {wanted}, found a value of type {kind}"
    said = _INVALID.sub("", _UNREADABLE.sub("", error.said))
    return f"spec.template.{said}" if re.match(r"(spec|metadata)[.\[:]", said) else f"spec.template: {said}"
