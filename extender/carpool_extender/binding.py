"""The Binding that puts a pod on its node, with annotations for people and for runtimes without CDI."""

from typing import Any

from carpool_core.keys import ANNOTATION_GPUS, ANNOTATION_MEMORY, ANNOTATION_MODE, ANNOTATION_REASON
from carpool_core.resources.node import Reservation


def binding_of(reserved: Reservation, node: str) -> dict[str, Any]:
    """Build the Binding of a reservation's pod; its UID is a precondition.

    The API server merges the annotations into the pod in the same write as `nodeName`. Nothing of ours trusts them.
    """
    annotations = {
        ANNOTATION_GPUS: ",".join(reserved.gpu_uuids),
        ANNOTATION_MODE: reserved.mode.value,
        ANNOTATION_REASON: reserved.reason,
    }
    if reserved.memory_limit_mib is not None:
        annotations[ANNOTATION_MEMORY] = str(reserved.memory_limit_mib)
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": reserved.pod_name,
            "namespace": reserved.pod_namespace,
            "uid": reserved.pod_uid,
            "annotations": annotations,
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
