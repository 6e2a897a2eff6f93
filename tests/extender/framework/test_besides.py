"""Who asks about a single GPU is told every check that fails there."""

import pytest
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.framework.admission_limits import AdmissionLimits
from carpool_extender.framework.diagnosis import all_failures, explain_gpus, headroom, other_failures, outcome
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import CHECKS, HEALTH, LIMITS, MEMORY, MODE, SLOTS, SLOWDOWN, SUITABILITY
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.testing import T4, cluster, device, gpu_node, pod_request, prediction, tenant

GPU = "GPU-a-0"
BUSY = {"prediction": prediction(util=100, sm=0.9, dram=0.5)}
LARGE = prediction(memory_mib=15_500, util=100, sm=0.9)


def asked(node, newcomer, slots=8, conditions=None):
    rules = SchedulerConfig(find_policy("least-slowdown"), slots, conditions or AdmissionLimits())
    return CachedEvaluation(newcomer, rules, cluster(node).snapshot()).evaluation


def test_all_that_fails_is_told_with_its_margin_the_first_as_before():
    crowd = [tenant(f"x{i}", [GPU], memory_limit_mib=14_000, **BUSY) for i in range(2)]
    conditions = AdmissionLimits(max_sm_active=0.8)
    newcomer = pod_request(prediction=LARGE)
    evaluation = asked(gpu_node("a", 1, crowd), newcomer, 2, conditions)
    assert other_failures(evaluation, 0) == [MEMORY, LIMITS, SLOWDOWN]
    told = all_failures(evaluation, 0).split("; besides, ")
    assert told[0] == outcome(evaluation, 0) == "has 2 tenants, the most allowed is 2"
    assert told[1] == "needs 15,500 MiB, has 12,960 MiB free (2,540 MiB short)"
    assert told[2] == "SM activity 1.80, the site's limit is 0.80"
    assert told[3].startswith("would slow default/x0 to 2.80 of 1.50 (1.30 beyond)")


@pytest.mark.parametrize(
    ("tenants", "newcomer", "besides"),
    [
        pytest.param([], pod_request(prediction=LARGE), [], id="nothing else"),
        pytest.param([], pod_request(product=T4, prediction=LARGE), [SUITABILITY], id="of another product"),
        pytest.param(
            [tenant("x", [GPU], SharingMode.EXCLUSIVE)],
            pod_request(prediction=LARGE),
            [MODE],
            id="somebody's own, of whose memory nothing is to be said",
        ),
        pytest.param(
            [tenant("x", [GPU], memory_limit_mib=30_000)],
            pod_request(prediction=LARGE),
            [MEMORY],
            id="too full",
        ),
        pytest.param([tenant("x", [GPU], **BUSY)], pod_request(prediction=LARGE), [SLOWDOWN], id="too busy"),
    ],
)
def test_a_gpu_that_is_sick_may_be_unfit_besides(tenants, newcomer, besides):
    sick = [device(0, health=DeviceHealth.UNHEALTHY, health_message="Xid 79")]
    evaluation = asked(gpu_node("a", sick, tenants), newcomer)
    assert evaluation.results.failed[0] == HEALTH.number
    assert other_failures(evaluation, 0) == besides
    assert all_failures(evaluation, 0).count("; besides, ") == len(besides)


def test_where_the_job_fits_nothing_is_besides():
    evaluation = asked(gpu_node("a", 1), pod_request())
    assert other_failures(evaluation, 0) == []
    assert all_failures(evaluation, 0) == f"{outcome(evaluation, 0)}; tenant 1 of at most 8"


def test_where_the_job_fits_it_is_told_how_far_the_sites_limits_are():
    conditions = AdmissionLimits(max_sm_active=0.8, max_joint_sm_active=0.9, min_free_mib=5120, max_jobs=3)
    node = gpu_node("a", 1, [tenant("x", [GPU], memory_limit_mib=10_000, prediction=prediction(util=20, sm=0.3))])
    newcomer = pod_request(prediction=prediction(util=20, sm=0.25))
    told = all_failures(asked(node, newcomer, conditions=conditions), 0).split("; ")
    assert told[-1] == (
        "tenant 2 of at most 3, SM activity 0.30 of at most 0.80, joint SM activity 0.55 of at most 0.90, "
        "free memory 30,960 MiB of at least 5,120 MiB"
    )
    fewer_slots = asked(node, newcomer, 2, conditions=conditions)
    assert headroom(fewer_slots, 0)[0] == "tenant 2 of at most 2"


def test_a_gpu_of_its_own_has_no_number_of_tenants():
    evaluation = asked(gpu_node("a", 1), pod_request(mode=RequestedMode.EXCLUSIVE))
    assert headroom(evaluation, 0) == []


def test_explain_tells_them():
    node = gpu_node("a", [device(0, health=DeviceHealth.UNHEALTHY, health_message="Xid 79")])
    rules = SchedulerConfig(find_policy("least-slowdown"), 8)
    (answer,) = explain_gpus(CachedEvaluation(pod_request(product=T4), rules, cluster(node).snapshot()), ["a"])
    assert answer.text.startswith("unhealthy: Xid 79; besides, wrong product")


def test_first_and_besides_are_the_checks_that_fail_alone():
    """Each check is made to pass in its turn: what is told of the rest stays the same."""

    def crowded(**accepts):
        return gpu_node("a", 1, [tenant(f"x{i}", [GPU], memory_limit_mib=14_000, **BUSY, **accepts) for i in range(2)])

    newcomer, conditions = pod_request(prediction=LARGE), AdmissionLimits(max_sm_active=0.8)
    small = pod_request(prediction=prediction(memory_mib=9_000, util=100, sm=0.9))
    cases = {
        SLOTS: asked(crowded(), newcomer, 8, conditions),
        LIMITS: asked(crowded(), newcomer, 2),
        MEMORY: asked(crowded(), small, 2, conditions),
        SLOWDOWN: asked(crowded(max_slowdown=9.0), pod_request(prediction=LARGE, max_slowdown=9.0), 2, conditions),
    }
    for passing, evaluation in cases.items():
        told = {CHECKS[int(evaluation.results.failed[0])], *other_failures(evaluation, 0)}
        assert told == set(cases) - {passing}
