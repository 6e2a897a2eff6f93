"""One MPS server serves one user at a time: pods that run as another user are placed elsewhere."""

import msgspec
import pytest
from carpool_core.resources.node import Reservation
from carpool_core.values import SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.ledger import capacity_of
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


def test_refusal_tells_namespaces_from_users() -> None:
    strangers = tenant("x", ["GPU-b-0"], user=1000, namespace="other")
    known = cluster(one(1000), gpu_node("b", 1, [strangers]))
    sentences = filter_nodes(evaluate(known, pod_request(user=2000)), ["a", "b"]).refused
    assert f"1 GPU: {REFUSAL}" in sentences["a"]
    assert "1 GPU: its MPS server belongs to namespace other" in sentences["a"]


def test_gpu_is_open_again_after_the_other_user_has_left() -> None:
    known = cluster(one(1000))
    assert not evaluate(known, pod_request(user=2000)).evaluation.ok[0]
    known.apply(one())
    assert evaluate(known, pod_request(user=2000)).evaluation.ok[0]


def test_requests_of_two_users_have_two_shapes() -> None:
    """Evaluations are cached by shape."""
    shapes = {pod_request(user=user).shape for user in (None, 0, 1000)}
    assert len(shapes) == 3
    assert not pod_request(user=1).is_as(pod_request(user=2))


def test_ledger_rejects_another_user() -> None:
    node = one(1000)
    capacity = capacity_of(node, 8)
    found = ledger.reserve(node.spec, tenant("n", [GPU], user=2000), capacity)
    assert isinstance(found, ledger.Rejected)
    for user in (1000, None):
        assert not isinstance(ledger.reserve(node.spec, tenant("n", [GPU], user=user), capacity), ledger.Rejected)


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


def test_reservation_of_an_older_version_has_no_user() -> None:
    old = msgspec.to_builtins(tenant("x", [GPU]))
    assert "runAsUser" not in old
    assert msgspec.convert(old, Reservation).run_as_user is None
