"""Invalid state of a cluster, through the real server: the GPU is left out with a reason."""

import json

import aiohttp
import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, NODES, PODS
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth
from carpool_deviceplugin.gpu_processes import describe_foreign
from carpool_extender.testing import (
    device,
    gpu_node,
    node_of,
    pod_of,
    seed_job,
    seed_node,
    seed_pod,
    tenant,
    unavailable_nodes,
    until,
)
from http_world import ARGS, BIND, as_client, running
from structlog.testing import capture_logs

GPU = "GPU-a-0"
ONLY_A = ARGS.replace('["a","b"]', '["a"]')
OUTSIDER = describe_foreign([4711])


def a_node(*reservations, devices=1, **status):
    made = gpu_node("a", devices, reservations)
    return msgspec.structs.replace(made, status=msgspec.structs.replace(made.status, **status))


def seen(pod, memory_mib):
    return Tenant(pod_uid=pod, gpu_uuid=GPU, memory_mib=memory_mib)


NO_GPUS = "no node offered reports GPUs; is the node agent running there?"
INVALID = [
    pytest.param(None, NO_GPUS, id="missing"),
    pytest.param(a_node(devices=0), NO_GPUS, id="without GPUs"),
    pytest.param(
        a_node(tenant("t", [GPU]), tenants=[seen("pod-t", 700), seen("other", 9)]),
        "1 GPU: 9 MiB are used without a reservation, by pod other",
        id="memory without a reservation, with a tenant",
    ),
    pytest.param(
        a_node(devices=[device(health=DeviceHealth.UNHEALTHY, health_message=OUTSIDER)]),
        "1 node: unhealthy: process 4711 on the GPU belong to no pod: end them",
        id="memory of a process that no pod owns, as the agent reports it",
    ),
]


def a_server(node):
    """A server with that node and its tenants, a good one, and a pod that asks for a place."""
    kube = FakeKube(FakeClock())
    for one in (node, gpu_node("b")):
        if one is not None:
            seed_node(kube, one)
    for held in node.spec.reservations if node is not None else []:
        kube.seed(PODS, pod_of(held.job_name, uid=held.pod_uid, nodeName="a") | {"status": {"phase": "Running"}})
    seed_job(kube, "x")
    seed_pod(kube, "x")
    return kube


async def post(session, url, verb, body):
    async with session.post(f"{url}/{verb}", data=body, timeout=aiohttp.ClientTimeout(60)) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads(await answer.text())


async def refusals(session, url):
    """Ask about both nodes, of which the good one has to fit and be the best; return the reasons about the other."""
    found = await post(session, url, "filter", ARGS)
    assert (found["NodeNames"], found["Error"]) == (["b"], "")
    alone = await post(session, url, "filter", ONLY_A)
    assert (alone["NodeNames"], alone["Error"]) == ([], "")
    scores = {one["Host"]: one["Score"] for one in await post(session, url, "prioritize", ARGS)}
    assert (scores["a"], scores["b"]) == (0, 10)
    bound = await post(session, url, "bind", BIND)
    reasons = [one["FailedNodes"] | one["FailedAndUnresolvableNodes"] for one in (found, alone)]
    return [*(one["a"] for one in reasons), bound["Error"]]


@pytest.mark.parametrize(("node", "reason"), INVALID)
async def test_gpu_of_an_invalid_node_is_left_out_with_a_reason(certificates, node, reason):
    kube = a_server(node)
    async with running(kube, certificates) as (url, _), as_client(certificates) as session:
        *filtered, bound = await refusals(session, url)
    assert [reason in one for one in filtered] == [True, True], filtered
    assert 'gpunodes.carpool.dev "a" not found' in bound if node is None else reason in bound


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        pytest.param({"slots": 0}, "its Node offers no carpool.dev/gpu: is the node agent running there?", id="agent"),
        pytest.param({"is_ready": False}, "its Node is not ready", id="kubelet"),
        pytest.param(None, "its Node does not exist", id="Node"),
    ],
)
async def test_node_without_a_running_agent_is_left_out_until_it_runs(certificates, node, reason):
    kube = a_server(a_node())
    async with running(kube, certificates) as (url, parts), as_client(certificates) as session:
        if node is None:
            await kube.delete(NODES, "a")
        else:
            kube.seed(NODES, node_of("a", **node))
        await until(lambda: unavailable_nodes(parts.informers.cluster) == {"a"})
        for refusal in await refusals(session, url):
            assert f"NoGpuFits: 1 node: {reason}" in refusal
        kube.seed(NODES, node_of("a", slots=1))
        await until(lambda: unavailable_nodes(parts.informers.cluster) == set())
        assert (await post(session, url, "filter", ONLY_A))["NodeNames"] == ["a"]


@pytest.mark.parametrize("was_known", [True, False])
async def test_unreadable_node_is_left_out(certificates, was_known):
    kube = a_server(a_node() if was_known else None)
    odd = {"reservations": [{"podUid": 7}]}
    with capture_logs() as logs:
        if not was_known:
            kube.seed(GPU_NODES, msgspec.to_builtins(a_node()) | {"spec": odd})
        async with running(kube, certificates) as (url, parts), as_client(certificates) as session:
            if was_known:
                await kube.patch(GPU_NODES, "a", {"spec": odd})
                await until(lambda: unavailable_nodes(parts.informers.cluster) == {"a"})
            *filtered, bound = await refusals(session, url)
            if was_known:
                await kube.patch(GPU_NODES, "a", {"spec": {"reservations": []}})
                await until(lambda: unavailable_nodes(parts.informers.cluster) == set())
    reason = "GpuNode a is invalid: " if was_known else NO_GPUS
    assert [reason in one for one in filtered] == [True, True]
    assert "GET gpunodes a: unexpected object: " in bound
    assert "podUid" in bound
    assert [log["object"] for log in logs if log["event"] == "malformed object skipped"] == ["a"]
