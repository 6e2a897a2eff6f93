"""One MPS server serves one user at a time: who runs as another one is placed elsewhere, where specs say so."""

import msgspec
import pytest
from carpool_core.resources.node import Reservation
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import SharingMode
from carpool_extender.cache import ledger
from carpool_extender.cache.ledger import capacity_of
from carpool_extender.explain.explain import explain_job
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.diagnosis import explain_gpus
from carpool_extender.framework.evaluation_cache import CachedEvaluation
from carpool_extender.framework.filters import TENANCY
from carpool_extender.framework.scores import SchedulerConfig, find_policy
from carpool_extender.framework.selection import filter_nodes
from carpool_extender.testing import cluster, gpu_node, pod_request, seed_job, seed_node, seed_pod, tenant
from extender_world import World, args, background, filtering, named

GPU = "GPU-a-0"
RULES = SchedulerConfig(find_policy("least-slowdown"), slots=8)
TURNS = SharingMode.TIME_SLICING
SAID = "its MPS server serves user 1000, and the job runs as user 2000"


def one(*users: int | None, mode: SharingMode = SharingMode.MPS, **more):
    """A node whose only GPU has a tenant of each of these users."""
    return gpu_node("a", 1, [tenant(f"t{i}", [GPU], mode, user=user, **more) for i, user in enumerate(users)])


@pytest.mark.parametrize(
    ("there", "user", "fits"),
    [
        pytest.param(one(), 2000, True, id="nobody"),
        pytest.param(one(2000), 2000, True, id="the-same"),
        pytest.param(one(1000), 2000, False, id="another"),
        pytest.param(one(0), 2000, False, id="root-is-one-too"),
        pytest.param(one(None), 2000, True, id="unknown-there"),
        pytest.param(one(1000), None, True, id="unknown-here"),
        pytest.param(one(None, 1000), 2000, False, id="one-of-them-says"),
        pytest.param(one(2000, 1000), 2000, False, id="several-there"),
        pytest.param(one(1000, mode=TURNS), 2000, True, id="turns-need-no-server"),
    ],
)
def test_who_may_join(there, user: int | None, fits: bool) -> None:
    evaluation = CachedEvaluation(pod_request(user=user), RULES, cluster(there).snapshot()).evaluation
    assert bool(evaluation.ok[0]) is fits
    if not fits:
        assert evaluation.results.failed[0] == TENANCY.number


def test_the_sentences_name_the_users() -> None:
    known, newcomer = cluster(one(1000)), pod_request(user=2000)
    (answer,) = explain_gpus(CachedEvaluation(newcomer, RULES, known.snapshot()), ["a"])
    assert answer.text == SAID
    (sentence,) = filter_nodes(CachedEvaluation(newcomer, RULES, known.snapshot()), ["a"]).refused.values()
    assert sentence == f"NoGpuFits: 1 GPU: {SAID}"
    (answer,) = explain_gpus(CachedEvaluation(newcomer, RULES, cluster(one(0, 1000)).snapshot()), ["a"])
    assert answer.text == "its MPS server serves several users, and the job runs as user 2000"


def test_another_namespace_is_told_apart_from_another_user() -> None:
    strangers = tenant("x", ["GPU-b-0"], user=1000, namespace="other")
    known = cluster(one(1000), gpu_node("b", 1, [strangers]))
    sentences = filter_nodes(CachedEvaluation(pod_request(user=2000), RULES, known.snapshot()), ["a", "b"]).refused
    assert f"1 GPU: {SAID}" in sentences["a"]
    assert "1 GPU: its MPS server belongs to namespace other" in sentences["a"]


def test_a_gpu_is_open_again_when_the_other_user_has_left() -> None:
    known = cluster(one(1000))
    assert not CachedEvaluation(pod_request(user=2000), RULES, known.snapshot()).evaluation.ok[0]
    known.apply(one())
    assert CachedEvaluation(pod_request(user=2000), RULES, known.snapshot()).evaluation.ok[0]


def test_demands_of_two_users_are_two_demands() -> None:
    """What was found for one was taken for the other's otherwise: assessments are kept by shape."""
    shapes = {pod_request(user=user).shape for user in (None, 0, 1000)}
    assert len(shapes) == 3
    assert not pod_request(user=1).is_as(pod_request(user=2))


def test_the_ledger_takes_no_other_user_whatever_the_decision_saw() -> None:
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
        assert named(await parts.service.filter(filtering("z"))) == ["a", "b"], "nobody knows its user"


async def test_explain_reads_the_user_out_of_the_jobs_template() -> None:
    kube, clock = FakeKube(), FakeClock()
    seed_node(kube, one(1000))
    template = {"spec": {"containers": [{"name": "train", "securityContext": {"runAsUser": 2000}}]}}
    seed_job(kube, "new", spec={"template": template})
    answer = await explain_job(kube, "new", "default", RULES, Options(clock))
    assert any(SAID in line for line in answer.lines), answer.lines


def test_reservations_of_before_say_nothing_of_users() -> None:
    old = msgspec.to_builtins(tenant("x", [GPU]))
    assert "runAsUser" not in old
    assert msgspec.convert(old, Reservation).run_as_user is None
