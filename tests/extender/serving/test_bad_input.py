"""Everything of a cluster that can be wrong, through the real server: that GPU is left out, and it is said why.

What the process is told itself is looked at in `test_settings`, requests in `test_http`; of what the simulator reads
here is what a command line shows, and each column and field in `test_traces`.
"""

import json

import aiohttp
import msgspec
import pytest
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, PODS
from carpool_core.resources.node import Tenant
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_core.values import DeviceHealth, SharingMode
from carpool_deviceplugin.gpu_processes import describe_foreign
from carpool_extender.cache.cluster import SILENCE_S
from carpool_extender.settings import ConditionSettings
from carpool_extender.testing import (
    device,
    gpu_node,
    pod_of,
    seed_job,
    seed_node,
    seed_pod,
    tenant,
    unavailable_nodes,
    until,
)
from carpool_simulator.commands import simulate
from click.testing import CliRunner
from extender_world import hold_lease
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


def alone(mode):
    return [tenant(name, [GPU], mode) for name in "tu"]


NO_GPUS = "no node offered reports GPUs; is the node agent running there?"
NODES = [
    pytest.param(None, NO_GPUS, id="missing"),
    pytest.param(a_node(devices=0), NO_GPUS, id="without GPUs"),
    pytest.param(
        a_node(tenants=[seen("nobodys", 700)]),
        "1 node: 700 MiB are used without a reservation, by pod nobodys",
        id="a tenant that no pod owns",
    ),
    pytest.param(
        a_node(tenants=[seen(f"nobodys-{i:02}", 700) for i in range(40)]),
        "1 node: 28,000 MiB are used without a reservation, by pods nobodys-00, nobodys-01, nobodys-02 and 37 more",
        id="more tenants that no pod owns than anybody reads",
    ),
    pytest.param(
        a_node(devices=[device(health=DeviceHealth.UNHEALTHY, health_message="Xid 79, " * 300)]),
        f"1 node: unhealthy: {'Xid 79, ' * 14}Xid 79,…",
        id="more that ails a GPU than anybody reads",
    ),
    pytest.param(
        a_node(tenant("t", [GPU]), tenants=[seen("pod-t", 700), seen("other", 9)]),
        "1 GPU: 9 MiB are used without a reservation, by pod other",
        id="memory that nobody reserved, beside a tenant",
    ),
    pytest.param(
        a_node(devices=[device(health=DeviceHealth.UNHEALTHY, health_message=OUTSIDER)]),
        "1 node: unhealthy: process 4711 on the GPU belong to no pod: end them",
        id="memory of a process that no pod owns, as the agent tells it",
    ),
    pytest.param(
        a_node(tenant("t", [GPU]), tenant("u", [GPU], SharingMode.TIME_SLICING)),
        "1 GPU: its reservations contradict each other: MPS, TimeSlicing",
        id="two modes at once",
    ),
    pytest.param(
        a_node(*alone(SharingMode.EXCLUSIVE)),
        "1 GPU: its reservations contradict each other: 2 are exclusive",
        id="alone twice",
    ),
    pytest.param(
        a_node(devices=[device(0), device(1, uuid=GPU)]),
        "1 node: its node reports several GPUs with UUID GPU-a-0",
        id="two GPUs of one UUID",
    ),
    pytest.param(
        a_node(tenant("t", [GPU], memory_limit_mib=30000), tenant("u", [GPU], memory_limit_mib=30000)),
        "needs 4,000 MiB; freest NVIDIA A100-SXM4-40GB has 0 MiB free",
        id="more promised than there is",
    ),
    pytest.param(
        a_node(devices=[device(memory_mib=900, reserved_mib=5000)]),
        "needs 4,000 MiB; freest NVIDIA A100-SXM4-40GB has 0 MiB total",
        id="more kept than there is",
    ),
    pytest.param(
        a_node(devices=[device(0, modes=[])]),
        "1 node: its agent can prepare no sharing mode for this job",
        id="no mode",
    ),
]


