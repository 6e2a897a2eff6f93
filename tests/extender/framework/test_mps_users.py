"""One MPS server serves one user at a time: pods that run as another user are placed elsewhere."""

import pytest
from carpool_core.values import SharingMode
from carpool_extender.framework.diagnosis import explain_gpus
from carpool_extender.framework.filters import TENANCY
from carpool_extender.framework.selection import filter_nodes
from carpool_extender.testing import cluster, gpu_node, pod_request, seed_job, seed_pod, tenant
from evaluations import evaluate
from extender_world import World, args, background, filtering, named

GPU = "GPU-a-0"
TURNS = SharingMode.TIME_SLICING
REFUSAL = "its MPS server serves user 1000, and the job runs as user 2000"


def one(*users: int | None, mode: SharingMode = SharingMode.MPS, **more):
    """A node whose only GPU has a tenant of each of these users."""
    return gpu_node("a", 1, [tenant(f"t{i}", [GPU], mode, user=user, **more) for i, user in enumerate(users)])


@pytest.mark.parametrize(
    ("there", "user", "fits"),
    [
        pytest.param(one(), 2000, True, id="idle"),
        pytest.param(one(2000), 2000, True, id="the-same"),
        pytest.param(one(1000), 2000, False, id="another"),
        pytest.param(one(0), 2000, False, id="root"),
        pytest.param(one(None), 2000, True, id="unknown-there"),
        pytest.param(one(1000), None, True, id="unknown-here"),
        pytest.param(one(None, 1000), 2000, False, id="known-for-one-of-two"),
        pytest.param(one(2000, 1000), 2000, False, id="several-there"),
        pytest.param(one(1000, mode=TURNS), 2000, True, id="time-slicing-has-no-server"),
    ],
)
def test_only_pods_of_the_same_user_join_an_mps_server(there, user: int | None, fits: bool) -> None:
    evaluation = evaluate(there, pod_request(user=user)).evaluation
    assert bool(evaluation.ok[0]) is fits
    if not fits:
        assert evaluation.results.failed[0] == TENANCY.number


def test_refusal_names_the_users() -> None:
    known, newcomer = cluster(one(1000)), pod_request(user=2000)
    (answer,) = explain_gpus(evaluate(known, newcomer).evaluation, ["a"])
    assert answer.text == REFUSAL
    (sentence,) = filter_nodes(evaluate(known, newcomer), ["a"]).refused.values()
    assert sentence == f"NoGpuFits: 1 GPU: {REFUSAL}"
    (answer,) = explain_gpus(evaluate(one(0, 1000), newcomer).evaluation, ["a"])
    assert answer.text == "its MPS server serves several users, and the job runs as user 2000"


async def test_pods_of_two_users_get_two_gpus_and_a_third_user_waits() -> None:
    world = World()
    world.add(nodes=["a", "b"])
    users = {"x": {"securityContext": {"runAsUser": 1000}}, "y": {"securityContext": {"runAsUser": 2000}}, "z": {}}
    for job, spec in users.items():
        seed_job(world.kube, job)
        seed_pod(world.kube, job, **spec)
    async with world.extender() as parts:
        for job, node in (("x", "a"), ("y", "b")):
            assert node in named(await parts.service.filter(filtering(job, **users[job])))
            async with background(world.agent.serve(node)):
                await parts.service.bind(args(job, node))
        assert [world.bound_to(job) for job in "xy"] == ["a", "b"]
        assert [world.reservations(node)[0]["runAsUser"] for node in "ab"] == [1000, 2000]
        third = await parts.service.filter(filtering("z", securityContext={"runAsUser": 3000}))
        assert named(third) == []
        assert named(await parts.service.filter(filtering("z"))) == ["a", "b"], "its user is unknown"
