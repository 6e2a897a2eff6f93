"""Slowdowns learned from measured pairs: shrinkage, interval, bounds of the store, and whom a record reaches."""

import math

import numpy as np
import pytest
from carpool_core.resources.prediction import ANY_FAMILY, Prediction
from carpool_core.values import SharingMode
from carpool_predictor.calibration.colocation import (
    MAX_PUBLISHED,
    MAX_RATIO,
    Corrections,
    PairRecord,
    SoloRecord,
    add,
    correction_factor,
    job_name,
    learned_colocations,
    measured_runs,
    solo_step_s,
    usable,
    with_colocations,
)
from carpool_predictor.calibration.document import Calibration, read_calibration, write_calibration
from hypothesis import given
from hypothesis import strategies as st

A100, MPS, SLICED = "NVIDIA A100-SXM4-40GB", SharingMode.MPS, SharingMode.TIME_SLICING


def pair(
    log_ratio: float = 0.4, family: str = "bert", other: str = "resnet", run: int = 0, domain: str = "a", **fields
) -> PairRecord:
    values = {"product": A100, "simulated": False, "mode": MPS, "util": 0.6, "other_util": 0.5} | fields
    return PairRecord(
        sample=f"{family}-{other}-{run}", namespace=domain, domain=domain, family=family, other=other,
        log_ratio=log_ratio, **values,
    )  # fmt: skip


def factor(records, family="bert", other="resnet") -> float:
    return correction_factor(Corrections(records).beside(family, other).coefficients, 0.6, 0.5)


def width(records, family="bert", other="resnet") -> float:
    return Corrections(records).beside(family, other).width


def test_without_records_the_shipped_model_stays() -> None:
    assert Corrections([]).beside("bert", "resnet") == ((0, 0, 0), 1)


@given(ratios=st.lists(st.floats(-MAX_RATIO, MAX_RATIO), min_size=1, max_size=12))
def test_an_estimate_lies_between_the_shipped_model_and_the_measured_runs(ratios) -> None:
    found = math.log(factor([pair(ratio, run=number) for number, ratio in enumerate(ratios)]))
    assert min([0.0, *ratios]) - 1e-9 <= found <= max([0.0, *ratios]) + 1e-9


@pytest.mark.parametrize(("runs", "share"), [(1, 0.5), (3, 0.75), (10, 0.9)])
def test_runs_of_a_pair_outweigh_the_shipped_model(runs: int, share: float) -> None:
    assert math.log(factor([pair(run=number) for number in range(runs)])) > share * 0.4


def test_the_interval_narrows_with_runs_but_keeps_their_own_spread() -> None:
    runs = [[pair(family="bert@1", other=f"resnet@{n}", run=n) for n in range(number)] for number in (0, 1, 3, 100)]
    widths = [width(records, "bert@1", "resnet@new") for records in runs]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 1
    assert widths[-1] > 0.5, "nothing is known of the co-tenant but its family"


def test_runs_of_the_same_two_jobs_count_before_other_jobs_of_their_families() -> None:
    records = [pair(0.0, "bert@1", f"resnet@{n}", n) for n in range(5)] + [pair(0.4, "bert@1", "resnet@9")]
    assert math.log(factor(records, "bert@1", "resnet@9")) == pytest.approx(0.4, abs=0.05)
    assert width(records, "bert@1", "resnet@9") == 0
    assert 0 < width(records, "bert@2", "resnet@9") < 1
    jobs = {f"resnet@{n}": 1 for n in (0, 1, 2, 3, 4, 9)}
    found = {one.family: one.runs for one in learned_colocations(records, A100, "bert@1")}
    assert found == {"resnet": 6, **jobs, "bert": 0, "bert@1": 0, ANY_FAMILY: 0}
    assert measured_runs(learned_colocations(records, A100, "bert@1")) == 3 + 7, "a new job renews a prediction"
    assert (job_name("", 64 * "1"), job_name("bert", 64 * "1")) == ("", f"bert@{16 * '1'}")


def test_a_run_with_a_job_of_the_same_family_counts_from_either_side() -> None:
    found = {one.family: one for one in learned_colocations([pair(family="bert@2", other="bert@1")], A100, "bert@1")}
    assert (found["bert@2"].runs, found["bert@2"].other_width) == (1, 0)


def test_a_job_that_ran_beside_one_co_tenant_is_known_beside_all() -> None:
    """A sensitive job suffers beside any co-tenant, and a job that presses others presses all."""
    records = [pair(0.6, "bert@1", f"resnet@{n}", n) for n in range(3)]
    records += [pair(0.0, f"resnet@{n}", "bert@1", n) for n in range(3)]
    assert factor(records, "bert@1", "gpt@1") > 1.1 * factor(records, "gpt@2", "gpt@1")
    assert factor(records, "gpt@1", "resnet@1") > factor(records, "gpt@1", "bert@1")
    assert width(records, "bert@1", "gpt@1") < width(records, "bert@2", "gpt@1") < 1


def test_other_pairs_move_the_estimate_and_leave_the_interval() -> None:
    records = [pair(family="vgg", other=f"other-{number}", run=number) for number in range(20)]
    assert factor(records) > 1.2
    assert width(records) == 1


