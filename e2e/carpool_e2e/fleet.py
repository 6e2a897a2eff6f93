"""Nodes without a kubelet: the objects that a kubelet would write, and the process that plays all of them."""

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from carpool_e2e.chart import NAMESPACE
from carpool_e2e.controlplane import ControlPlane
from carpool_e2e.nodes import MANAGED_LABELS
from carpool_e2e.processes import ProcessTable

HEARTBEAT_S = 10.0
"""The node controller gives a node up after forty seconds."""

NO_KUBELET = {"key": "carpool.dev/kubelet", "value": "none"}

LABELS = {**MANAGED_LABELS, "kubernetes.io/os": "linux", NO_KUBELET["key"]: NO_KUBELET["value"]}

TAINT = {**NO_KUBELET, "effect": "NoSchedule"}
"""Keeps pods away from nodes on which no container would ever start."""

TOLERATION = {**NO_KUBELET, "operator": "Equal", "effect": "NoSchedule"}
"""With it the scheduler considers such nodes too, and reports about their GPUs."""


class FleetNode(msgspec.Struct, frozen=True):
    """A node without a kubelet."""

    name: str
    slots: int
    """How many `carpool.dev/gpu` it offers."""


class FleetPlan(msgspec.Struct, frozen=True):
    """Input of that process."""

    nodes: list[FleetNode]
    agents: dict[str, dict[str, str]]
    """Environment of each node's agent; empty to run none."""


def node_object(node: FleetNode) -> dict[str, Any]:
    """Return the Node as a kubelet would register it."""
    labels = {"kubernetes.io/hostname": node.name, **LABELS}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels},
        "spec": {"taints": [TAINT]},
    }


def node_status(node: FleetNode, now: datetime) -> dict[str, Any]:
    """Return the status that a healthy kubelet would report."""
    at = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    capacity = {"cpu": "32", "memory": "128Gi", "pods": "110", "carpool.dev/gpu": str(node.slots)}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Played",
        "message": "a node of the end-to-end harness without a kubelet; containers do not start here",
        "lastHeartbeatTime": at,
        "lastTransitionTime": at,
    }
    return {"status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}}


def lease_patch(node: FleetNode, now: datetime) -> dict[str, Any]:
    """Return the Lease that a kubelet renews."""
    at = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": node.name, "leaseDurationSeconds": 40, "renewTime": at}
    return {"metadata": {"name": node.name}, "spec": spec}


def start(plane: ControlPlane, table: ProcessTable, gpus: Mapping[str, str], common: Mapping[str, str] | None) -> None:
    """Register the nodes, and start the process that plays them.

    Args:
        plane: The control plane.
        table: Where the process is recorded.
        gpus: Name → simulated GPUs, such as `Tesla T4:4,NVIDIA L4:2`.
        common: What the chart sets for every agent; None to run no agents.
    """
    per_gpu = int((common or {}).get("CARPOOL_SLOTS_PER_GPU", "8"))
    fleet, agents = list[FleetNode](), dict[str, dict[str, str]]()
    for name, inventory in gpus.items():
        node = FleetNode(name, per_gpu * sum(int(part.rsplit(":", 1)[1]) for part in inventory.split(",")))
        plane.api.call("POST", "/api/v1/nodes", node_object(node))
        fleet.append(node)
        if common is not None:
            token = plane.api.token_of(NAMESPACE, "carpool-node-agent", name)
            agents[name] = {
                **common,
                "KUBECONFIG": str(plane.write_kubeconfig(f"agent-{name}", token)),
                "CARPOOL_NODE_NAME": name,
                "CARPOOL_SIMULATED_GPUS": inventory,
                "CARPOOL_KUBELET": "false",
                "CARPOOL_STATE_DIR": str(plane.state / "fleet" / name),
            }
    plan, ready = plane.state / "fleet.json", plane.state / "fleet.ready"
    plan.write_bytes(msgspec.json.encode(FleetPlan(fleet, agents)))
    process = table.start(
        "fleet",
        [sys.executable, "-m", "carpool_e2e.fleetprocess", str(plan), str(ready)],
        {"KUBECONFIG": str(plane.state / "fleet.kubeconfig"), "PYTHONUNBUFFERED": "1"},
    )
    process.wait_until(ready.exists)
