"""Schema of the pod template: fields that rules read are typed, all others are kept as written."""

from typing import Any

from carpool_core.keys import DOMAIN, RESOURCE_GPU
from carpool_core.resources.schema import Rule

_PRESERVE: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
_OURS = f"{DOMAIN}/"
_MOST_CONTAINERS, _MOST_KEYS, _MOST_TERMS = 16, 64, 64


def _asks(container: str) -> str:
    """Return CEL for whether a container requests GPUs."""
    parts = " || ".join(
        f"(has({container}.resources.{part}) && '{RESOURCE_GPU}' in {container}.resources.{part})"
        for part in ("limits", "requests")
    )
    return f"has({container}.resources) && ({parts})"


def _amount_is_right(part: str) -> str:
    """Return CEL for whether a container that names our resource in `part` names the job's number."""
    amounts = f"c.resources.{part}"
    return (
        f"!has({amounts}) || !('{RESOURCE_GPU}' in {amounts}) || "
        f"string({amounts}['{RESOURCE_GPU}']) == string(self.gpusPerWorker)"
    )


def _no_foreign_gpu(part: str) -> str:
    amounts = f"self.resources.{part}"
    return (
        f"(!has({amounts}) || !{amounts}.exists(k, k == 'nvidia.com/gpu' || k.startsWith('nvidia.com/gpu.') || "
        "k.startsWith('nvidia.com/mig-')))"
    )


def _no_unknown_resource(part: str) -> str:
    amounts = f"self.resources.{part}"
    return f"(!has({amounts}) || !{amounts}.exists(k, k.startsWith('{_OURS}') && k != '{RESOURCE_GPU}'))"


def _not_ours(what: str) -> Rule:
    """Return the rule that a map of labels or annotations has none of our own keys."""
    advice = f"remove what begins with {_OURS} from {what}: Carpool sets these keys itself"
    return Rule(f"!self.exists(k, k.startsWith('{_OURS}'))", advice)


def _string_map(description: str, what: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "nullable": True,
        "additionalProperties": {"type": "string"},
        "maxProperties": _MOST_KEYS,
        "x-kubernetes-validations": [_not_ours(what).as_schema()],
    }


def _amounts(description: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "maxProperties": 32,
        "additionalProperties": {"x-kubernetes-int-or-string": True, "maxLength": 64},
    }


_CONTAINER: dict[str, Any] = {
    "type": "object",
    "description": "A container, with every field that a pod's containers have.",
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string", "description": "Name of the container.", "minLength": 1, "maxLength": 63},
        "image": {"type": "string", "description": "Image of the container.", "minLength": 1},
        "resources": {
            "type": "object",
            "description": f"Requests and limits. Carpool adds {RESOURCE_GPU} where it is left out.",
            "properties": {"limits": _amounts("Limits by resource."), "requests": _amounts("Requests by resource.")},
            **_PRESERVE,
        },
    },
    "x-kubernetes-validations": [
        Rule(
            f"!has(self.resources) || ({_no_foreign_gpu('limits')} && {_no_foreign_gpu('requests')})",
            "remove NVIDIA's resources (nvidia.com/gpu, nvidia.com/mig-…) from the container: a job asks for GPUs by "
            f"spec.gpusPerWorker, and Carpool requests {RESOURCE_GPU} for it",
            "'remove nvidia.com/gpu or nvidia.com/mig-… from the resources of container ' + self.name + "
            f"': a job asks for GPUs by spec.gpusPerWorker, and Carpool requests {RESOURCE_GPU} for it'",
        ).as_schema(),
        Rule(
            f"!has(self.resources) || ({_no_unknown_resource('limits')} && {_no_unknown_resource('requests')})",
            f"the only resource under {_OURS} is {RESOURCE_GPU}: remove the others, which no node has",
            f"'the only resource under {_OURS} is {RESOURCE_GPU}: remove the others, which no node has, from the "
            "resources of container ' + self.name",
        ).as_schema(),
    ],
    **_PRESERVE,
}


def _containers(description: str, least: int) -> dict[str, Any]:
    return {
        "type": "array",
        "description": description,
        "minItems": least,
        "maxItems": _MOST_CONTAINERS,
        "items": _CONTAINER,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    }


def _text(description: str, *rules: Rule) -> dict[str, Any]:
    return {
        "type": "string",
        "description": description,
        "maxLength": 253,
        "x-kubernetes-validations": [rule.as_schema() for rule in rules],
    }


def _part(description: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "description": description, "nullable": True, "properties": properties, **_PRESERVE}