def test_a_batch_size_counts_through_the_utilization() -> None:
    """Slowdowns grow with the co-tenant's utilization: that of a third batch size is between those of two others."""
    records = [pair(0.8 * v, other_util=v, run=n) for n, v in enumerate(np.linspace(0.1, 0.9, 99).tolist())]
    coefficients = Corrections(records).beside("bert", "resnet").coefficients
    low, high = (math.log(correction_factor(coefficients, 0.6, v)) for v in (0.2, 0.8))
    assert high - low > 0.15


def test_a_prediction_has_room_for_the_jobs_that_ran_beside_it_and_the_most_measured() -> None:
    records = [pair(family="vgg", other=f"other@{n}", run=n) for n in range(60)] + [pair(family="bert@1", other="x@1")]
    found = [one.family for one in learned_colocations(records, A100, "bert@1")]
    assert (len(found), set(found[:2]), found[-1]) == (MAX_PUBLISHED, {"x", "x@1"}, ANY_FAMILY)


def test_a_prediction_says_how_its_co_tenants_slow_each_other() -> None:
    """Sensitivity of one and pressure of the other are the correction of jobs that never ran beside each other."""
    records = [pair(0.4, "vgg@1", "bert@1", util=0.2), pair(0.2, "bert@1", "resnet@1"), pair(0.1, "bert@1", "vgg@1")]
    found = {one.family: one for one in learned_colocations(records, A100, "bert@1")}
    expected = Corrections(records).beside("vgg@1", "resnet@1").coefficients[0]
    assert found["vgg@1"].sensitivity + found["resnet@1"].pressure == pytest.approx(expected, abs=2e-4)
    assert found["vgg@1"].sensitivity > found[ANY_FAMILY].sensitivity, "it was slowed most"
    assert found["resnet@1"].pressure > found["vgg@1"].pressure
    assert found[ANY_FAMILY].pressure == 0


def test_a_prediction_names_the_measured_families_by_mode_and_any_other() -> None:
    records = [pair(), pair(run=1), pair(-0.1, family="resnet", other="bert"), pair(mode=SLICED, other="vgg")]
    found = learned_colocations(records, A100, "bert")
    assert {(one.mode, one.family): one.runs for one in found} == {
        (MPS, "resnet"): 3, (MPS, "bert"): 0, (MPS, ANY_FAMILY): 0,
        (SLICED, "vgg"): 1, (SLICED, "bert"): 0, (SLICED, ANY_FAMILY): 0,
    }  # fmt: skip
    (beside,) = (one for one in found if (one.mode, one.family) == (MPS, "resnet"))
    assert beside.own[0] > 0 > beside.other[0]
    assert beside.own_width < beside.other_width < 1, "two runs of its own, one of the co-tenant"
    assert measured_runs(found) == 3, "bits of four runs"
    assert learned_colocations(records, "NVIDIA L4", "bert") == []
    empty = Prediction(outcome="Abstained", reason="NoModel")
    assert with_colocations(empty, records, "bert").family == "bert"


@pytest.mark.parametrize(
    ("namespace", "reached"), [("team-a", True), ("partner", True), ("new", False), ("team-b", False)]
)
def test_a_record_counts_in_its_tenancy_domain_only(namespace: str, reached: bool) -> None:
    """team-a and its partner are one group and have reported; team-b is alone; new has reported nothing yet."""
    group = [
        PairRecord(*("s", name, "tenancy group g", A100, False, MPS, "a", "b", 0.5, 0.5, 0.1))
        for name in ("team-a", "partner")
    ]
    other = PairRecord("s", "team-b", "namespace team-b", A100, False, MPS, "a", "b", 0.5, 0.5, 0.3)
    found = Calibration(pairs=[*group, other]).for_namespace(namespace).pairs
    assert (group[0] in found) == reached
    assert (other in found) == (namespace == "team-b")


def test_a_tenant_displaces_only_its_own_records() -> None:
    records = add([], pair(domain="small"), 10)
    for number in range(50):
        records = add(records, pair(domain="large", run=number), 10)
    assert len(records) == 10
    assert sum(one.domain == "small" for one in records) == 1
    assert records[-1].sample == "bert-resnet-49"


def test_a_later_measurement_replaces_the_run_s_earlier_one() -> None:
    assert [one.log_ratio for one in add([pair(0.1)], pair(0.2), 10)] == [0.2]


def test_the_store_holds_records_and_leaves_simulated_ones_out_of_hardware() -> None:
    solo = SoloRecord("job", "a", "a", A100, True, 0.25)
    kept = Calibration(pairs=[pair(), pair(run=1, simulated=True)], solo=[solo])
    again = read_calibration(write_calibration(kept))
    assert again == kept
    assert (again.for_gpus([]).pairs, again.for_gpus([]).solo) == ([pair()], [])
    assert again.for_gpus([A100]) is again
    assert solo_step_s(usable(again.solo, "a"), "job", A100) == 0.25
    assert solo_step_s(usable(again.solo, "b"), "job", A100) is None
