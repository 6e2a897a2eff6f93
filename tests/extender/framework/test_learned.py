"""Slowdowns that were learned from measured runs: decisions, texts, and tenants beyond their limit."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from carpool_core.resources.node import Tenant
from carpool_core.resources.prediction import ANY_FAMILY, LearnedColocation, Prediction
from carpool_core.values import GpuUuid, PodUid, SharingMode
from carpool_extender.framework.diagnosis import explain_gpu
from carpool_extender.framework.filters import HEALTH, PASSED, SLOWDOWN
from carpool_extender.testing import cluster, gpu_node, pod_request, prediction, tenant
from carpool_predictor.models.slowdown import upper_factor
from evaluations import evaluate

UTIL = 20.0
UPPER = math.exp(0.1) * float(upper_factor(SharingMode.MPS, np.array([[UTIL, UTIL]]) / 100)[0, 0])
"""Upper end of a slowdown that other pairs correct by 0.1."""


def learned(family: str, own: float = 0.0, other: float = 0.0, runs: int = 3, **widths: float) -> LearnedColocation:
    values: dict[str, Any] = {"own_width": 0.7, "other_width": 0.7} | widths
    return LearnedColocation(
        family=family, mode=SharingMode.MPS, runs=runs, own=[own, 0.0, 0.0], other=[other, 0.0, 0.0], **values
    )


def predicted(family: str, *colocations: LearnedColocation) -> Prediction:
    made = prediction(memory_mib=1000, util=UTIL, sm=0.2)
    products = [msgspec.structs.replace(one, colocations=list(colocations)) for one in made.products]
    return msgspec.structs.replace(made, products=products, family=family)


def outcome(*colocations: LearnedColocation, tenants: int = 1, family: str = "resnet") -> tuple[int, str]:
    held = [tenant(f"t{n}", ["GPU-a-0"], prediction=predicted(family)) for n in range(tenants)]
    found = evaluate(gpu_node("a", 1, held), pod_request(prediction=predicted("bert", *colocations))).evaluation
    return int(found.results.failed[0]), explain_gpu(found, 0)


@pytest.mark.parametrize(
    ("colocations", "tenants", "failed", "words"),
    [
        pytest.param([], 1, PASSED, "expected slowdown 1.00 (90% chance of less than ", id="the shipped model"),
        pytest.param(
            [learned("resnet", own=0.6)],
            1,
            SLOWDOWN.number,
            "would run 1.82 times as long there, accepts 1.50",
            id="slowed more than it accepts",
        ),
        pytest.param([learned("resnet", other=0.6)], 1, SLOWDOWN.number, "slow default/t0", id="slows its co-tenant"),
        pytest.param(
            [learned("resnet", own=0.38)],
            1,
            PASSED,
            "3 measured runs beside resnet",
            id="a measured family by its median",
        ),
        pytest.param(
            [learned("resnet", own=0.1)], 1, PASSED, "from 3 measured runs beside resnet", id="names the pair"
        ),
        pytest.param(
            [learned(ANY_FAMILY, own=0.1, runs=0, own_width=1.0, other_width=1.0)],
            1,
            PASSED,
            f"expected slowdown 1.11 (90% chance of less than {UPPER:.2f}), corrected by measured runs of other pairs",
            id="other pairs on the product move the median",
        ),
        pytest.param([learned("vgg", own=2.0)], 1, PASSED, "expected slowdown 1.00", id="another family"),
        pytest.param([learned("resnet", own=0.25)], 2, SLOWDOWN.number, "run", id="two measured co-tenants add up"),
        pytest.param([learned("resnet", own=0.22)], 2, PASSED, "slowdown 1.49", id="their shares are added"),
    ],
)
def test_learned_slowdowns_decide_and_are_named(
    colocations: list[LearnedColocation], tenants: int, failed: int, words: str
) -> None:
    found, text = outcome(*colocations, tenants=tenants)
    assert found == failed, text
    assert words in text


@pytest.mark.parametrize(
    ("changes", "known", "tenants", "passes"),
    [
        pytest.param({"tries": True}, True, 1, True, id="it would leave at once"),
        pytest.param({"tries": True, "moves": 1}, True, 1, True, id="it was moved before"),
        pytest.param({}, True, 1, False, id="it would stay"),
        pytest.param({"tries": True}, False, 1, False, id="its slowdown would not be measured"),
        pytest.param({"tries": True}, True, 2, False, id="a group counts with all that was learned"),
    ],
)
def test_a_job_that_would_leave_tries_pairs_that_others_advise_against(
    changes: dict[str, Any], known: bool, tenants: int, passes: bool
) -> None:
    any_family = learned(ANY_FAMILY, own=1.0, runs=0, own_width=1.0, other_width=1.0)

    def comparable(made: Prediction) -> Prediction:
        products = [msgspec.structs.replace(one, comparable=known) for one in made.products]
        return msgspec.structs.replace(made, products=products)

    held = [tenant(f"t{n}", ["GPU-a-0"], prediction=comparable(predicted("resnet@1"))) for n in range(tenants)]
    node = gpu_node("a", 1, held)
    for found, expected in (
        (any_family, passes),
        (learned("resnet@1", own=1.0, own_width=0.0, other_width=0.0), False),
    ):
        asked = pod_request(prediction=comparable(predicted("bert@1", found)), **changes)
        assert (evaluate(node, asked).evaluation.results.failed[0] == PASSED) == expected


@pytest.mark.parametrize(
    ("found", "known", "passes"),
    [
        pytest.param([], True, True, id="tenants that do not slow each other"),
        pytest.param([learned("resnet@0", sensitivity=0.3), learned("resnet@1")], True, True, id="one is sensitive"),
        pytest.param(
            [learned("resnet@0", sensitivity=0.3), learned("resnet@1", pressure=0.2)], True, False, id="and one presses"
        ),
        pytest.param([], False, False, id="their slowdowns would not be measured"),
    ],
)
def test_a_job_that_would_leave_joins_a_group_by_what_was_learned_of_its_tenants(
    found: list[LearnedColocation], known: bool, passes: bool
) -> None:
    def comparable(made: Prediction) -> Prediction:
        return msgspec.structs.replace(
            made, products=[msgspec.structs.replace(one, comparable=known) for one in made.products]
        )

    held = [tenant(f"t{n}", ["GPU-a-0"], prediction=comparable(predicted(f"resnet@{n}"))) for n in range(2)]
    asked = pod_request(prediction=comparable(predicted("bert@1", learned(ANY_FAMILY), *found)), tries=True)
    results = evaluate(gpu_node("a", 1, held), asked).evaluation.results
    assert (results.failed[0] == PASSED) == passes
    assert results.slowdown[0] == 1.0, "the tenants slow each other, not the job"


def test_a_model_without_a_name_is_named_by_its_job() -> None:
    """Regression: the digest of its description was printed."""
    digest = "0123456789abcdef"
    found = outcome(learned(digest, own=0.1), family=digest)[1]
    assert ", from 3 measured runs beside jobs like default/t0;" in found


def measured(name: str, slowdown: float | None, *, settled: bool = True) -> Tenant:
    return Tenant(
        pod_uid=PodUid(f"pod-{name}"),
        gpu_uuid=GpuUuid("GPU-a-0"),
        settled=settled,
        step_time_seconds=slowdown and 0.1 * slowdown,
        solo_step_time_seconds=0.1,
    )


@pytest.mark.parametrize(
    ("own", "failed", "words"),
    [
        (0.3, PASSED, "from 1 measured run beside jobs like default/t0;"),
        (0.38, SLOWDOWN.number, "could run 1.60 times as long there, expected 1.46"),
    ],
)
def test_runs_of_the_same_two_jobs_count_before_their_families(own: float, failed: int, words: str) -> None:
    of_jobs = learned("resnet@1", own=own, runs=1, own_width=0.0, other_width=0.0)
    found, text = outcome(learned("resnet", own=2.0), of_jobs, family="resnet@1")
    assert found == failed, text
    assert words in text
    assert outcome(learned("resnet", own=2.0), of_jobs, family="resnet@2")[0] == SLOWDOWN.number, "another job"


@pytest.mark.parametrize(
    ("slowdowns", "settled", "refused"),
    [
        pytest.param([1.2, 1.6], True, True, id="one is beyond its limit"),
        pytest.param([1.2, 1.4], True, False, id="all are within"),
        pytest.param([1.6], True, False, id="alone, so that no co-tenant is the cause"),
        pytest.param([1.2, 1.6], False, False, id="not measured for long"),
        pytest.param([None, None], True, False, id="without reports"),
    ],
)
def test_a_gpu_with_a_tenant_beyond_its_limit_takes_no_other_one(
    slowdowns: list[float | None], settled: bool, refused: bool
) -> None:
    names = [f"t{n}" for n in range(len(slowdowns))]
    node = gpu_node("a", 1, [tenant(name, ["GPU-a-0"], prediction=predicted("resnet")) for name in names])
    tenants = [measured(name, one, settled=settled) for name, one in zip(names, slowdowns, strict=True)]
    node = msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, tenants=tenants))
    found = evaluate(cluster(node), pod_request(prediction=predicted("bert"))).evaluation
    assert (found.results.failed[0] == HEALTH.number) == refused
    if refused:
        text = explain_gpu(found, 0)
        assert "its tenant default/t1 was measured to run 1.60 times as long as alone, accepts 1.50" in text
