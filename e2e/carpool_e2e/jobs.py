"""Jobs of tests and benchmarks: busybox in the place of a training script."""

from typing import Any

from carpool_e2e.demo.manifests import A100, SMALL_FEATURES
from carpool_e2e.images import BUSYBOX_IMAGE


def sleeper(name: str, command: str = "sleep 600", **spec: Any) -> dict[str, Any]:
    """Return the manifest of a small job of known features that runs a shell command beside an A100.

    Args:
        name: Of the job.
        command: What its container's shell runs.
        spec: Fields of the job's spec, added or replaced.
    """
    container = {
        "name": "train",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", f"trap 'exit 143' TERM; {command} & wait $!"],
    }
    return {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "GpuTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"features": SMALL_FEATURES},
            "training": {"batchSize": 128, "optimizer": "sgd-momentum", "precision": "fp32"},
            "gpu": {"product": A100},
            "template": {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}},
            **spec,
        },
    }
