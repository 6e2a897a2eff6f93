"""How fast a job would train where it would go, or does where it has its place."""

import re

import msgspec
import pytest
from asking_world import OPTIONS, RULES, explain_job, job_of, what_if
from carpool_core.testing.kube import FakeKube
from carpool_core.values import JobUid, SharingMode
from carpool_extender.explain.dry_run import step_time_at
from carpool_extender.testing import A100, T4, demand, device, gpu_node, prediction, seed_job, seed_node, tenant

L4 = "NVIDIA L4"
STEPS_S = {A100: 0.041, T4: 0.7}


def unlike():
    """A prediction of which the products differ."""
    found = prediction()
    products = [
        msgspec.structs.replace(p, step_time_seconds=msgspec.structs.replace(p.step_time_seconds, median=step_s))
        for p in found.products
        for step_s in [STEPS_S[p.product]]
    ]
    return msgspec.structs.replace(found, products=products)


async def known(wanted, products):
    return msgspec.structs.replace(wanted, status=msgspec.structs.replace(wanted.status, prediction=unlike()))


def slowed(product, slowdown, mode=SharingMode.MPS):
    """What is told of 35,000 steps on a GPU of a product, at a slowdown; another GPU of the node is a T4."""
    place = msgspec.structs.replace(tenant("x", ["GPU-a-0"], mode), expected_slowdown=slowdown)
    return step_time_at(demand(prediction=unlike()), place, [device(0, product=product), device(1, product=T4)], 35_000)


@pytest.mark.parametrize(
    ("product", "slowdown", "said"),
    [
        pytest.param(A100, 1.0, " (a step takes about 41 ms there, 35,000 steps 24 min)", id="alone"),
        pytest.param(A100, 1.5, " (a step takes about 62 ms there, 35,000 steps 36 min)", id="slowed by another"),
        pytest.param(T4, 1.0, " (a step takes about 700 ms there, 35,000 steps 6.8 h)", id="another product"),
        pytest.param(L4, 1.0, "", id="nothing was predicted of this product"),
    ],
)
def test_step_time_is_that_of_the_product_by_the_slowdown(product, slowdown, said):
    assert slowed(product, slowdown) == said


def test_nothing_is_said_of_a_part_of_a_gpu():
    """What is predicted is how long a step takes on the whole one."""
    assert slowed(A100, 1.0, SharingMode.MIG) == ""


def test_of_unlike_gpus_the_slowest_counts():
    place = tenant("x", ["GPU-a-0", "GPU-a-1"])
    told = [step_time_at(demand(prediction=unlike()), place, [device(0), device(1, product=p)], None) for p in (T4, L4)]
    assert told == [" (a step takes about 700 ms there)", ""]


@pytest.mark.parametrize(
    ("training", "all_steps"),
    [({"steps": 35_000}, ", 35,000 steps 24 min"), ({"steps": 1}, ", 1 step 41 ms"), ({}, "")],
    ids=["many steps", "one", "nobody said how many"],
)
async def test_what_if_tells_how_fast(training, all_steps):
    kube = FakeKube()
    seed_node(kube, gpu_node("a", 1))
    told = (await what_if(kube, job_of({"training": training}), RULES, known, OPTIONS)).lines
    assert told[1].startswith(f"would go to a (a step takes about 41 ms there{all_steps}): least-slowdown: ")


async def test_what_if_counts_with_the_neighbour():
    kube = FakeKube()
    busy = tenant("y", ["GPU-a-0"])
    profile = msgspec.structs.replace(
        busy.tenant, gpu_util_percent=90.0, sm_active_ratio=0.9, dram_active_ratio=0.9, max_slowdown=9.0
    )
    seed_node(kube, gpu_node("a", 1, [msgspec.structs.replace(busy, tenant=profile)]))
    wanted = job_of({"training": {"steps": 1000}, "sharing": {"maxSlowdown": 9.0}})
    line = (await what_if(kube, wanted, RULES, known, OPTIONS)).lines[1]
    found = re.search(r"about (\d+) ms there, 1,000 steps (\d+) s\).*expected slowdown ([0-9.]+) of 9.00", line)
    assert found is not None, line
    step_ms, all_s, slowdown = map(float, found.groups())
    assert slowdown > 1.1
    assert step_ms == pytest.approx(41 * slowdown, abs=1)
    assert all_s == pytest.approx(41 * slowdown, abs=1)


async def test_explain_tells_how_fast_a_placed_job_is():
    kube = FakeKube()
    uid = JobUid(seed_job(kube, "x", spec={"training": {"steps": 3600}}))
    mine = msgspec.structs.replace(
        tenant("x", ["GPU-a-0"]), job_uid=uid, expected_slowdown=1.5, reason="least-slowdown: beside y"
    )
    seed_node(kube, gpu_node("a", 1, [mine]))
    told = (await explain_job(kube, "x", "default", RULES, OPTIONS)).lines
    assert told[0] == (
        "x has a place on a (a step takes about 150 ms there, 3,600 steps 9 min): least-slowdown: beside y"
    )
