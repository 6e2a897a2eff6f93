"""GpuNodes of which the API server keeps who wrote which field: it is asked not to, once for each."""

import pytest
from carpool_core.kube.api import GPU_NODES
from carpool_core.kube.errors import Forbidden, Overloaded
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.cache.cluster import ClusterCache
from carpool_extender.informers import Informers
from carpool_extender.reservations.writer import Untracker
from carpool_extender.testing import gpu_node, until
from extender_world import background

AGENT = {"manager": "carpool", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}}


class Server:
    """A server with two nodes, of which it tracks one, and what looks after them."""

    def __init__(self):
        self.clock = FakeClock()
        self.kube = FakeKube(self.clock)
        self.informers = Informers(self.kube, self.clock, ClusterCache(8))
        self.untracker = Untracker(self.kube, self.informers)
        self.kube.seed(GPU_NODES, gpu_node("b"))
        self.track("a")

    def track(self, name):
        self.kube.seed(GPU_NODES, {"metadata": {"name": name, "uid": f"uid-of-{name}", "managedFields": [AGENT]}})

    def fields(self, name):
        return self.kube.dump(GPU_NODES, name)["metadata"].get("managedFields")

    def asked(self):
        return [call.name for call in self.kube.calls if call.verb == "patch"]


@pytest.fixture
def server():
    return Server()


async def test_what_is_tracked_is_cleared_once_and_what_comes_later_too(server):
    async with background(server.informers.run()), background(server.untracker.run()):
        await until(lambda: server.fields("a") is None)
        server.track("c")
        await until(lambda: server.fields("c") is None)
        await until(lambda: not server.informers.tracked)
    assert server.asked() == ["a", "c"]


async def test_a_node_that_somebody_applied_is_cleared_again(server):
    """Regression: what had been asked for once was forgotten only with the next word of another tracked node."""
    async with background(server.informers.run()), background(server.untracker.run()):
        for times in (1, 2, 3):
            await until(lambda: server.fields("a") is None and not server.informers.tracked)
            await until(lambda: not server.informers.heard_of_tracked.is_set())
            assert server.asked() == ["a"] * times
            server.track("a")
            await until(lambda: server.informers.tracked)


async def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(server):
    async with background(server.informers.run()):
        await server.informers.wait_synced()
        for error in (Overloaded("busy"), Forbidden("no")):
            server.kube.fail_next("patch", GPU_NODES, error)
        for _ in range(4):
            await server.untracker.sweep()
        assert server.asked() == ["a", "a"]
        server.kube.lose(GPU_NODES, "a")
        server.kube.end_watches()
    assert server.informers.tracked == {"a": "uid-of-a"}


async def test_another_node_of_that_name_is_left_alone(server):
    async with background(server.informers.run()):
        await server.informers.wait_synced()
        server.kube.seed(GPU_NODES, {"metadata": {"name": "a", "uid": "another", "managedFields": [AGENT]}})
        server.informers.tracked["a"] = "uid-of-a"
        await server.untracker.sweep()
    assert server.fields("a") == [AGENT]
