from typing import Any

from carpool_core.resources.job import JobStatus, Observed, WorkerPlacement
from carpool_core.resources.node import Device, GpuNodeStatus, Partition
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.summary import job_summary, node_summary
from carpool_core.values import DeviceHealth, GpuUuid, NodeName, PartitionState, PodUid, SharingMode


def _interval(median: float) -> Interval:
    return Interval(median=median, lower=median, upper=median)


def _prediction(product: str, memory_mib: int, util: float) -> ProductPrediction:
    return ProductPrediction(
        product=product,
        memory=MemoryPrediction(median_mib=memory_mib - 1, upper_mib=memory_mib, coverage=0.9),
        activity=ActivityPrediction(
            gpu_util_percent=_interval(util), sm_active_ratio=_interval(0.3), dram_active_ratio=_interval(0.2)
        ),
        step_time_seconds=_interval(0.1),
    )


def _placed(worker: int, node: str, product: str, gpus: int = 1, slowdown: float = 1.0) -> WorkerPlacement:
    return WorkerPlacement(
        worker=worker, pod=f"p{worker}", pod_uid=PodUid(f"u{worker}"), node=NodeName(node), product=product,
        gpu_uuids=[GpuUuid(f"GPU-{worker}-{i}") for i in range(gpus)], mode=SharingMode.MPS,
        expected_slowdown=slowdown,
    )  # fmt: skip


BOTH = Prediction(
    outcome="Predicted", reason="Estimated",
    products=[_prediction("NVIDIA L4", 9000, 61.6), _prediction("Tesla T4", 9500, 88)],
)  # fmt: skip


def test_nothing_is_known_yet() -> None:
    summary = job_summary(JobStatus())
    assert not any(getattr(summary, name) for name in summary.__struct_fields__)


def test_before_placement_the_first_product_is_shown() -> None:
    summary = job_summary(JobStatus(prediction=BOTH))
    assert (summary.predicted_memory, summary.predicted_utilization, summary.node) == ("9000Mi", "62%", "")


def test_once_placed_the_prediction_is_that_of_the_gpu() -> None:
    status = JobStatus(prediction=BOTH, placement=[_placed(0, "n1", "Simulated Tesla T4", slowdown=1.23)])
    summary = job_summary(status)
    assert (summary.predicted_memory, summary.predicted_utilization) == ("9500Mi", "88%")
    assert (summary.node, summary.gpu, summary.mode) == ("n1", "Simulated Tesla T4", "MPS")
    assert (summary.slowdown, summary.observed_memory) == ("expected 1.23", "")


def test_an_abstention_is_no_empty_column() -> None:
    summary = job_summary(JobStatus(prediction=Prediction(outcome="Abstained", reason="UnknownModel")))
    assert (summary.predicted_memory, summary.predicted_utilization) == ("unknown", "unknown")


def test_many_workers() -> None:
    placement = [_placed(i, f"n{i}", "NVIDIA L4", gpus=2) for i in range(5)] + [_placed(5, "n0", "Tesla T4")]
    summary = job_summary(JobStatus(placement=placement))
    assert summary.node == "n0, n1, n2 and 2 more"
    assert summary.gpu == "10 × NVIDIA L4, Tesla T4"


def test_what_was_observed_stands_in_for_what_was_expected() -> None:
    observed = Observed(peak_memory_mib=8123, gpu_util_percent=59.5, slowdown=1.1)
    summary = job_summary(JobStatus(placement=[_placed(0, "n1", "NVIDIA L4")], observed=observed))
    assert (summary.observed_memory, summary.observed_utilization, summary.slowdown) == ("8123Mi", "60%", "1.10")


def _device(index: int, product: str = "NVIDIA L4", **other: Any) -> Device:
    return Device(uuid=GpuUuid(f"GPU-{index}"), index=index, product=product, memory_mib=23034, **other)


def test_a_node() -> None:
    partition = Partition(pod_uid=PodUid("u"), generation=1, state=PartitionState.READY)
    failed = Partition(pod_uid=PodUid("v"), generation=1, state=PartitionState.FAILED)
    status = GpuNodeStatus(
        devices=[_device(0), _device(1, health=DeviceHealth.UNHEALTHY)], partitions=[partition, failed]
    )
    summary = node_summary(status)
    assert (summary.gpus, summary.memory) == ("2 × NVIDIA L4", "23034Mi")
    assert (summary.healthy, summary.tenants) == (1, 1)


def test_a_node_of_several_products_and_one_of_none() -> None:
    mixed = GpuNodeStatus(
        devices=[_device(0), Device(uuid=GpuUuid("G"), index=1, product="Tesla T4", memory_mib=15360)]
    )
    assert node_summary(mixed).gpus == "1 × NVIDIA L4, 1 × Tesla T4"
    assert node_summary(mixed).memory == "15360Mi to 23034Mi"
    assert node_summary(GpuNodeStatus()).gpus == ""
