"""Jobs, pods, nodes and predictions, as the API server would show them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from carpool_core import keys
from carpool_core.kube.pods import Pod
from carpool_core.resources.job import GpuTrainingJob, JobStatus
from carpool_core.resources.meta import Condition
from carpool_core.resources.node import Device, GpuNode
from carpool_core.resources.prediction import Prediction
from carpool_operator.actions import CreatePod, Decision, DeletePod, RecordEvent, WriteStatus
from carpool_operator.conditions import find
from carpool_operator.inventory import node_kind
from carpool_operator.pods import pod_name
from carpool_operator.reconcile import reconcile
from carpool_operator.snapshot import Snapshot

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
A100 = "NVIDIA A100-SXM4-40GB"
UID = "job-uid"
DIGEST = "digest-1"

FEATURES: dict[str, Any] = {
    "name": "tiny",
    "parameters": 1_000_000,
    "trainableParameters": 1_000_000,
    "parameterBytes": 4_000_000,
    "steps": [
        {
            "batchSize": 32,
            "peakBytes": 500_000_000,
            "activationBytes": 400_000_000,
            "flops": 1e12,
            "bytesMoved": 1e10,
            "kernels": 300,
        }
    ],
}


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "train", "image": "train:1"}], **spec}}


def job_body(name: str = "x", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": keys.GROUP_VERSION,
        "kind": "GpuTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": template(), "model": {"features": FEATURES}, **spec},
    }


def job(status: dict[str, Any] | None = None, **spec: Any) -> GpuTrainingJob:
    body = job_body(**spec)
    body["metadata"] |= {"uid": UID, "generation": 2, "resourceVersion": "7"}
    return msgspec.convert(body | {"status": status or {}}, GpuTrainingJob)


def interval(median: float) -> dict[str, float]:
    return {"median": median, "lower": median, "upper": median}


def prediction(*products: str, digest: str = DIGEST) -> Prediction:
    return msgspec.convert(
        {
            "outcome": "Predicted",
            "reason": "Estimated",
            "message": "estimated",
            "inputDigest": digest,
            "products": [
                {
                    "product": product,
                    "memory": {"medianMib": 2000, "upperMib": 3000, "coverage": 0.95},
                    "activity": {
                        "gpuUtilPercent": interval(50),
                        "smActiveRatio": interval(0.4),
                        "dramActiveRatio": interval(0.2),
                    },
                    "stepTimeSeconds": interval(0.1),
                }
                for product in products or (A100,)
            ],
        },
        Prediction,
    )


def abstention(digest: str = DIGEST) -> Prediction:
    message = "spec.model is left out, so nothing is known of its memory"
    return Prediction(outcome="Abstained", reason="UnknownModel", message=message, input_digest=digest)


def device(uuid: str = "GPU-0", product: str = A100, memory_mib: int = 40960) -> Device:
    return msgspec.convert(
        {
            "uuid": uuid,
            "index": 0,
            "product": f"Simulated {product}",
            "memoryMib": memory_mib,
            "computeCapability": "8.0",
            "modes": ["Exclusive", "TimeSlicing", "MPS"],
        },
        Device,
    )


def reservation(pod_uid: str, job_uid: str = UID, name: str = "x", **changes: Any) -> dict[str, Any]:
    return {
        "podUid": pod_uid,
        "podNamespace": "default",
        "podName": f"{name}-worker-0-1",
        "jobUid": job_uid,
        "jobName": name,
        "gpuUuids": ["GPU-0"],
        "mode": "MPS",
        "memoryLimitMib": 3000,
        "expectedSlowdown": 1.12,
        "reason": "least slowdown of 4 GPUs",
        **changes,
    }


def node(
    *reservations: dict[str, Any], name: str = "n1", tenants: list[dict[str, Any]] | None = None, gpus: int = 1
) -> GpuNode:
    return msgspec.convert(
        {
            "metadata": {"name": name},
            "spec": {"reservations": list(reservations)},
            "status": {
                "devices": [msgspec.to_builtins(device(f"GPU-{i}")) | {"index": i} for i in range(gpus)],
                "tenants": tenants or [],
            },
        },
        GpuNode,
    )


def pod(worker: int = 0, attempt: int = 1, phase: str = "Pending", owner: str = UID, **changes: Any) -> Pod:
    status: dict[str, Any] = {"phase": phase, **changes.pop("status", {})}
    if phase == "Running":
        running = {"running": {"startedAt": "2026-01-31T11:59:00Z"}}
        status.setdefault("containerStatuses", [{"name": "train", "state": running}])
    if changes.get("nodeName"):
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-31T11:59:00Z"}
        status["conditions"] = [*status.get("conditions", [bound])]
    metadata: dict[str, Any] = {
        "name": pod_name("x", worker, attempt),
        "namespace": "default",
        "uid": f"pod-{worker}-{attempt}",
        "creationTimestamp": "2026-01-31T11:58:00Z",
        "labels": {keys.LABEL_JOB: "x", keys.LABEL_WORKER: str(worker), keys.LABEL_ATTEMPT: str(attempt)},
        "ownerReferences": [
            {"apiVersion": keys.GROUP_VERSION, "kind": "GpuTrainingJob", "name": "x", "uid": owner, "controller": True}
        ],
        **changes.pop("metadata", {}),
    }
    return msgspec.convert({"metadata": metadata, "status": status, "spec": {"nodeName": "", **changes}}, Pod)


def terminated(exit_code: int, *, reason: str = "Error", message: str = "", at: str = "") -> dict[str, Any]:
    """Status of a pod whose one container ended."""
    ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": at}
    return {"containerStatuses": [{"name": "train", "state": {"terminated": ended}}]}


def made(pods: Iterable[Pod]) -> dict[str, str]:
    """UIDs of the pods that the operator created, by name; forged ones are left out."""
    return {p.metadata.name: p.metadata.uid for p in pods if p.metadata.uid != "forged"}


def snapshot(of: GpuTrainingJob, *, after_s: float = 0.0, **changes: Any) -> Snapshot:
    nodes = changes.setdefault("nodes", (node(),))
    defaults: dict[str, Any] = {
        "now": NOW + timedelta(seconds=after_s),
        "digest": DIGEST,
        "products": (A100,),
        "is_template_checked": True,
        "created": made(changes.get("pods", ())),
        "inventory": Counter(node_kind(n.status.devices) for n in nodes),
    }
    return Snapshot(job=of, **(defaults | changes))


# Questions about a decision


def status_of(decision: Decision, of: GpuTrainingJob) -> JobStatus:
    """The status after a decision."""
    return next((a.status for a in decision.actions if isinstance(a, WriteStatus)), of.status)


def condition(decision: Decision, of: GpuTrainingJob, type_: str) -> Condition:
    found = find(status_of(decision, of), type_)
    assert found is not None, f"no condition {type_}"
    return found


def created(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, CreatePod)]


def deleted(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, DeletePod)]


def events(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, RecordEvent)]


def predicted_job(attempts: list[dict[str, Any]] | None = None, status: dict[str, Any] | None = None, **spec: Any):
    """A job with a prediction and, by default, its first attempt under way."""
    if attempts is None:
        attempts = [{"number": 1, "startedAt": "2026-01-31T11:58:00Z", "outcome": "Running"}]
    of = job({"attempts": attempts, "prediction": msgspec.to_builtins(prediction()), **(status or {})}, **spec)
    return settled(of)


def settled(of: GpuTrainingJob) -> GpuTrainingJob:
    return msgspec.structs.replace(of, status=msgspec.structs.replace(of.status, observed_generation=2))


def again(before: Snapshot, decision: Decision, **changes: Any) -> Decision:
    """Reconcile once more with the written status."""
    of = msgspec.structs.replace(before.job, status=status_of(decision, before.job))
    return reconcile(replace(before, **{"created": made(changes.get("pods", before.pods)), **changes, "job": of}))
