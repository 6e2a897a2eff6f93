"""Quantities, products, demands, durations, times and messages about them."""

import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from carpool_core.clock import parse_rfc3339, rfc3339
from carpool_core.demand import demand_of, prediction_message, unsuitable_reason
from carpool_core.durations import (
    BUCKET_FACTOR,
    DURATION_BUCKETS,
    FIRST_BOUND_S,
    duration_bucket,
    duration_s,
    format_duration,
    measured_step_time,
    remaining_s,
)
from carpool_core.products import (
    PRODUCTS,
    DeviceClass,
    UnknownProductError,
    device_class,
    find_product,
    nvml_table,
    product_matches,
    product_of,
)
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.meta import ObjectMeta
from carpool_core.resources.node import (
    MAX_NAMED_JOBS,
    Device,
    GpuNode,
    GpuNodeSpec,
    Reservation,
    describe_later_tenants,
)
from carpool_core.resources.prediction import (
    ActivityPrediction,
    Interval,
    MemoryPrediction,
    Prediction,
    ProductPrediction,
)
from carpool_core.values import GpuUuid, JobUid, PodUid, RequestedMode, SharingMode, parse_memory_mib, parse_quantity
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("quantity", "mib"),
    [
        ("12Gi", 12288), ("500Mi", 500), ("1.5Gi", 1536), ("1Pi", 2**30), ("1024Ki", 1), (2**20, 1), ("1048576", 1),
        ("1e9", 953), ("1E9", 953), ("1P", 953674316), ("+2Mi", 2), (".5Gi", 512), ("5.Gi", 5120), ("1048576000m", 1),
        ("0", 0), ("1E", 953674316406),
    ],
)  # fmt: skip
def test_quantities_of_kubernetes_are_parsed(quantity: int | str, mib: int) -> None:
    assert parse_memory_mib(quantity) == mib


@pytest.mark.parametrize(
    "quantity", ["", "Gi", "-1Gi", "12GB", "12 Gi", "1Gi\n", "1e", "0x10", "NaN", "1.2.3", "\u0661Gi"]
)
def test_invalid_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="expected an amount of memory such as 12Gi or 500Mi, found"):
        parse_memory_mib(quantity)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        assert parse_memory_mib(text) >= 0
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017  # both outcomes are right


@given(st.decimals(0, 10**6, allow_nan=False, allow_infinity=False, places=3))
def test_fractions_are_exact(number: Decimal) -> None:
    assert parse_memory_mib(f"{number:f}Gi") == int(number * 1024)


@pytest.mark.parametrize(("quantity", "value"), [("500m", "0.5"), (4, "4"), ("2Ki", "2048"), ("0", "0")])
def test_quantity_has_its_own_unit(quantity: int | str, value: str) -> None:
    assert parse_quantity(quantity) == Decimal(value)
    with pytest.raises(ValueError, match="expected an amount such as"):
        parse_quantity("four")


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        pytest.param("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", id="as NVML has it"),
        pytest.param("Simulated NVIDIA A30", "NVIDIA A30", id="simulated"),
        pytest.param("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", id="case"),
        pytest.param("A100 80GB PCIe", "NVIDIA A100 80GB PCIe", id="words"),
        pytest.param("L4", "NVIDIA L4", id="a word that another product's begins with"),
        pytest.param("A10", "NVIDIA A10", id="a word that several begin with"),
        pytest.param("A100SXM440GB", "NVIDIA A100-SXM4-40GB", id="neither dashes nor spaces"),
        pytest.param("RTX2080", "NVIDIA GeForce RTX 2080", id="two words as one"),
        pytest.param(" L4 ", "NVIDIA L4", id="blanks around it"),
        pytest.param("3090", "NVIDIA GeForce RTX 3090", id="the last word"),
        pytest.param("GeForce_RTX_2080".replace("_", "-"), "NVIDIA GeForce RTX 2080", id="dashes for spaces"),
    ],
)
def test_product_is_found_by_an_unambiguous_part(wanted: str, name: str) -> None:
    assert find_product(wanted).name == name


