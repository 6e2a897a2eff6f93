"""GPUs in the same state are looked at once for each demand, and the answer is what looking at each would give."""

from dataclasses import fields

import numpy as np
import pytest
from carpool_core.values import DeviceHealth, RequestedMode, SharingMode
from carpool_extender.framework.filters import AdmissionLimits, Evaluation, empty_results
from carpool_extender.framework.selection import filter_rows
from carpool_extender.testing import cluster, device, gpu_node, pod_request, prediction, tenant
from carpool_simulator import cluster_model
from carpool_simulator.cluster_model import FilterMemo
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = "abcd"
MODES = [SharingMode.TIME_SLICING, SharingMode.MPS]
DEMANDS = [
    pod_request(),
    pod_request(max_slowdown=1.1, prediction=prediction(sm=0.7, util=80.0)),
    pod_request(mode=RequestedMode.TIME_SLICING, prediction=prediction(sm=0.4, util=60.0)),
    pod_request(gpus=2),
    pod_request(prediction=None),
]


def made(name, held, health, used):
    """A node of two GPUs; `held` says on which GPU each tenant is, and how busy."""
    devices = [device(0, name, health=health), device(1, name, mode=SharingMode.MPS if used else None)]
    tenants = [
        tenant(
            f"{name}-{i}", [f"GPU-{name}-{gpu}"], MODES[gpu], prediction=prediction(memory_mib=500, sm=sm, util=50.0)
        )
        for i, (gpu, sm) in enumerate(held)
    ]
    return gpu_node(name, devices, tenants)


nodes = st.builds(
    made,
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.1, 0.5])), max_size=4),
    st.sampled_from(list(DeviceHealth)),
    st.booleans(),
)
questions = st.tuples(st.integers(0, len(DEMANDS) - 1), st.lists(st.integers(0, 7), unique=True, min_size=1))


def found_by(filter_runner, snapshot, wants, rows):
    asked = Evaluation(snapshot, wants, 3, AdmissionLimits(), empty_results(0))
    return filter_runner(asked, rows)


@pytest.mark.parametrize("most", [cluster_model.MOST_STATES, 3], ids=["remembering all", "forgetting now and then"])
@settings(max_examples=50)
@given(st.lists(st.one_of(nodes, questions), max_size=25))
def test_the_answer_is_what_looking_at_each_gpu_gives(most, steps):
    known = cluster(*(gpu_node(name, 2, [tenant(f"stays-{name}", [f"GPU-{name}-0"])]) for name in NAMES))
    remembers = FilterMemo(known, most)
    for step in steps:
        if not isinstance(step, tuple):
            known.apply(step)
            continue
        wants, rows = DEMANDS[step[0]], np.array(sorted(step[1]), np.intp)
        snapshot = known.snapshot()
        for some in (rows, None):
            one, other = (found_by(filter_runner, snapshot, wants, some) for filter_runner in (remembers, filter_rows))
            for column in fields(one):
                assert getattr(one, column.name).tolist() == getattr(other, column.name).tolist(), column.name
