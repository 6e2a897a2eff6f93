"""Why a GPU could never hold a job, in sentences."""

from typing import Any

import msgspec
import pytest
from carpool_core.demand import demand_of, prediction_message, unsuitable_reason
from carpool_core.products import device_class
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import Device
from carpool_core.resources.prediction import Prediction
from carpool_core.values import RequestedMode

A100 = msgspec.convert(
    {
        "uuid": "GPU-0",
        "index": 0,
        "product": "Simulated NVIDIA A100-SXM4-40GB",
        "memoryMib": 40960,
        "reservedMib": 424,
        "computeCapability": "8.0",
        "modes": ["Exclusive", "TimeSlicing", "MPS"],
    },
    Device,
)

CASES = [
    pytest.param({}, None, id="nothing is asked"),
    pytest.param({"gpu": {"product": "H100"}}, "wrong product: wants H100, is Simulated NVIDIA A100", id="product"),
    pytest.param({"gpu": {"minMemory": "80Gi"}}, "wants a GPU of 81,920 MiB, has 40,960 MiB", id="least memory"),
    pytest.param({"gpu": {"minComputeCapability": "9.0"}}, "compute capability 8.0, wants 9.0", id="capability"),
    pytest.param({"memory": {"limit": "40Gi"}}, "needs 40,960 MiB, has 40,536 MiB", id="what the driver keeps"),
    pytest.param(
        {"sharing": {"mode": "MIG"}},
        "offers no MIG instances; ask for sharing.mode Auto, or for what is offered (Exclusive, TimeSlicing, MPS)",
        id="MIG where there is none",
    ),
]


@pytest.mark.parametrize("found", ["n/a", "", "8.", "9.0a"])
def test_a_capability_that_cannot_be_read_does_not_suffice(found: str) -> None:
    """Regression: one such GPU made every filter with minComputeCapability answer 500."""
    body = {"metadata": {"name": "x"}, "spec": {"template": {}, "gpu": {"minComputeCapability": "7.0"}}}
    odd = msgspec.structs.replace(A100, compute_capability=found)
    why = unsuitable_reason(demand_of(msgspec.convert(body, GpuTrainingJob)), device_class(odd))
    assert why == f"compute capability {found or 'unknown'}, wants 7.0"


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"index": 256}, id="index"),
        pytest.param({"computeCapability": "n/a"}, id="capability"),
        pytest.param({"memoryMib": 2**31}, id="memory"),
        pytest.param({"reservedMib": 2**31}, id="reserve"),
        pytest.param({"product": "x" * 257}, id="product"),
    ],
)
def test_a_device_with_odd_values_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(A100) | odd, Device)


@pytest.mark.parametrize(("spec", "told"), CASES)
def test_sentence_names_the_check_and_the_margin(spec: dict[str, Any], told: str | None) -> None:
    body = {"metadata": {"name": "x"}, "spec": {"template": {}, **spec}}
    found = unsuitable_reason(demand_of(msgspec.convert(body, GpuTrainingJob)), device_class(A100))
    assert found is None if told is None else found is not None and told in found


@pytest.mark.parametrize(
    ("limit", "mode", "warning"),
    [
        pytest.param(None, "Auto", "", id="none"),
        pytest.param("4000Mi", "Auto", "", id="as predicted"),
        pytest.param(
            "3999Mi", "Auto", "; more than its spec.memory.limit (3999Mi): it may run out of GPU memory", id="less"
        ),
        pytest.param("3999Mi", "Exclusive", "", id="a GPU of its own has no limit"),
        pytest.param("much", "Auto", "", id="no quantity"),
    ],
)
def test_a_limit_below_what_is_predicted_is_named(limit: str | None, mode: str, warning: str) -> None:
    """Regression: a job was led to a limit that it could only die of."""
    spread = {"median": 0.1, "lower": 0.1, "upper": 0.1}
    product = {
        "product": "A100",
        "memory": {"medianMib": 4000, "upperMib": 5000, "coverage": 0.95},
        "activity": {"gpuUtilPercent": spread, "smActiveRatio": spread, "dramActiveRatio": spread},
        "stepTimeSeconds": spread,
    }
    found = {"outcome": "Predicted", "reason": "Estimated", "message": "needs 4,000 MiB", "products": [product]}
    prediction = msgspec.convert(found, Prediction)
    assert prediction_message(prediction, RequestedMode(mode), limit) == f"needs 4,000 MiB{warning}"
