"""The wire: kube-scheduler's literal JSON over mutual TLS, and every request that makes no sense."""

import asyncio
import io
import json
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import Unreachable
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_e2e.certificates import make
from carpool_extender.app import build
from carpool_extender.server import Gathering, create_server
from carpool_extender.settings import ExtenderSettings, TlsSettings
from carpool_extender.testing import FakeAgent, gpu_node, pod_of, seed_job, seed_node, seed_pod, tenant, until
from prometheus_client import generate_latest

POD = """{"metadata":{"name":"x-worker-0-1","namespace":"default","uid":"pod-x","resourceVersion":"812","generation":1,
"creationTimestamp":"2026-01-31T12:00:00Z","labels":{"carpool.dev/job":"x"},"ownerReferences":[{"apiVersion":
"carpool.dev/v1alpha1","kind":"GpuTrainingJob","name":"x","uid":"job-x","controller":true,"blockOwnerDeletion":true}],
"managedFields":[{"manager":"carpool-operator","operation":"Update","apiVersion":"v1","time":"2026-01-31T12:00:00Z",
"fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{}}}]},"spec":{"volumes":[],"containers":[{"name":"train","image":
"localhost/train:1","command":["python","train.py"],"resources":{"limits":{"carpool.dev/gpu":"1"},"requests":
{"carpool.dev/gpu":"1"}},"terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":
"FallbackToLogsOnError","imagePullPolicy":"Never"}],"restartPolicy":"Never","terminationGracePeriodSeconds":30,
"dnsPolicy":"ClusterFirst","securityContext":{},"schedulerName":"carpool-scheduler","tolerations":[{"key":
"nvidia.com/gpu","operator":"Exists","effect":"NoSchedule"}],"priority":0,"enableServiceLinks":true,
"preemptionPolicy":"PreemptLowerPriority"},"status":{"phase":"Pending","qosClass":"BestEffort"}}"""
ARGS = f'{{"Pod":{POD},"Nodes":null,"NodeNames":["a","b"]}}'
BIND = '{"PodName":"x-worker-0-1","PodNamespace":"default","PodUID":"pod-x","Node":"a"}'


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make(folder, "ca", "/CN=ca")
    make(folder, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
    make(folder, "client", "/CN=scheduler", ["DNS:scheduler"], "ca")
    make(folder, "stranger", "/CN=stranger", ["DNS:stranger"])
    return folder


@pytest.fixture
def kube():
    kube = FakeKube(FakeClock())
    for name in ("a", "b"):
        seed_node(kube, gpu_node(name, 1))
    seed_job(kube, "x")
    seed_pod(kube, "x")
    return kube


@asynccontextmanager
async def serving(kube, certificates, *, watching=True):
    """A real server with mutual TLS; yields its URL."""
    async with running(kube, certificates, watching=watching) as (url, _):
        yield url


@asynccontextmanager
async def running(kube, certificates, *, watching=True):
    """The same; yields the parts of the extender too."""
    tls = TlsSettings(certificates / "server.crt", certificates / "server.key", certificates / "ca.crt")
    settings = ExtenderSettings(port=0, tls=tls)
    clock = FakeClock()
    parts = build(settings, kube, clock, clock.sleep)
    server = create_server(parts.app, settings)
    tasks = [asyncio.create_task(server.serve())]
    if watching:
        tasks.append(asyncio.create_task(parts.run()))
        tasks.append(asyncio.create_task(FakeAgent(kube, clock).serve("a")))
        await parts.watches.wait_synced()
    await until(lambda: server.started)
    try:
        yield f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", parts
    finally:
        for task in tasks[1:]:
            task.cancel()
        server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def tls_of(certificates, name):
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    if name:
        context.load_cert_chain(certificates / f"{name}.crt", certificates / f"{name}.key")
    return context


def as_client(certificates, name="client"):
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls_of(certificates, name)))


@pytest.fixture
async def call(kube, certificates):
    async with running(kube, certificates) as (url, parts), as_client(certificates) as session:

        async def send(path, body=None, method="POST"):
            async with session.request(method, url + path, data=body) as answer:
                text = await answer.text()
                is_json = answer.content_type == "application/json"
                return answer.status, json.loads(text) if is_json else text

        send.registry = parts.registry
        yield send