def a_server(node, *, are_there=True):
    """A server with that node and its tenants, a good one, and a pod that asks for a place."""
    kube = FakeKube(FakeClock())
    for one in (node, gpu_node("b")):
        if one is not None:
            seed_node(kube, one)
    for held in node.spec.reservations if node is not None and are_there else []:
        kube.seed(PODS, pod_of(held.job_name, uid=held.pod_uid, nodeName="a") | {"status": {"phase": "Running"}})
    seed_job(kube, "x")
    seed_pod(kube, "x")
    return kube


async def post(session, url, verb, body):
    async with session.post(f"{url}/{verb}", data=body, timeout=aiohttp.ClientTimeout(10)) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads(await answer.text())


async def refusals(session, url):
    """Ask about both nodes, of which the good one has to fit and be the best; return what is said of the other."""
    found = await post(session, url, "filter", ARGS)
    assert (found["NodeNames"], found["Error"]) == (["b"], "")
    alone = await post(session, url, "filter", ONLY_A)
    assert (alone["NodeNames"], alone["Error"]) == ([], "")
    scores = {one["Host"]: one["Score"] for one in await post(session, url, "prioritize", ARGS)}
    assert (scores["a"], scores["b"]) == (0, 10)
    bound = await post(session, url, "bind", BIND)
    told = [one["FailedNodes"] | one["FailedAndUnresolvableNodes"] for one in (found, alone)]
    return [*(one["a"] for one in told), bound["Error"]]


@pytest.mark.parametrize(("node", "words"), NODES)
async def test_that_gpu_is_left_out_and_it_is_said_why(certificates, node, words):
    kube = a_server(node)
    async with running(kube, certificates) as (url, _), as_client(certificates) as session:
        *filtered, bound = await refusals(session, url)
    assert [words in one for one in filtered] == [True, True], filtered
    assert 'gpunodes.carpool.dev "a" not found' in bound if node is None else words in bound


@pytest.mark.parametrize("heartbeat", ["2026-01-31T12:00:00Z", "2036-01-31T12:00:00Z", "soon", None])
async def test_whose_agent_has_not_reported_for_a_minute_is_left_out_until_it_does(certificates, heartbeat):
    kube, clock = a_server(a_node(heartbeat_time=heartbeat)), FakeClock()

    async def beat(node):
        patch = {"status": {"heartbeatTime": clock.now().isoformat()}}
        await kube.patch(GPU_NODES, node, patch, subresource="status")
        await until(lambda: node not in unavailable_nodes(parts.informers.cluster))

    async with running(kube, certificates, clock=clock) as (url, parts), as_client(certificates) as session:
        clock.advance(SILENCE_S)
        assert (await post(session, url, "filter", ONLY_A))["NodeNames"] == ["a"]
        clock.advance(1)
        await beat("b")
        for told in await refusals(session, url):
            assert "NoGpuFits: 1 node: its agent has not reported for more than 60 s" in told
        await beat("a")
        assert (await post(session, url, "filter", ONLY_A))["NodeNames"] == ["a"]


@pytest.mark.parametrize("was_known", [True, False])
async def test_a_node_that_nobody_can_read_is_left_out(certificates, was_known):
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
    told = "GpuNode a is invalid: " if was_known else NO_GPUS
    assert [told in one for one in filtered] == [True, True]
    assert "GET gpunodes a: unexpected object: " in bound
    assert "podUid" in bound
    assert [log["object"] for log in logs if log["event"] == "malformed object skipped"] == ["a"]


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_gpu_that_two_nodes_tell_of_is_left_out_until_one_of_them_is_right(certificates, is_deleted):
    """Regression: both nodes offered it, though on one of them somebody has it alone."""
    kube = a_server(a_node())
    seed_node(kube, gpu_node("c", [device(0, uuid=GPU)], [tenant("t", [GPU], SharingMode.EXCLUSIVE)]))
    kube.seed(PODS, pod_of("t", uid="pod-t", nodeName="c") | {"status": {"phase": "Running"}})
    async with running(kube, certificates) as (url, parts), as_client(certificates) as session:
        for told in await refusals(session, url):
            assert "1 node: several nodes report a GPU with UUID GPU-a-0: a and c" in told
        if is_deleted:
            await kube.delete(GPU_NODES, "c")
        else:
            devices = msgspec.to_builtins([device(0, "c")])
            await kube.patch(GPU_NODES, "c", {"status": {"devices": devices}}, subresource="status")
        await until(lambda: not unavailable_nodes(parts.informers.cluster))
        assert (await post(session, url, "filter", ONLY_A))["NodeNames"] == ["a"]


