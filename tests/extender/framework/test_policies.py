"""The GPU that each policy takes, the admission limits of the site, and the policy of a job."""

import msgspec
import numpy as np
import pytest
from carpool_core.clock import rfc3339
from carpool_core.testing.clock import FakeClock
from carpool_core.values import SharingMode
from carpool_extender.framework.filters import AdmissionLimits, Quantile
from carpool_extender.framework.scores import POLICIES, SchedulerConfig, energy, find_policy
from carpool_extender.framework.selection import CachedEvaluation, filter_nodes, place_on_node
from carpool_extender.informers import JobRow
from carpool_extender.testing import cluster, gpu_node, pod_request, prediction, tenant
from carpool_extender.workloads import NotOurs, policy_of
from evaluations import evaluate

ROW = "GPU-a-{}".format


def rules(policy="least-slowdown", **conditions):
    return SchedulerConfig(find_policy(policy), 8, AdmissionLimits(**conditions))


def chosen(snapshot, policy, **wants):
    found = place_on_node(CachedEvaluation(pod_request(**wants), rules(policy), snapshot), "a")
    return None if isinstance(found, str) else (int(found.gpu_uuids[0][-1]), found.mode)


def a_busy_node():
    """GPU 0: little memory left, little activity. GPU 1: idle. GPU 2: more memory left, busy."""
    tenants = [
        tenant("x", [ROW(0)], memory_limit_mib=30000, prediction=prediction(sm=0.1, util=20)),
        tenant("y", [ROW(2)], memory_limit_mib=9000, prediction=prediction(sm=0.6, util=90)),
    ]
    return cluster(gpu_node("a", 3, tenants)).snapshot()


@pytest.mark.parametrize(
    ("policy", "gpu"),
    [
        pytest.param("least-slowdown", 0, id="no tenant is slowed, and the fuller GPU is taken"),
        pytest.param("most-available-memory", 1, id="the idle GPU has the most"),
        pytest.param("exclusive", 1, id="the only GPU of its own"),
        pytest.param("first-fit", 0, id="the first"),
        pytest.param("first-fit-decreasing", 0, id="the first again"),
        pytest.param("best-fit", 0, id="least left"),
        pytest.param("worst-fit", 1, id="most left"),
        pytest.param("least-utilized", 1, id="idle means no activity"),
        pytest.param("most-utilized", 2, id="the busiest that holds it"),
        pytest.param("energy", 0, id="the sleeping GPU stays asleep"),
        pytest.param("round-robin", 0, id="no GPU was taken before"),
    ],
)
def test_each_policy_takes_its_own_gpu(policy, gpu):
    found = chosen(a_busy_node(), policy)
    assert found == (gpu, SharingMode.EXCLUSIVE if policy == "exclusive" else SharingMode.MPS)


def test_every_policy_has_a_meaning():
    assert all(policy.meaning and policy.name == name for name, policy in POLICIES.items())


@pytest.mark.parametrize(
    ("mode", "expected_w"),
    [
        pytest.param(None, 248 * 0.9 + 34, id="asleep: what it does, and waking"),
        pytest.param(SharingMode.TIME_SLICING, 248 * 0.9 * 2 + 208, id="beside a neighbour that it slows"),
    ],
)
def test_energy_counts_watts_for_as_long_as_all_tenants_run(mode, expected_w):
    """An A100 draws 50 W asleep, 84 to 332 W with a job; two that are always busy take twice as long in turns."""
    busy = {"prediction": prediction(util=100, sm=0.9, dram=0.5), "max_slowdown": 10.0}
    held = [] if mode is None else [tenant("x", [ROW(0)], mode, **busy)]
    evaluation = evaluate(gpu_node("a", 1, held), pod_request(**busy), rules("energy")).evaluation
    assert energy(evaluation, np.array([0]))[0] == pytest.approx(expected_w)