async def test_filter_names_the_node_that_kube_scheduler_would_take_anyway(call):
    assert await call("/filter", ARGS) == (
        200,
        {
            "Nodes": None,
            "NodeNames": ["a"],
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": {},
            "Error": "",
        },
    )


async def test_filter_says_why_a_node_does_not_fit(kube, certificates):
    seed_node(kube, gpu_node("a", 1, [tenant("t", ["GPU-a-0"], memory_limit_mib=40000)]))
    kube.seed(PODS, pod_of("t", nodeName="a") | {"metadata": {"name": "t", "uid": "pod-t"}})
    async with (
        serving(kube, certificates) as url,
        as_client(certificates) as session,
        session.post(f"{url}/filter", data=ARGS) as answer,
    ):
        found = await answer.json()
    assert found["NodeNames"] == ["b"]
    assert found["FailedNodes"] == {"a": "NoGpuFits: needs 4,000 MiB; freest NVIDIA A100-SXM4-40GB has 960 MiB free"}


async def test_an_empty_list_of_nodes_is_answered_with_one(call):
    status, found = await call("/filter", ARGS.replace('["a","b"]', "[]"))
    assert (status, found["NodeNames"], found["Error"]) == (200, [], "")


async def test_prioritize_answers_a_bare_array(call):
    status, found = await call("/prioritize", ARGS)
    assert status == 200
    assert [set(entry) for entry in found] == [{"Host", "Score"}] * 2
    assert sorted(entry["Host"] for entry in found) == ["a", "b"]
    assert max(entry["Score"] for entry in found) == 10


async def test_bind_and_its_replay_and_another_node(call, kube):
    assert await call("/bind", BIND) == (200, {"Error": ""})
    assert kube.dump(PODS, "x-worker-0-1", "default")["spec"]["nodeName"] == "a"
    assert await call("/bind", BIND) == (200, {"Error": ""})
    status, found = await call("/bind", BIND.replace('"a"', '"b"'))
    assert status == 200
    assert "a" in found["Error"]
    assert "cannot be bound to b" in found["Error"]


async def test_preempt_evicts_nobody(call):
    meta = '{"a":{"Pods":[{"UID":"u"}],"NumPDBViolations":0}}'
    body = f'{{"Pod":{POD},"NodeNameToVictims":null,"NodeNameToMetaVictims":{meta}}}'
    assert await call("/preempt", body) == (200, {"NodeNameToMetaVictims": {}})


BAD = [
    pytest.param("/filter", "{", 400, "expected JSON with the arguments of filter, found '{'", id="no JSON"),
    pytest.param("/filter", "", 400, "found ''", id="no body"),
    pytest.param("/filter", "[]", 400, "expected the arguments of filter", id="an array"),
    pytest.param("/filter", '{"NodeNames":["a"]}', 400, "missing required field `Pod`", id="no pod"),
    pytest.param(
        "/filter",
        f'{{"Pod":{POD},"NodeNames":[1]}}',
        400,
        "Expected `str`, got `int` - at `$.NodeNames[0]`",
        id="a number, no name",
    ),
    pytest.param(
        "/filter",
        f'{{"Pod":{POD},"Nodes":{{"items":[]}},"NodeNames":null}}',
        400,
        "expected NodeNames, found null or nothing; set nodeCacheCapable: true",
        id="whole nodes",
    ),
    pytest.param("/prioritize", "nonsense", 400, "expected JSON with the arguments of prioritize", id="words"),
    pytest.param("/bind", '{"PodName":"x"}', 400, "missing required field `PodNamespace`", id="half a binding"),
    pytest.param("/bind", BIND.replace("pod-x", ""), 400, "expected pod_uid of the pod to bind, found an", id="no uid"),
    pytest.param("/bind", BIND.replace("pod-x", "other"), 200, "has UID pod-x now, not other", id="another uid"),
    pytest.param("/bind", BIND.replace('"a"', '"z"'), 200, 'gpunodes.carpool.dev "z" not found', id="no such node"),
    pytest.param(
        "/bind", BIND.replace("x-worker", "y-worker").replace("pod-x", "u"), 200, "no longer exists", id="pod"
    ),
    pytest.param(
        "/score", ARGS, 404, "expected a POST to /filter, /prioritize, /bind, /preempt, found /score", id="verb"
    ),
    pytest.param("/", ARGS, 404, "check urlPrefix", id="no verb"),
]