def test_ambiguous_product_is_refused_with_the_matches() -> None:
    with pytest.raises(UnknownProductError) as caught:
        find_product("A100")
    assert "'A100' is ambiguous" in str(caught.value)
    assert "NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe; write more" in str(caught.value)
    assert "A10," not in str(caught.value)
    with pytest.raises(UnknownProductError, match="matches NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB;"):
        find_product("A100SXM4")


@pytest.mark.parametrize("gpu", nvml_table().gpus, ids=lambda gpu: gpu.name)
def test_every_described_product_is_known_by_its_name(gpu) -> None:
    """Regression: 40 of 56 were known on a node only, and neither predicted without one nor simulated."""
    found = find_product(f"Simulated {gpu.name}")
    assert (found.name, found.is_derived) == (gpu.name, gpu.name not in {product.name for product in PRODUCTS})
    assert {*gpu.mig} == {*found.mig_profiles} or not found.is_derived
    assert product_of(DeviceClass(f"Simulated {gpu.name}", gpu.memory_mib, 600, gpu.capability, ())) == found


@pytest.mark.parametrize("wanted", ["GB10", "NVIDIA Thor", "Simulated NVIDIA GB10"])
def test_a_product_that_shares_the_cpus_memory_is_refused(wanted: str) -> None:
    with pytest.raises(UnknownProductError, match=r"memory of its own, found .*, which shares the CPU's"):
        find_product(wanted)


@pytest.mark.parametrize("wanted", ["MI300", "A1000", "nvidia-x", "L4S", "H2", "A3", "A100SXM", "", " "])
def test_unknown_product_is_refused_with_the_list(wanted: str) -> None:
    """Regression: H20 and L40, which are products of their own, were taken for H200 and L40S."""
    assert [find_product(name).name for name in ("H20", "L40")] == ["NVIDIA H20", "NVIDIA L40"]
    with pytest.raises(UnknownProductError, match=r"is unknown; known products: .*Tesla T4"):
        find_product(wanted)


@pytest.mark.parametrize(
    ("product", "wanted", "does"),
    [
        pytest.param("NVIDIA A100-SXM4-80GB", "A100", True, id="every product of that word"),
        pytest.param("NVIDIA L40S", "L4", False, id="letters of another word"),
        pytest.param("NVIDIA A100-SXM4-40GB", "A10", False, id="letters of another word, which several begin with"),
        pytest.param("Simulated NVIDIA L4", "L4", True, id="simulated"),
        pytest.param("NVIDIA RTX 5000 Ada Generation", "RTX 5000", True, id="a product that the table lacks"),
        pytest.param("NVIDIA L40S", "L40", False, id="letters of another product that the table lacks"),
        pytest.param("NVIDIA L40", "L40", True, id="a product that the table lacks by its word"),
        pytest.param("NVIDIA A40-48Q", "A40-48", False, id="a word cut short"),
        pytest.param("NVIDIA L4", " ", False, id="no word at all"),
    ],
)
def test_product_selector_matches_whole_words(product: str, wanted: str, does: bool) -> None:
    """Regression: a job that asked for an L4 was placed on an L40S."""
    assert product_matches(product, wanted) is does


A100 = Device(
    uuid=GpuUuid("GPU-0"), index=0, product="Simulated NVIDIA A100-SXM4-40GB", memory_mib=40960, reserved_mib=424,
    compute_capability="8.0", modes=[SharingMode.EXCLUSIVE, SharingMode.TIME_SLICING, SharingMode.MPS],
)  # fmt: skip

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
def test_unreadable_capability_is_unsuitable(found: str) -> None:
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
def test_device_out_of_bounds_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(A100) | odd, Device)


