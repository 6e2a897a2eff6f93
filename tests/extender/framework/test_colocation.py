"""Slowdowns of many GPUs at once equal those of the slowdown model for each alone."""

import numpy as np
import pytest
from carpool_core.values import SharingMode
from carpool_extender.framework.filters import PASSED, SLOWDOWN, AdmissionLimits, Quantile
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import CachedEvaluation
from carpool_extender.testing import cluster, gpu_node, pod_request, prediction, tenant
from carpool_predictor.models.slowdown import slowdowns, upper_end
from hypothesis import given
from hypothesis import strategies as st

SHARE = st.integers(0, 100)
JOB = st.tuples(SHARE, SHARE, SHARE, st.sampled_from([1.0, 1.5, 3.0]))
"""GPU utilization, SM activity and DRAM activity in percent; the slowdown that it accepts."""
GPU = st.tuples(st.sampled_from([SharingMode.MPS, SharingMode.TIME_SLICING]), st.lists(JOB, min_size=1, max_size=4))


def profile(job):
    util, sm, dram, limit = job
    made = prediction(memory_mib=1000, util=float(util), sm=sm / 100, dram=dram / 100)
    return {"prediction": made, "max_slowdown": limit}


def upper_slowdowns(mode, util, sm, dram, present):
    median = slowdowns(mode, util, sm, dram, present)
    return upper_end(mode, median, util, present)


@pytest.mark.parametrize(("quantile", "predict"), [(Quantile.MEDIAN, slowdowns), (Quantile.UPPER, upper_slowdowns)])
@given(gpus=st.lists(GPU, min_size=1, max_size=5), newcomer=JOB)
def test_slowdowns_of_all_gpus_are_those_of_the_model(quantile, predict, gpus, newcomer):
    held = [
        tenant(f"{place}-{i}", [f"GPU-a-{place}"], mode=mode, **profile(job))
        for place, (mode, jobs) in enumerate(gpus)
        for i, job in enumerate(jobs)
    ]
    rules = SchedulerConfig(find_policy("least-slowdown"), slots=8, limits=AdmissionLimits(quantile=quantile))
    snapshot = cluster(gpu_node("a", len(gpus), held)).snapshot()
    found = CachedEvaluation(pod_request(**profile(newcomer)), rules, snapshot).evaluation.results
    for row, (mode, jobs) in enumerate(gpus):
        util, sm, dram, limit = (np.array([of]) for of in zip(*jobs, newcomer, strict=True))
        busy = (util / 100, sm / 100, dram / 100)
        every = np.ones(limit.shape, np.bool_)
        before = slowdowns(mode, *(of[:, :-1] for of in busy), every[:, :-1])
        after, room = slowdowns(mode, *busy, every), (limit - predict(mode, *busy, every))[0]
        assert found.slowdown[row] == pytest.approx(after[0, -1])
        assert found.added_slowdown[row] == pytest.approx(after.sum() - 1 - before.sum(), abs=1e-6)
        assert found.slowdown_margin[row] == pytest.approx(room.min(), abs=1e-6)
        assert found.failed[row] == (PASSED if room.min() > -1e-6 else SLOWDOWN.number)
