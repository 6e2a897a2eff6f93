import pytest
from carpool_core.resources.job import JobStatus, JobSummary, Observed, WorkerPlacement
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, NodeName, PodUid, SharingMode
from carpool_operator.status import summarize


def predicted(product: str, upper_mib: int, util: float, unenforced_mib: int = 0) -> ProductPrediction:
    interval = Interval(median=util, lower=0, upper=100)
    return ProductPrediction(
        product=product,
        memory=MemoryPrediction(
            median_mib=upper_mib // 2, upper_mib=upper_mib, upper_unenforced_mib=unenforced_mib, coverage=0.95
        ),
        activity=ActivityPrediction(gpu_util_percent=interval, sm_active_ratio=interval, dram_active_ratio=interval),
        step_time_seconds=interval,
    )


PREDICTION = Prediction(
    outcome="Predicted", reason="Calibrated", products=[predicted("A100", 4096, 40), predicted("H100", 5120, 25)]
)


def place(
    worker: int, node: str, *, limit: int | None = None, mode: SharingMode = SharingMode.MPS, gpus: int = 1
) -> WorkerPlacement:
    return WorkerPlacement(
        worker=worker,
        pod=f"p{worker}",
        pod_uid=PodUid(str(worker)),
        node=NodeName(node),
        gpu_uuids=[GpuUuid(f"GPU-{worker}-{gpu}") for gpu in range(gpus)],
        product="Simulated A100",
        mode=mode,
        memory_limit_mib=limit,
        expected_slowdown=1.2,
    )


CASES = [
    pytest.param(JobStatus(), None, id="nothing is known yet"),
    pytest.param(
        JobStatus(prediction=PREDICTION),
        JobSummary(predicted_memory="2.0-2.5 GiB", memory_bound="4.0-5.0 GiB", predicted_utilization="25-40%"),
        id="before it is placed, the range over all products",
    ),
    pytest.param(
        JobStatus(prediction=PREDICTION, placement=[place(0, "n1")]),
        JobSummary(
            node="n1", gpu="Simulated A100", mode="MPS", predicted_memory="2.0 GiB", memory_bound="4.0 GiB",
            predicted_utilization="40%", slowdown="1.20",
        ),
        id="placed: its product's prediction, median beside median, and the expected slowdown",
    ),
    pytest.param(
        JobStatus(
            placement=[place(0, "n2", limit=2048), place(1, "n1", limit=2048)],
            observed=Observed(
                peak_memory_mib=1536, gpu_util_percent=33.4, step_time_seconds=0.0526, step_time_ratio=1.27
            ),
        ),
        JobSummary(
            node="n1,n2", gpu="2x Simulated A100", mode="MPS", memory_bound="2.0 GiB", observed_memory="1.5 GiB",
            observed_utilization="33%", slowdown="1.20", step_time="53 ms (1.27x)",
        ),
        id="the user's own limit, several workers, and what was seen",
    ),
    pytest.param(
        JobStatus(observed=Observed(step_time_seconds=1.5)),
        JobSummary(observed_memory="0.0 GiB", step_time="1,500 ms"),
        id="a step time beside which nothing was predicted",
    ),
    pytest.param(
        JobStatus(placement=[place(0, "n1", limit=3 * 1024**2 // 2)]),
        JobSummary(node="n1", gpu="Simulated A100", mode="MPS", memory_bound="1.5 TiB", slowdown="1.20"),
        id="so much that GiB would be hard to read",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("placed", "bound"),
    [
        pytest.param(place(0, "n1"), "4.0 GiB", id="behind MPS a limit enforces the bound"),
        pytest.param(place(0, "n1", mode=SharingMode.TIME_SLICING), "5.2 GiB", id="by turns nothing does"),
        pytest.param(
            place(0, "n1", mode=SharingMode.TIME_SLICING, gpus=2), "4.0 GiB", id="of several GPUs nothing is learned"
        ),
    ],
)
def test_the_bound_of_a_first_run_is_what_its_place_counts_with(placed: WorkerPlacement, bound: str) -> None:
    first = Prediction(outcome="Predicted", reason="Calibrated", products=[predicted("A100", 4096, 40, 5325)])
    found = summarize(JobStatus(prediction=first, placement=[placed]))
    assert found is not None
    assert found.memory_bound == bound


@pytest.mark.parametrize(("status", "expected"), CASES)
def test_columns(status: JobStatus, expected: JobSummary | None) -> None:
    assert summarize(status) == expected
