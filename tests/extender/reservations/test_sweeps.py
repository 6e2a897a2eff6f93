"""Sweeps look at what has changed, and miss nothing."""

from datetime import timedelta

import pytest
from carpool_core.clock import rfc3339
from carpool_core.keys import ANNOTATION_CAPACITY_FREED
from carpool_core.kube.api import GPU_NODES, NODES, PODS
from carpool_core.kube.errors import Overloaded
from carpool_core.testing.clock import FakeClock
from carpool_extender.informers import Informers
from carpool_extender.reservations.gc import EVERYTHING_EVERY, UNCONFIRMED_S
from carpool_extender.testing import gpu_node, seed_node, seed_pod, tenant, until
from janitor_world import Clean

POD = "x-worker-0-1"
LONG_AGO = rfc3339(FakeClock().now() - timedelta(seconds=UNCONFIRMED_S + 1))


class Counting(Informers):
    """Counts how often somebody asks for a pod."""

    asked = 0

    def pod(self, uid):
        self.asked += 1
        return super().pod(uid)


async def swept_twice(clean):
    """Sweep all, then what has changed since: nothing has."""
    seed_node(clean.kube, gpu_node("a", 1, [tenant("x", ["GPU-a-0"]), tenant("y", ["GPU-a-0"])]))
    for job in "xy":
        seed_pod(clean.kube, job, nodeName="a")
    await until(lambda: {"pod-x", "pod-y"} <= {pod.metadata.uid for pod in clean.informers.pods()})
    await until(lambda: clean.informers.cluster.nodes_holding("pod-y") == ["a"])
    await clean.finish(clean.gc.sweep())
    await clean.finish(clean.gc.sweep())
    assert not clean.writes


async def test_a_sweep_asks_nothing_about_what_is_certain():
    """Regression: each sweep asked about each of 30,000 tenants twice, a thirtieth of the extender's processor time."""
    clean = Clean(informers=Counting)
    async with clean.watching():
        await swept_twice(clean)
        clean.informers.asked = 0
        await clean.finish(clean.gc.sweep())
        assert clean.informers.asked == 0
        for _ in range(EVERYTHING_EVERY):
            await clean.finish(clean.gc.sweep())
        assert clean.informers.asked > 0


async def goes(kube):
    await kube.delete(PODS, POD, namespace="default")


async def gives_its_name_to_another(kube):
    await goes(kube)
    seed_pod(kube, "x", uid="another")


async def ends(kube):
    await kube.patch(PODS, POD, {"status": {"phase": "Failed"}}, namespace="default", subresource="status")


async def is_given_up_by_its_node(kube):
    pod = kube.dump(PODS, POD, "default")
    kube.seed(PODS, pod | {"metadata": pod["metadata"] | {"deletionTimestamp": LONG_AGO}})


@pytest.mark.parametrize("happens", [goes, gives_its_name_to_another, ends, is_given_up_by_its_node])
async def test_a_sweep_releases_what_has_ended_since_it_was_certain(happens):
    clean = Clean()
    async with clean.watching():
        await swept_twice(clean)
        was = clean.informers.pod("pod-x")
        await happens(clean.kube)
        await until(lambda: clean.informers.pod("pod-x") is not was)
        await clean.finish(clean.gc.sweep())
    assert [r["podUid"] for r in clean.kube.dump(GPU_NODES, "a")["spec"]["reservations"]] == ["pod-y"]


async def test_a_sweep_restores_what_has_vanished_since_it_was_certain():
    clean = Clean()
    async with clean.watching():
        await swept_twice(clean)
        await clean.kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
        await until(lambda: clean.informers.cluster.nodes_holding("pod-x") == [])
        await clean.finish(clean.gc.sweep())
    assert len(clean.kube.dump(GPU_NODES, "a")["spec"]["reservations"]) == 2


async def test_a_pod_without_a_reservation_is_looked_at_until_its_node_reports_gpus():
    clean = Clean()
    async with clean.watching():
        await swept_twice(clean)
        lost = clean.kube.dump(GPU_NODES, "a")
        await clean.kube.delete(GPU_NODES, "a")
        await until(lambda: clean.informers.cluster.node("a") is None)
        await clean.finish(clean.gc.sweep())
        await clean.finish(clean.gc.sweep())
        lost["spec"]["reservations"] = []
        lost["metadata"] = {"name": "a", "uid": "another"}
        clean.kube.seed(GPU_NODES, lost)
        await until(lambda: clean.informers.cluster.node("a") is not None)
        await clean.finish(clean.gc.sweep())
    assert len(clean.kube.dump(GPU_NODES, "a")["spec"]["reservations"]) == 2


async def test_a_node_that_could_not_be_touched_is_touched_by_the_next_sweep():
    clean = Clean()
    async with clean.watching():
        await swept_twice(clean)
        clean.kube.calls.clear()
        clean.kube.fail_next("patch", NODES, Overloaded("busy"))
        freed = {"metadata": {"annotations": {ANNOTATION_CAPACITY_FREED: rfc3339(clean.clock.now())}}}
        await clean.kube.patch(GPU_NODES, "a", freed)
        await until(lambda: clean.informers.cluster.node("a").metadata.annotations)
        for _ in range(3):
            await clean.finish(clean.gc.sweep())
    assert len([call for call in clean.kube.calls if call.verb == "patch" and call.plural == NODES.plural]) == 2