async def test_a_reservation_of_a_pod_that_is_gone_is_given_back(certificates):
    lost = msgspec.structs.replace(tenant("t", [GPU], SharingMode.EXCLUSIVE), deadline="2026-01-31T11:00:00Z")
    kube = a_server(a_node(lost), are_there=False)
    hold_lease(kube, "here_1")
    async with running(kube, certificates) as (url, parts), as_client(certificates) as session:
        await until(lambda: not parts.informers.cluster.node("a").spec.reservations)
        assert (await post(session, url, "filter", ONLY_A))["NodeNames"] == ["a"]


@pytest.mark.parametrize(
    ("annotation", "settings", "words"),
    [
        pytest.param(
            "fast", {"job_policies": True}, "UnknownPolicy: job default/x: policy 'fast' is unknown", id="unknown"
        ),
        pytest.param("energy", {}, "PolicyNotAllowed: job default/x has the annotation", id="not allowed"),
        pytest.param(
            None,
            {"conditions": ConditionSettings(min_free_mib=10**6)},
            ": free memory 40,960 MiB, the site's limit is 1,000,000 MiB",
            id="a precondition that no GPU meets",
        ),
    ],
)
async def test_a_policy_that_makes_no_sense_places_nobody_and_it_is_said_why(certificates, annotation, settings, words):
    kube = a_server(a_node())
    if annotation is not None:
        patch = {"metadata": {"annotations": {"carpool.dev/policy": annotation}}}
        await kube.patch(GPU_TRAINING_JOBS, "x", patch, namespace="default")
    async with running(kube, certificates, **settings) as (url, _), as_client(certificates) as session:
        found = await post(session, url, "filter", ARGS)
        assert (found["NodeNames"], found["Error"]) == ([], "")
        told = found["FailedNodes"] | found["FailedAndUnresolvableNodes"]
        assert [words in told[name] for name in "ab"] == [True, True], told
        assert words in (await post(session, url, "bind", BIND))["Error"]


TRACE = "timestamp,duration,num_gpus\n2017-10-09 07:00:10,60,1\n2017-10-09 07:00:00,30,1\n"
CLUSTER = "nodes: [{product: Tesla T4, gpus: 2}]"


@pytest.mark.parametrize(
    ("trace", "cluster", "words"),
    [
        pytest.param("timestamp,num_gpus\n", CLUSTER, "found timestamp, num_gpus; add duration", id="missing column"),
        pytest.param(TRACE.replace("30", "-30"), CLUSTER, "line 3: expected a duration from 0 to", id="negative"),
        pytest.param(TRACE.replace("07:00:10", "seven"), CLUSTER, "line 2: expected a time", id="no time"),
        pytest.param(
            TRACE, CLUSTER.replace("Tesla T4", "Voodoo"), "'Voodoo' is unknown; known products: ", id="product"
        ),
        pytest.param(TRACE, "nodes: [", "expected YAML in UTF-8, found", id="no YAML"),
        pytest.param(TRACE, CLUSTER, None, id="unsorted times are sorted"),
    ],
)
def test_a_trace_or_a_cluster_that_makes_no_sense_is_told_at_the_command_line(data, trace, cluster, words):
    (data / "t.csv").write_text(trace)
    (data / "c.yaml").write_text(cluster)
    files = ["--trace", str(data / "t.csv"), "--cluster", str(data / "c.yaml"), "--policy", "exclusive"]
    result = CliRunner().invoke(simulate, [*files, "--data", str(data), "--out", str(data / "out"), "--no-pictures"])
    told = " ".join(result.output.split())
    assert isinstance(result.exception, SystemExit) or words is None
    assert result.exit_code == (0 if words is None else 2), told
    assert (words or "1 line came after a later one; all were sorted.") in told
