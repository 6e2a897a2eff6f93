"""The extender's server: kube-scheduler's literal JSON over mutual TLS, invalid requests, health, and its settings."""

import io
import json
from importlib.metadata import version

import aiohttp
import pytest
from carpool_core.kube.api import PODS
from carpool_core.kube.errors import Unreachable
from carpool_extender.commands import extender
from carpool_extender.testing import seed_job
from click.testing import CliRunner
from http_world import ARGS, BIND, POD, as_client, running, serving
from prometheus_client import generate_latest


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
        {"Nodes": None, "NodeNames": ["a"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""},
    )


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


async def test_preempt_evicts_no_pod(call):
    meta = '{"a":{"Pods":[{"UID":"u"}],"NumPDBViolations":0}}'
    body = f'{{"Pod":{POD},"NodeNameToVictims":null,"NodeNameToMetaVictims":{meta}}}'
    assert await call("/preempt", body) == (200, {"NodeNameToMetaVictims": {}})


BAD = [
    pytest.param("/filter", "{", 400, "expected JSON with the arguments of filter, found '{'", id="no JSON"),
    pytest.param("/filter", "", 400, "found ''", id="no body"),
    pytest.param("/filter", "[]", 400, "expected the arguments of filter", id="an array"),
    pytest.param("/filter", '{"NodeNames":["a"]}', 400, "missing required field `Pod`", id="no pod"),
    pytest.param("/filter", f'{{"Pod":{POD},"NodeNames":[1]}}', 400,
                 "Expected `str`, got `int` - at `$.NodeNames[0]`", id="a number, no name"),
    pytest.param("/filter", f'{{"Pod":{POD},"Nodes":{{"items":[]}},"NodeNames":null}}', 400,
                 "expected NodeNames, found null or nothing; set nodeCacheCapable: true", id="whole nodes"),
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
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "expected"), BAD)
async def test_invalid_request_is_answered_with_what_was_expected(call, path, body, status, expected):
    found_status, found = await call(path, body)
    assert found_status == status
    assert expected in found["Error"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "/filter", "expected POST /filter, found GET"), ("POST", "/healthz", "expected GET /healthz, found POST")],
)
async def test_a_wrong_method_is_answered_with_the_right_one(call, method, path, expected):
    assert await call(path, method=method) == (405, {"Error": expected})


async def test_health_and_version_are_typed_answers(call):
    assert await call("/healthz", method="GET") == (200, {"status": "ok", "reason": None})
    assert await call("/readyz", method="GET") == (200, {"status": "ok", "reason": None})
    assert await call("/version", method="GET") == (200, {"version": version("carpool")})


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
async def test_there_is_no_page_that_loads_scripts_from_the_network(call, path):
    assert (await call(path, method="GET"))[0] == 404


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
    expected = "the first list of GpuNodes, Nodes, GpuTrainingJobs, Pods is not complete"
    async with serving(kube, certificates, watching=False) as url, as_client(certificates) as session:
        for path in ("/filter", "/prioritize", "/bind", "/preempt"):
            async with session.post(url + path, data=ARGS) as answer:
                assert answer.status == 503
                assert expected in await answer.text()
        async with session.get(f"{url}/readyz") as answer:
            found = await answer.json()
    assert (answer.status, found["status"], expected in found["reason"]) == (503, "not ready", True)


@pytest.mark.parametrize("name", ["", "stranger"])
async def test_a_client_without_a_certificate_of_the_ca_is_refused(kube, certificates, name):
    async with serving(kube, certificates) as url, as_client(certificates, name) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/filter", data=ARGS)


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
        "carpool_extender_orphaned_reservations 0.0",
        "carpool_extender_free_gpus 1.0",
        'carpool_extender_watch_age_seconds{kind="GpuNode"} 0.0',
        'carpool_build_info{process="extender",version=',
    ):
        assert line in text


KUBECONFIG = (
    '{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c",'
    '"user":"u"}}],"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],'
    '"users":[{"name":"u","user":{"token":"t"}}]}'
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "best"], "policy 'best' is unknown; choose one of least-slowdown, most-available-memory"),
        (["--most-sm-active", "1.5"], "expected a largest SM activity above 0 and up to 1, found 1.5"),
        (["--most-sm-active", "nan"], "expected a largest SM activity above 0 and up to 1, found nan"),
        (["--most-joint-sm-active", "0"], "expected a largest joint SM activity above 0 and up to 1, found 0"),
        (["--least-free-mib", "-1"], "expected a least free memory of 0 to 1,073,741,824 MiB, found -1"),
        (["--least-free-mib", "9" * 23], "expected a least free memory of 0 to 1,073,741,824 MiB, found 99,999,9"),
        (["--most-jobs", "0"], "expected 1 to 1,024 jobs on a GPU at most, found 0"),
        (["--slots-per-gpu", "0"], "expected a number from 1 to 48, found 0"),
        (["--candidates", "0"], "expected a number from 1 on, found 0"),
        (["--bind-timeout-seconds", "nan"], "expected a number from 1 to 3600, found nan"),
        (["--metrics-port", "65536"], "expected a number from 0 to 65535, found 65536"),
        (["--metrics-port", "{taken}"], "CARPOOL_METRICS_PORT: expected a free port at 0.0.0.0, found {taken}: "),
        (
            ["--port", "{taken}"],
            "CARPOOL_EXTENDER_PORT: expected an address of this host and a free port, found 127.0.0.1 and {taken}: ",
        ),
        (["--tls-cert", ""], "CARPOOL_EXTENDER_TLS_CERT: expected a PEM file, found no file at ."),
        (
            ["--tls-key", "{folder}/stranger.key"],
            "its private key, and a CA, each in PEM, found {folder}/server.crt, {folder}/stranger.key and {folder}/ca",
        ),
        (["--client-ca", "{folder}/ca.key"], "{folder}/server.key and {folder}/ca.key: "),
        (["--kubeconfig", "/nowhere"], "expected a kubeconfig at /nowhere, found none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_what_cannot_work(tmp_path, certificates, taken, arguments, expected):
    """Regression: some of it was a traceback, some ran and placed no pod, and refusals ended with 1."""
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    files = {"--tls-cert": "server.crt", "--tls-key": "server.key", "--client-ca": "ca.crt"}
    usual = ["--kubeconfig", str(tmp_path / "kubeconfig"), "--port", "0", "--metrics-port", "0"]
    usual += [part for flag, name in files.items() for part in (flag, str(certificates / name))]
    given = [part.format(taken=taken, folder=certificates) for part in arguments]
    result = CliRunner().invoke(extender, [*usual, *given])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)  # and no traceback
    assert expected.format(taken=taken, folder=certificates) in result.output
