"""GPUs of the cluster, and whether a job could ever run on them.

Clusters have few kinds of nodes, so nodes are counted by kind, and each kind is checked once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from carpool_core import keys
from carpool_core.demand import Demand, unsuitable_reason
from carpool_core.products import DeviceClass, device_class, product_matches
from carpool_core.resources.node import Device
from carpool_core.values import pluralize

NodeKind = tuple[tuple[DeviceClass, int], ...]
"""Number of GPUs of each class on a node, sorted."""

Inventory = Mapping[NodeKind, int]
"""Number of nodes of each kind."""


def node_kind(devices: Iterable[Device]) -> NodeKind:
    """Return the kind of a node with these GPUs."""
    return tuple(sorted(Counter(map(device_class, devices)).items()))


def infeasible_reason(demand: Demand, inventory: Inventory) -> str:
    """Return the reason, in one CamelCase word, for a demand that `infeasible_when_empty` rejects."""
    products = {kind.product for node in inventory for kind, _ in node}
    if not products:
        return "NoGpuNodes"
    if demand.product is None or any(product_matches(product, demand.product) for product in products):
        return keys.REASON_EXCEEDS_EVERY_GPU
    return keys.REASON_NO_SUCH_GPU


def unsuitable_products(demand: Demand, inventory: Inventory) -> list[str]:
    """Return the present GPU products that could not hold a worker, sorted."""
    kinds = {kind for node in inventory for kind, _ in node}
    suitable = {kind.product for kind in kinds if unsuitable_reason(demand, kind) is None}
    return sorted({kind.product for kind in kinds} - suitable)


def infeasible_when_empty(demand: Demand, inventory: Inventory) -> str | None:
    """Return why no node could run a worker even if all its GPUs were empty; None if one could.

    Health is ignored, because an unhealthy GPU may recover.
    """
    kinds = {kind for node in inventory for kind, _ in node}
    if not kinds:
        return "no node of this cluster reports GPUs; is the node agent installed?"
    verdicts = {kind: unsuitable_reason(demand, kind) for kind in kinds}
    most = max(sum(count for kind, count in node if verdicts[kind] is None) for node in inventory)
    if most >= demand.gpus:
        return None
    if most:
        return f"needs {demand.gpus} suitable GPUs on one node, the best node has {most}"
    reasons: Counter[str] = Counter()
    for node, nodes in sorted(inventory.items()):
        for kind, count in node:
            reasons[verdicts[kind] or ""] += nodes * count
    counts = "; ".join(f"{pluralize(count, 'GPU')}: {reason}" for reason, count in reasons.most_common())
    return f"no GPU of this cluster can hold it: {counts}"


def exceeds_by_bound(demand: Demand, inventory: Inventory) -> bool:
    """Return whether the predicted bound is all that keeps a demand from each GPU product; a limit overrides it."""
    if demand.memory_limit_mib is not None:
        return False
    unbound = replace(demand, prediction=None)
    return infeasible_when_empty(unbound, inventory) is None and not unsuitable_products(unbound, inventory)