def test_energy_wakes_a_gpu_if_sharing_costs_more():
    held = tenant("x", [ROW(0)], prediction=prediction(util=100, sm=0.9, dram=0.5), max_slowdown=10.0)
    snapshot = cluster(gpu_node("a", 2, [held])).snapshot()
    light = prediction(util=20, sm=0.05, dram=0.1)
    heavy = prediction(util=100, sm=0.9, dram=0.5)
    assert chosen(snapshot, "energy", prediction=light, max_slowdown=10.0)[0] == 0
    assert chosen(snapshot, "energy", prediction=heavy, max_slowdown=10.0)[0] == 1


def test_round_robin_goes_on_after_the_newest_reservation():
    held = msgspec.structs.replace(tenant("x", [ROW(1)]), reserved_at=rfc3339(FakeClock().now()))
    assert chosen(cluster(gpu_node("a", 3, [held])).snapshot(), "round-robin")[0] == 2
    last = msgspec.structs.replace(held, gpu_uuids=[ROW(2)])
    assert chosen(cluster(gpu_node("a", 3, [last])).snapshot(), "round-robin")[0] == 0


def test_round_robin_forgets_removed_nodes():
    """Regression: rows of a removed node counted until others overwrote them."""
    held = msgspec.structs.replace(tenant("x", [ROW(0)]), reserved_at=rfc3339(FakeClock().now()))
    last = msgspec.structs.replace(tenant("y", ["GPU-b-0"]), reserved_at="2030-01-01T00:00:00Z")
    known = cluster(gpu_node("a", 3, [held]), gpu_node("b", 1, [last]))
    assert chosen(known.snapshot(), "round-robin")[0] == 0
    known.remove("b")
    assert chosen(known.snapshot(), "round-robin")[0] == 1


def test_limit_of_joint_activity_exempts_idle_gpus():
    newcomer = pod_request(prediction=prediction(sm=0.7), max_slowdown=3)
    asked = rules(max_joint_sm_active=0.5)
    assert filter_nodes(evaluate(gpu_node("a", 1), newcomer, asked), ["a"]).fits == ["a"]
    used = cluster(gpu_node("a", 1, [tenant("x", [ROW(0)], prediction=prediction(sm=0.1))]))
    assert filter_nodes(evaluate(used, newcomer, asked), ["a"]).refused == {
        "a": "NoGpuFits: 1 GPU: joint SM activity 0.80, the site's limit is 0.50"
    }


def test_exclusive_refuses_gpus_in_use():
    known = cluster(gpu_node("a", 1, [tenant("x", [ROW(0)])]))
    found = filter_nodes(evaluate(known, None, rules("exclusive")), ["a"])
    assert found.refused["a"] == "NoGpuFits: 1 GPU: in use, and the policy gives every job a GPU of its own"


def test_admission_limits_are_printed_in_words():
    every = AdmissionLimits(0.8, 0.9, 2048, 3, quantile=Quantile.UPPER)
    assert str(every) == (
        "SM activity ≤ 0.80, joint SM activity ≤ 0.90, free memory ≥ 2,048 MiB, jobs on a GPU ≤ 3, "
        "slowdown limits by the upper quantile"
    )
    assert str(AdmissionLimits()) == "none"
    assert str(AdmissionLimits().with_exclusive_gpus()) == "jobs on a GPU ≤ 1, every job on a GPU of its own"


def test_job_chooses_its_policy_only_if_the_site_allows_it():
    def made(policy):
        row = {"metadata": {"name": "j", "namespace": "n"}}
        if policy:
            row["metadata"]["annotations"] = {"carpool.dev/policy": policy}
        return msgspec.convert(row, JobRow)

    assert policy_of(made(None), allowed=False) is None
    assert policy_of(made("energy"), allowed=True) == "energy"
    with pytest.raises(NotOurs, match=r"remove the annotation, or have .* settings.jobPolicies: true in the chart's"):
        policy_of(made("energy"), allowed=False)
    with pytest.raises(NotOurs, match="UnknownPolicy: job n/j: policy 'fast' is unknown; choose one of"):
        policy_of(made("fast"), allowed=True)
    own = pod_request()
    assert rules().policy_for(type(own)(own.demand, "energy")).name == "energy"