@pytest.mark.parametrize(("spec", "expected"), CASES)
def test_unsuitable_gpu_names_check_and_margin(spec: dict[str, Any], expected: str | None) -> None:
    body = {"metadata": {"name": "x"}, "spec": {"template": {}, **spec}}
    found = unsuitable_reason(demand_of(msgspec.convert(body, GpuTrainingJob)), device_class(A100))
    assert found is None if expected is None else found is not None and expected in found


@pytest.mark.parametrize(
    ("limit", "mode", "warning"),
    [
        pytest.param(None, "Auto", "", id="none"),
        pytest.param("1000Mi", "Auto", "", id="as predicted"),
        pytest.param(
            "999Mi", "Auto", "; more than its spec.memory.limit (999Mi): it may run out of GPU memory", id="less"
        ),
        pytest.param("999Mi", "Exclusive", "", id="a GPU of its own has no limit"),
        pytest.param("much", "Auto", "", id="no quantity"),
    ],
)
def test_limit_below_the_prediction_is_a_warning(limit: str | None, mode: str, warning: str) -> None:
    """Regression: a job was led to a limit that it could only die of."""
    found = msgspec.structs.replace(_PREDICTED, message="needs 1,000 MiB")
    assert prediction_message(found, RequestedMode(mode), limit) == f"needs 1,000 MiB{warning}"


_LENGTHS = st.floats(min_value=0.0, max_value=1e9)


def _exactly(value: float) -> Interval:
    return Interval(median=value, lower=value, upper=value)


def _of(product: str, step_s: float) -> ProductPrediction:
    return ProductPrediction(
        product=product,
        memory=MemoryPrediction(median_mib=1000, upper_mib=1024, coverage=0.95),
        activity=ActivityPrediction(
            gpu_util_percent=_exactly(50), sm_active_ratio=_exactly(0.5), dram_active_ratio=_exactly(0.5)
        ),
        step_time_seconds=_exactly(step_s),
    )


_PREDICTED = Prediction(outcome="Predicted", reason="ByFeatures", products=[_of("A100", 0.1), _of("T4", 0.3)])


@pytest.mark.parametrize(
    ("steps", "mean_s", "deviation_s", "expected"),
    [
        pytest.param(19, 0.2, 0.01, None, id="too few steps"),
        pytest.param(None, 0.2, 0.01, None, id="none reported"),
        pytest.param(20, None, None, None, id="no time reported"),
        pytest.param(20, 0.2, 0.01, (0.1823, 0.2, 0.2177), id="by the spread between readings"),
        pytest.param(20, 0.2, 0.0, (0.2, 0.2, 0.2), id="every reading alike"),
        pytest.param(20, 0.2, 9.0, (0.0, 0.2, 16.13), id="never below zero"),
        pytest.param(20, 0.2, None, (0.1, 0.2, 0.6), id="as wide as predicted before twenty readings"),
    ],
)
def test_the_measured_step_time_replaces_the_predicted_one_after_twenty_steps(
    steps: int | None, mean_s: float | None, deviation_s: float | None, expected: tuple[float, ...] | None
) -> None:
    predicted = Interval(median=0.1, lower=0.05, upper=0.3)
    found = measured_step_time(predicted, steps, mean_s, deviation_s)
    assert (found and (found.lower, found.median, found.upper)) == expected


def test_without_any_interval_no_step_time_replaces_the_predicted_one() -> None:
    for predicted in (None, _exactly(0.0)):
        assert measured_step_time(predicted, 20, 0.2, None) is None


def test_steps_that_are_left_take_their_time_and_that_of_checkpoints() -> None:
    step_s = Interval(median=0.2, lower=0.1, upper=0.4)
    assert remaining_s(step_s, 100, 0.5) == Interval(median=40.0, lower=20.0, upper=80.0)
    assert remaining_s(step_s, -1) == _exactly(0.0), "more steps than declared"


