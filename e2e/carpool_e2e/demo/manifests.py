"""The jobs of the demo."""

from typing import Any

from carpool_e2e.fleet import TOLERATION
from carpool_e2e.nodes import BUSYBOX_IMAGE
from carpool_e2e.workloads import training_template

A100 = "A100-SXM4-40GB"
H100 = "H100 80GB HBM3"

SMALL_FEATURES: dict[str, Any] = {
    "name": "a small mobile network on CIFAR-10",
    "parameters": 2_236_682,
    "trainableParameters": 2_236_682,
    "parameterBytes": 9_083_176,
    "layers": {"convolution": 52, "linear": 1, "activation": 35, "normalization": 52, "other": 2},
    "optimizer": "sgd-momentum",
    "precision": "fp32",
    "steps": [
        {"batchSize": 64, "peakBytes": 620_000_000, "activationBytes": 590_000_000, "flops": 3.6e10,
         "bytesMoved": 3.4e9, "kernels": 2300},
        {"batchSize": 128, "peakBytes": 1_210_000_000, "activationBytes": 1_180_000_000, "flops": 7.2e10,
         "bytesMoved": 6.8e9, "kernels": 2300},
    ],
}  # fmt: skip
"""Features of a model whose kernels are too short to fill a GPU, as `carpool graph` prints them."""


def job(name: str, *use: str, gpu: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return the manifest of a job whose container uses its GPU as the arguments `use` describe, by default an A100."""
    product = {"product": A100} if gpu is None else gpu
    return _manifest(name, {"gpu": product, "template": training_template(use), **spec})


def _manifest(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "GpuTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def small(name: str) -> dict[str, Any]:
    """A job that leaves most of its GPU idle."""
    return job(
        name, "--memory-mib=2500", "--step-seconds=0.026", "--gpu-util=0.55", "--sm-active=0.24", "--dram-active=0.2",
        model={"features": SMALL_FEATURES},
        training={"batchSize": 128, "optimizer": "sgd-momentum", "precision": "fp32"},
    )  # fmt: skip


def busy(name: str, *, max_slowdown: float) -> dict[str, Any]:
    """A job that fills its GPU's SMs but less than half of its memory."""
    return job(
        name, "--no-loop", "--memory-mib=5100", "--step-seconds=0.04", "--gpu-util=0.96", "--sm-active=0.85",
        "--dram-active=0.5",
        model={"catalog": {"name": "timm/resnet50", "input": [3, 224, 224], "numClasses": 100}},
        training={"batchSize": 32, "optimizer": "adamw", "precision": "fp32"},
        sharing={"maxSlowdown": max_slowdown},
    )  # fmt: skip


def mystery(name: str) -> dict[str, Any]:
    """A job whose model is not given."""
    return job(name, "--no-loop", "--memory-mib=9000", "--gpu-util=0.6", "--sm-active=0.4")


def wide(name: str, gpus: int) -> dict[str, Any]:
    """A job whose one worker takes a good part of several H100s; its memory limit is given."""
    return job(
        name, "--no-loop", "--memory-mib=30000", "--gpu-util=0.9", "--sm-active=0.7",
        gpu={"product": H100}, gpusPerWorker=gpus, memory={"limit": "32Gi"}, sharing={"maxSlowdown": 1.1},
    )  # fmt: skip


def large(name: str) -> dict[str, Any]:
    """A job that only an H100 can hold, and only an idle one.

    It tolerates the nodes without a kubelet, so that its condition covers their GPUs, too; none is large enough.
    """
    manifest = job(
        name, "--no-loop", "--memory-mib=58000", gpu={}, memory={"limit": "60Gi"}, sharing={"maxSlowdown": 3}
    )
    manifest["spec"]["template"]["spec"]["tolerations"] = [TOLERATION]
    return manifest


def impossible(name: str) -> dict[str, Any]:
    """A job that no GPU can hold."""
    return job(name, "--memory-mib=1", gpu={}, memory={"limit": "200Gi"})


def nonsense(name: str) -> dict[str, Any]:
    """A manifest with two sources of the model, and a MIG instance spread over two GPUs."""
    return job(
        name, "--memory-mib=1",
        model={"features": SMALL_FEATURES, "catalog": {"name": "timm/resnet50"}},
        gpusPerWorker=2, sharing={"mode": "MIG"},
    )  # fmt: skip


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
    return _manifest(
        name,
        {
            "model": {"features": SMALL_FEATURES},
            "training": {"batchSize": 128, "optimizer": "sgd-momentum", "precision": "fp32"},
            "gpu": {"product": A100},
            "template": {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}},
            **spec,
        },
    )
