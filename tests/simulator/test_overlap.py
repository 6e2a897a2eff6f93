"""Utilization, SM activity and power of shared GPUs: formulas, measured pairs, and energy."""

import csv
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from carpool_core.values import SharingMode
from carpool_simulator import truth as truths
from carpool_simulator.engine import Simulation
from carpool_simulator.power import Power
from carpool_simulator.sweep import figures_of
from carpool_simulator.truth import MeasuredPairs
from simulated_world import ALONE, CARPOOL, Halved, NoSlowdown, job, truth, workload


@pytest.mark.parametrize(
    ("util", "slowdowns", "expected"),
    [
        pytest.param([0.4], [1.0], 0.4, id="alone"),
        pytest.param([0.4], [2.0], 0.2, id="it waits for its gang elsewhere"),
        pytest.param([0.5, 0.5], [1.2, 1.2], 0.75, id="both are idle a quarter of the time"),
        pytest.param([0.5, 0.5, 0.5], [1.5, 1.5, 1.5], 0.875, id="three"),
        pytest.param([0.5, 0.5], [2.0, 2.0], 0.5, id="at most the work that is done"),
    ],
)
def test_a_gpu_is_idle_only_while_all_tenants_are_idle(util, slowdowns, expected):
    assert truths.utilization([truth(util=one) for one in util], slowdowns) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        pytest.param(SharingMode.MPS, 0.5 + 0.1, id="concurrent tenants add up"),
        pytest.param(SharingMode.TIME_SLICING, 0.75 * 0.6, id="a weighted mean of the busy time"),
    ],
)
def test_sm_activity_depends_on_the_sharing_mode(mode, expected):
    tenants = [truth(util=0.5, sm=0.5), truth(util=0.5, sm=0.1)]
    assert truths.sm_activity(mode, tenants, [1.0, 1.0], 0.75) == pytest.approx(expected)
    assert truths.sm_activity(mode, [], [], 0.0) == 0.0


def test_utilization_of_a_measured_pair_is_the_measured_one_in_its_mode_and_at_its_speed(data):
    pairs = MeasuredPairs(data / "lucid")
    one, two = truth(util=0.4, kind="lucid/ResNet18/32/0"), truth(util=0.6, kind="lucid/MobileNetV2/32/0")
    for tenants in ([one, two], [two, one]):
        measured = pairs.slowdowns(SharingMode.TIME_SLICING, tenants)
        assert pairs.utilization(SharingMode.TIME_SLICING, tenants, measured) == 0.9
        for mode, slowdowns in ((SharingMode.MPS, measured), (SharingMode.TIME_SLICING, [4.0, 4.0])):
            assert pairs.utilization(mode, tenants, slowdowns) == truths.utilization(tenants, slowdowns)
    three = [one, two, truth(util=0.2)]
    slowdowns = pairs.slowdowns(SharingMode.TIME_SLICING, three)
    assert pairs.utilization(SharingMode.TIME_SLICING, three, slowdowns) == truths.utilization(three, slowdowns)


def test_estimated_utilization_agrees_with_all_pairs_of_lucid(published):
    """No parameter was fitted to the 676 pairs."""
    pairs = MeasuredPairs(published / "lucid")
    with (published / "lucid" / "solo_rtx3090.csv").open(encoding="utf-8") as file:
        alone = {_kind(row, ""): float(row["gpu_util"]) / 100 for row in csv.DictReader(file)}
    off, on_images = [], []
    with (published / "lucid" / "colocate_rtx3090.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tenants = [truth(util=alone[kind], kind=kind) for kind in (_kind(row, "1"), _kind(row, "2"))]
            slowdowns = [max(1.0, 1 / max(0.05, float(row[name]))) for name in ("speed1", "speed2")]
            off.append(100 * truths.utilization(tenants, slowdowns) - float(row["gpu_util"]))
            if "CIFAR" in row["dataset1"] and "CIFAR" in row["dataset2"]:
                on_images.append(off[-1])
            true = pairs.slowdowns(SharingMode.TIME_SLICING, tenants)
            assert pairs.utilization(SharingMode.TIME_SLICING, tenants, true) == float(row["gpu_util"]) / 100
    assert (len(off), len(on_images)) == (676, 171)
    assert abs(fmean(off)) <= 0.6
    assert fmean(map(abs, off)) <= 5.0
    assert abs(fmean(on_images)) <= 1.4
    assert fmean(map(abs, on_images)) <= 3.3


def _kind(row, which):
    return f"lucid/{row['model' + which]}/{row['batchsize' + which]}/{row['amp' + which]}"


@pytest.mark.parametrize(
    ("power", "idle_w", "busy_w"),
    [
        pytest.param(None, 50, 92 + (336 - 92) * 0.2, id="default power"),
        pytest.param(Power(10, 20, 120), 10, 20 + 100 * 0.2, id="power of the workload's machine"),
    ],
)
def test_energy_is_that_of_busy_and_idle_gpus(power, idle_w, busy_w):
    """One of two GPUs has a job for 100 of 200 s, which keeps 0.2 of its SMs busy; a job on the other lasts."""
    jobs = replace(workload(job("a", 100.0), job("b", 200.0), gpus=2), power=power)
    outcome = Simulation(jobs, ALONE, NoSlowdown()).run()
    assert figures_of(outcome).energy_mj * 1e6 == pytest.approx(300 * busy_w + 100 * idle_w)


def test_decisions_never_read_true_activity_or_power():
    """Decisions are equal for different true utilization and power of whole GPUs."""

    class Busier(Halved):
        def utilization(self, mode, tenants, slowdowns):
            return 1.0

    jobs = workload(*(job(f"j{i}", 100.0 + 10 * i, of=truth(util=0.3)) for i in range(9)), gpus=2)
    runs = []
    for physics, power in ((Halved(), None), (Busier(), Power(300, 500, 900))):
        world = type(jobs)(jobs.name, "", jobs.jobs, jobs.nodes, (), power)
        for policy in ("energy", "least-slowdown"):
            strategy = type(CARPOOL)(policy, policy, CARPOOL.knowledge, max_slowdown=3.0)
            outcome = Simulation(world, strategy, physics).run()
            runs.append([(one.job.name, one.start_s, one.end_s, one.gpus) for one in outcome.finished])
    assert all(one == two for one, two in pairwise(runs[::2]))
    assert all(one == two for one, two in pairwise(runs[1::2]))
