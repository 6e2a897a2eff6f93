"""Namespaces of one tenancy group share GPUs and MPS servers as one namespace does."""

import pytest
from carpool_core.settings import SettingsError
from carpool_core.values import SharingMode
from carpool_extender.settings import parse_tenancy_groups
from carpool_extender.testing import gpu_node, seed_job, seed_node, seed_pod, tenant
from carpool_extender.workloads import JobOptions
from extender_world import World, args, background, filtering, named


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        pytest.param("", {"vision": "", "other": ""}, id="no groups"),
        pytest.param("research=vision,speech", {"vision": "research", "speech": "research", "other": ""}, id="one"),
        pytest.param("a=vision;b=speech;a=other", {"vision": "a", "speech": "b", "other": "a"}, id="in several parts"),
        pytest.param("others=*;research=vision", {"vision": "research", "other": "others"}, id="all others"),
    ],
)
def test_each_namespace_has_one_group_or_none(text: str, groups: dict[str, str]) -> None:
    options = JobOptions(tenancy_groups=parse_tenancy_groups(text))
    assert {namespace: options.tenancy_group(namespace) for namespace in groups} == groups


FORM = "expected GROUP=NAMESPACE,NAMESPACE, found "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("vision,speech", f"{FORM}'vision,speech'", id="no group"),
        pytest.param("=vision", f"{FORM}'=vision'", id="empty group"),
        pytest.param("research=", f"{FORM}'research='", id="no namespace"),
        pytest.param("research=vision,,speech", f"{FORM}'research=vision,,speech'", id="empty namespace"),
        pytest.param("research=Vision", f"{FORM}'research=Vision'", id="no name of a namespace"),
        pytest.param("research=vision, speech", f"{FORM}'research=vision, speech'", id="space"),
        pytest.param(f"{'g' * 64}=vision", f"{FORM}'{'g' * 64}=vision'", id="group longer than a reservation holds"),
        pytest.param(
            "a=vision;b=vision", "expected one group for namespace vision, found a and b", id="namespace in two groups"
        ),
        pytest.param("a=*;b=*", r"expected one group for namespace \*, found a and b", id="all others in two groups"),
    ],
)
def test_text_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"CARPOOL_TENANCY_GROUPS: {message}"):
        parse_tenancy_groups(text)


@pytest.mark.parametrize(
    ("groups", "offered"),
    [
        pytest.param("research=default,other", ["a"], id="of one group"),
        pytest.param("research=other;mine=default", [], id="of two groups"),
        pytest.param("", [], id="without groups"),
    ],
)
async def test_job_joins_the_mps_server_of_its_group(groups: str, offered: list[str]) -> None:
    world = World(tenancy_groups=groups)
    group = parse_tenancy_groups(groups).get("other", "")
    there = tenant("t", ["GPU-a-0"], SharingMode.MPS, namespace="other", tenancy_group=group)
    seed_node(world.kube, gpu_node("a", 1, [there]))
    seed_job(world.kube, "x")
    seed_pod(world.kube, "x")
    async with world.extender() as parts:
        assert named(await parts.service.filter(filtering(names=["a"]))) == offered
        if offered:
            async with background(world.agent.serve("a")):
                await parts.service.bind(args())
            (mine,) = (found for found in world.reservations("a") if found["podUid"] == "pod-x")
            assert (mine["mode"], mine["tenancyGroup"]) == ("MPS", "research")