@pytest.mark.parametrize(("path", "body", "status", "expected"), BAD)
async def test_a_request_that_makes_no_sense_is_told_what_was_expected(call, path, body, status, expected):
    found_status, found = await call(path, body)
    assert found_status == status
    assert expected in found["Error"]


async def test_a_wrong_method_is_told_the_right_one(call):
    status, found = await call("/filter", method="GET")
    assert (status, found["Error"]) == (
        405,
        "expected a POST to a verb (/filter, /prioritize, /bind, /preempt), found GET",
    )


async def test_a_body_of_10_mb_is_refused_and_nothing_is_lost(call):
    status, found = await call("/filter", io.BytesIO(b"x" * 10_000_000))
    assert status == 413
    assert found["Error"].startswith("expected a body of at most 4,194,304 bytes, found 10,000,000 or more")
    assert (await call("/filter", ARGS))[0] == 200


async def test_a_body_that_does_not_say_its_length_is_cut_off(call):
    async def endless():
        for _ in range(200):
            yield b"x" * 100_000

    try:
        status, _ = await call("/filter", endless())
    except aiohttp.ClientConnectionError:
        status = 413  # the server closed the connection while this client was still writing
    assert status == 413
    assert (await call("/filter", ARGS))[0] == 200


async def test_a_server_that_cannot_be_reached_is_an_error_and_not_a_refusal(call, kube):
    seed_job(kube, "x")
    kube.fail_next("get", PODS, Unreachable("reset"))
    status, found = await call("/bind", BIND.replace("x-worker-0-1", "unseen").replace("pod-x", "unseen"))
    assert (status, found["Error"]) == (200, "pod default/unseen was not bound to node a: reset")


async def test_nothing_is_answered_before_all_watches_have_listed(kube, certificates):
    async with serving(kube, certificates, watching=False) as url, as_client(certificates) as session:
        for path in ("/filter", "/prioritize", "/bind", "/preempt"):
            async with session.post(url + path, data=ARGS) as answer:
                assert answer.status == 503
                assert "the first list of GpuNodes, GpuTrainingJobs, pods is not complete" in await answer.text()


async def test_metrics(call):
    await call("/filter", ARGS)
    await call("/bind", BIND)
    text = generate_latest(call.registry).decode()
    for line in (
        'carpool_extender_request_seconds_count{verb="filter"} 1.0',
        'carpool_extender_bind_seconds_count{step="reserve"} 1.0',
        'carpool_extender_bind_seconds_count{step="prepare"} 1.0',
        'carpool_extender_bind_seconds_count{step="bind"} 1.0',
        "carpool_extender_reservations 1.0",
        'carpool_extender_watch_age_seconds{kind="GpuNode"} 0.0',
        'carpool_build_info{process="extender",version=',
    ):
        assert line in text


@pytest.mark.parametrize("name", ["", "stranger"])
async def test_whoever_shows_no_certificate_of_the_ca_is_refused(kube, certificates, name):
    async with serving(kube, certificates) as url, as_client(certificates, name) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/filter", data=ARGS)


class Wire(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self):
        super().__init__()
        self.written, self.is_closed = [], False

    def write(self, data):
        self.written.append(data)

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed


async def test_the_head_of_an_answer_and_its_body_are_written_at_once():
    wire = Wire()
    transport = Gathering(wire)
    transport.write(b"head ")
    transport.write(b"body")
    assert wire.written == []
    await asyncio.sleep(0)
    assert wire.written == [b"head body"]


async def test_what_was_written_before_a_connection_closes_is_sent_and_nothing_after():
    wire = Wire()
    transport = Gathering(wire)
    transport.write(b"goodbye")
    transport.close()
    transport.write(b"?")
    await asyncio.sleep(0)
    assert (wire.written, transport.is_closing()) == ([b"goodbye"], True)


def test_the_process_loads_no_framework_that_it_does_not_use():
    """What a request costs besides the decision, and what an image holds, is Starlette and no more."""
    told = "import sys, carpool_extender.app, carpool_extender.server; print({'fastapi', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


async def test_no_tickets_are_made_for_sessions_that_nobody_resumes(kube, certificates):
    """They took a third of each handshake, and kube-scheduler makes one for each bind of a burst."""
    async with serving(kube, certificates) as url:
        host, port = url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls_of(certificates, "client"))
        writer.write(b"GET /filter HTTP/1.1\r\nHost: extender\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 405 ")
        assert not writer.get_extra_info("ssl_object").session.has_ticket
        writer.close()