def _list_of(description: str, item: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "array",
        "description": description,
        "nullable": True,
        "maxItems": _MOST_TERMS,
        "items": item,
        "x-kubernetes-list-type": "atomic",
    }


def _term(description: str) -> dict[str, Any]:
    """Return the schema of a node selector term without our own labels."""
    key = {
        "type": "string",
        "description": "Label of the node.",
        "maxLength": 317,
        "x-kubernetes-validations": [
            Rule(
                f"!self.startsWith('{_OURS}')",
                f"remove what begins with {_OURS} from nodeAffinity: Carpool sets these labels itself",
                f"'remove ' + self + ' from nodeAffinity: Carpool sets the labels under {_OURS} itself'",
            ).as_schema()
        ],
    }
    return _part(
        description,
        matchExpressions=_list_of("Requirements on the node's labels.", _part("Requirement on one label.", key=key)),
    )


_AFFINITY = _part(
    "Node affinity of the pods, as for any pod.",
    nodeAffinity=_part(
        "Affinity by the nodes' labels.",
        requiredDuringSchedulingIgnoredDuringExecution=_part(
            "Required terms.",
            nodeSelectorTerms=_list_of("One of these terms must hold.", _term("Requirements that must all hold.")),
        ),
        preferredDuringSchedulingIgnoredDuringExecution=_list_of(
            "Preferred terms.", _part("One preference.", preference=_term("Requirements that must all hold."))
        ),
    ),
)

_SPEC_PROPERTIES: dict[str, Any] = {
    "containers": _containers(
        f"Containers of a worker. At most one may request {RESOURCE_GPU}; if none does, the first gets the GPUs.", 1
    ),
    "initContainers": _containers(
        "Containers that run before, or beside with restartPolicy Always. None of them gets a GPU.", 0
    ),
    "nodeName": _text(
        "Must be left out, because the scheduler chooses the node.",
        Rule(
            "self == ''",
            "remove nodeName: the scheduler chooses the node; spec.gpu or a nodeSelector narrow its choice",
            "'remove nodeName (' + self + '): the scheduler chooses the node; spec.gpu or a nodeSelector narrow its "
            "choice'",
        ),
    ),
    "schedulerName": _text(
        "Must be left out, because Carpool sets its own scheduler.",
        Rule(
            "self == ''",
            "remove schedulerName: Carpool sets its own scheduler",
            "'remove schedulerName (' + self + '): Carpool sets its own scheduler'",
        ),
    ),
    "restartPolicy": _text(
        "Never, or left out: Carpool restarts failed workers by spec.runPolicy.",
        Rule(
            "self == 'Never'",
            "restartPolicy must be Never or left out: failed workers are restarted by spec.runPolicy.backoffLimit",
            "'restartPolicy must be Never or left out, found ' + self + ': failed workers are restarted by "
            "spec.runPolicy.backoffLimit'",
        ),
    ),
    "nodeSelector": _string_map("Labels that the node must have.", "nodeSelector"),
    "affinity": _AFFINITY,
}

TEMPLATE: dict[str, Any] = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Metadata of the pods; labels and annotations are copied to them.",
            "properties": {
                "labels": _string_map("Labels of the pods.", "the template's labels"),
                "annotations": _string_map("Annotations of the pods.", "the template's annotations"),
            },
            **_PRESERVE,
        },
        "spec": {
            "type": "object",
            "description": "The pod's spec, with every field that a Pod has.",
            "required": ["containers"],
            "properties": _SPEC_PROPERTIES,
            "x-kubernetes-validations": [
                Rule(
                    f"self.containers.filter(c, {_asks('c')}).size() <= 1",
                    f"at most one container may ask for {RESOURCE_GPU}: leave it out of the others",
                ).as_schema(),
                Rule(
                    f"!has(self.initContainers) || !self.initContainers.exists(c, {_asks('c')})",
                    f"an init container cannot have a GPU: move {RESOURCE_GPU} to an ordinary container",
                ).as_schema(),
            ],
            **_PRESERVE,
        },
    },
    **_PRESERVE,
}
"""Schema of `spec.template`."""

GPU_AMOUNT_RULE = Rule(
    "self.template.spec.containers.all(c, !has(c.resources) || "
    f"(({_amount_is_right('limits')}) && ({_amount_is_right('requests')})))",
    f"a container asks for a number of {RESOURCE_GPU} other than spec.gpusPerWorker: leave {RESOURCE_GPU} out of the "
    "template, or let both say the same",
)
"""Rule of the job's spec that reads the template."""
