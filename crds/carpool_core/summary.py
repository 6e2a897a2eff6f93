"""What `kubectl get` shows of a job and of a node: single values computed from lists, because JSONPath cannot."""

from collections import Counter

from carpool_core.products import hardware_name
from carpool_core.resources.job import JobStatus, JobSummary
from carpool_core.resources.node import GpuNodeStatus, NodeSummary
from carpool_core.resources.prediction import ProductPrediction
from carpool_core.values import DeviceHealth, PartitionState

_ABSTAINED = "unknown"
_SHOWN_NODES = 3


def job_summary(status: JobStatus) -> JobSummary:
    """Summarise a job's status; what is not known yet stays empty."""
    placement, observed = status.placement, status.observed
    predicted = _prediction_shown(status)
    has_abstained = status.prediction is not None and status.prediction.outcome == "Abstained"
    unknown = _ABSTAINED if has_abstained else ""
    nodes = list(dict.fromkeys(place.node for place in placement))
    products: Counter[str] = Counter()
    for place in placement:
        products[place.product] += len(place.gpu_uuids)
    return JobSummary(
        node=", ".join(nodes[:_SHOWN_NODES])
        + (f" and {len(nodes) - _SHOWN_NODES} more" if nodes[_SHOWN_NODES:] else ""),
        gpu=_counted(products)[:256],
        mode=", ".join(dict.fromkeys(place.mode.value for place in placement)),
        predicted_memory=unknown if predicted is None else f"{predicted.memory.upper_mib}Mi",
        predicted_utilization=unknown if predicted is None else f"{predicted.activity.gpu_util_percent.median:.0f}%",
        observed_memory=f"{observed.peak_memory_mib}Mi" if observed is not None and observed.peak_memory_mib else "",
        observed_utilization=""
        if observed is None or observed.gpu_util_percent is None
        else f"{observed.gpu_util_percent:.0f}%",
        slowdown=_slowdown(status),
    )


def _prediction_shown(status: JobStatus) -> ProductPrediction | None:
    """The prediction for the GPU that the job is on; before that, the first."""
    if status.prediction is None or not status.prediction.products:
        return None
    products = status.prediction.products
    if not status.placement:
        return products[0]
    placed_on = hardware_name(status.placement[0].product)
    return next((p for p in products if p.product == placed_on), None)


def _slowdown(status: JobStatus) -> str:
    if status.observed is not None and status.observed.slowdown is not None:
        return f"{status.observed.slowdown:.2f}"
    if status.placement:
        return f"expected {max(place.expected_slowdown for place in status.placement):.2f}"
    return ""


def node_summary(status: GpuNodeStatus) -> NodeSummary:
    """Summarise a node's status."""
    sizes = sorted({device.memory_mib for device in status.devices})
    return NodeSummary(
        gpus=_counted(Counter(device.product for device in status.devices), always=True)[:512],
        healthy=sum(device.health is DeviceHealth.HEALTHY for device in status.devices),
        tenants=sum(partition.state is PartitionState.READY for partition in status.partitions),
        memory=" to ".join(f"{size}Mi" for size in dict.fromkeys([*sizes[:1], *sizes[-1:]])),
    )


def _counted(products: Counter[str], *, always: bool = False) -> str:
    """Write `2 × NVIDIA L4, Tesla T4`; a single one has no number unless `always`."""
    return ", ".join(f"{count} × {product}" if always or count > 1 else product for product, count in products.items())
