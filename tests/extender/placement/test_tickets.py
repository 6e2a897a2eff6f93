"""What a job that waits is sorted by."""

import msgspec
import pytest
from carpool_core.resources.prediction import Interval
from carpool_extender.cache.pod_request import PodRequest
from carpool_extender.queue.order import QueueOrder, length_in, rung_in
from carpool_extender.testing import A100, T4, cluster, demand, device, gpu_node, prediction


def lasting(**step_s):
    """A prediction of so many seconds a step on each product."""
    known = prediction(products=tuple(step_s))
    products = [
        msgspec.structs.replace(of, step_time_seconds=Interval(median=step_s[of.product], lower=0, upper=9))
        for of in known.products
    ]
    return msgspec.structs.replace(known, products=products)


def test_gpus_that_are_gone_say_nothing_of_how_long_a_job_takes():
    """Regression: they counted on until the extender was started anew, and explain told another place in the queue."""
    slow = gpu_node("slow", [device(0, "slow", product=T4)])
    both = cluster(gpu_node("fast", 1), slow)
    job = PodRequest(demand("new", prediction=lasting(**{A100: 0.1, T4: 1.0})), steps=36_000)
    at_first = length_in(job, both.snapshot())
    both.remove("fast")
    assert length_in(job, both.snapshot()) == length_in(job, cluster(slow).snapshot()) == pytest.approx(36_000)
    assert at_first < 36_000
    assert rung_in(job, both.snapshot(), QueueOrder.LONGEST_FIRST) == rung_in(
        job, cluster(slow).snapshot(), QueueOrder.LONGEST_FIRST
    )