@pytest.mark.parametrize(
    ("steps", "prediction", "product", "expected"),
    [
        pytest.param(1000, _PREDICTED, "A100", 100.0, id="on the product that it asks for"),
        pytest.param(1000, _PREDICTED, "", 200.0, id="the mean of those that it may run on"),
        pytest.param(None, _PREDICTED, "", None, id="steps unknown"),
        pytest.param(1000, None, "", None, id="nothing predicted"),
        pytest.param(1000, _PREDICTED, "H100", None, id="nothing predicted of what it may run on"),
        pytest.param(1000, Prediction(outcome="Abstained", reason="NoModel"), "", None, id="abstained"),
    ],
)
def test_duration_is_steps_times_step_time(
    steps: int | None, prediction: Prediction | None, product: str, expected: float | None
) -> None:
    found = duration_s(steps, prediction, lambda name: product in name)

    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (4e-4, "0.4 ms"), (0.041, "41 ms"), (1.24, "1.2 s"), (89.0, "89 s"), (1440.0, "24 min"), (24_480.0, "6.8 h"),
        (36 * 3600.0, "1.5 d"), (1e11, "1,157,407 d"),
    ],
)  # fmt: skip
def test_duration_is_formatted_in_a_readable_unit(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@pytest.mark.parametrize("number", range(1, DURATION_BUCKETS))
def test_duration_bucket_begins_at_its_bound(number: int) -> None:
    """Regression: a logarithm rounded down left jobs of just that length one rung too low."""
    exact = Fraction(FIRST_BOUND_S) * Fraction(BUCKET_FACTOR) ** (number - 1)
    bound = float(exact)
    assert Fraction(bound) == exact
    assert duration_bucket(bound) == number
    assert duration_bucket(math.nextafter(bound, 0.0)) == number - 1
    assert duration_bucket(math.nextafter(bound, math.inf)) == number


def test_first_and_last_duration_bucket_are_open() -> None:
    last = DURATION_BUCKETS - 1
    assert [duration_bucket(seconds) for seconds in (0.0, 1e300, math.inf)] == [0, last, last]


def held(name: str, at: str, *gpus: str, job: str = "") -> Reservation:
    return Reservation(
        pod_uid=PodUid(f"pod-{name}"),
        pod_namespace="default",
        pod_name=name,
        job_uid=JobUid(job or f"job-{name}"),
        job_name=name,
        gpu_uuids=[GpuUuid(gpu) for gpu in gpus or ("GPU-0",)],
        mode=SharingMode.MPS,
        reserved_at=at,
    )


NOW, LATER = "2026-01-31T12:00:00Z", "2026-01-31T12:00:01Z"
OWN = held("own", NOW)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([], "", id="no other job"),
        pytest.param([held("before", "2026-01-31T11:59:59Z")], "", id="before"),
        pytest.param([held("elsewhere", LATER, "GPU-1")], "", id="on another GPU"),
        pytest.param([held("worker", LATER, job="job-own")], "", id="another worker of the job"),
        pytest.param(
            [held("z", LATER, "GPU-1", "GPU-0"), held("y", LATER)],
            "; joined since by default/y, default/z, not counted here",
            id="in order of their names",
        ),
        pytest.param(
            [held(f"j{number}", LATER) for number in range(MAX_NAMED_JOBS + 2)],
            "; joined since by default/j0, default/j1, default/j2, default/j3, default/j4, 2 more, not counted here",
            id="more than are named",
        ),
    ],
)
def test_later_tenants_are_named(others: list[Reservation], expected: str) -> None:
    node = GpuNode(metadata=ObjectMeta(name="a"), spec=GpuNodeSpec(reservations=[OWN, *others]))
    assert describe_later_tenants(node, OWN) == expected


OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=OFFSETS)


@given(MOMENTS)
def test_times_round_trip(moment: datetime) -> None:
    assert parse_rfc3339(rfc3339(moment)) == moment
    assert parse_rfc3339(moment.isoformat()) == moment
    assert parse_rfc3339("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "soon", "2026-01-31", "2026-01-31T12:00:00", "2026-02-30T12:00:00Z"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # fromisoformat has sentences of its own
        parse_rfc3339(text)
