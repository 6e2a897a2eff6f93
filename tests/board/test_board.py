"""The board's documents and pages, and who gets them."""

import asyncio
import json

import jsonschema
import pytest
from board_world import EVERYTHING, PAGES, running, shared_node, small_cluster
from carpool_board.commands import connecting
from carpool_board.viewers import REMEMBERED_S, bearer_token
from carpool_board.views import NODES_PER_PAGE, Show, gpu_page
from carpool_board.watch import IDLE_S, QUEUE_AGE_S, STALE_S
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS
from carpool_core.kube.config import Endpoint, KubeConfigError, Token
from carpool_core.kube.errors import Unreachable
from carpool_core.kubectl.views import gpu_views
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_extender.testing import gpu_node, seed_job, seed_node, seed_pod

LIMIT_S = 60
PATHS = ("/v1/gpus", "/v1/queue", "/v1/jobs", "/v1/plan", "/v1/jobs/default/small-a", "/v1/explain/default/small-a")


async def test_documents_are_those_of_the_commands_and_fit_their_schemas():
    async with running(small_cluster()) as world:
        api = await world.document("/v1/openapi.json")
        routes = [path for path in api["paths"] if "{" not in path]
        assert {*api["paths"]} == {*PATHS[:4], "/v1/jobs/{namespace}/{name}", "/v1/explain/{namespace}/{name}"}
        for path in PATHS:
            template = path if path in routes else f"/v1/{path.split('/')[2]}/{{namespace}}/{{name}}"
            schema = api["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(await world.document(path), {**schema, "components": api["components"]})
        gpus = await world.document("/v1/gpus")
        assert (gpus["fleet"]["gpus"], gpus["fleet"]["shared"], gpus["fleet"]["unhealthy"]) == (4, 1, 1)
        tenant = gpus["items"][0]["tenants"][1]
        assert (tenant["job"], tenant["boundMib"], tenant["countedMib"], tenant["use"]["memoryMib"]) == (
            "small-b", 4000, 4500, 4300
        )  # fmt: skip
        first, outside = (await world.document("/v1/queue"))["items"]
        assert (first["name"], first["reason"]) == ("too-large", "NoGpuFits")
        assert "1 of its 3 workers exist" in outside["message"]
        named = {item["name"] for item in (await world.document("/v1/jobs?namespace=*"))["items"]}
        assert 'name="namespace" value="default"' in (await world.get("/jobs"))[1]
        assert named == {"small-a", "small-b", "too-large", "waits"}
        assert (await world.document("/v1/queue?namespace=other"))["items"] == []
        assert "90,000 MiB" in str((await world.document("/v1/explain/default/too-large"))["lines"])


async def test_timeline_has_prediction_place_neighbours_measurement_and_recovery():
    async with running(small_cluster()) as world:
        report = await world.document("/v1/jobs/default/small-a")
        status, page = await world.get("/jobs/default/small-a")
    moments = [one["what"] for one in report["timeline"]]
    assert moments == ["Created", "Predicted", "Ended", "Recovered", "Placed", "Running", "Neighbours", "Measured"]
    assert status == 200
    for text in ("attempt 2 follows GpuOutOfMemory of attempt 1", "shares its GPUs with default/small-b",
                 "3,300 MiB at its peak", "2026-01-01 00:08:00 UTC"):  # fmt: skip
        assert text in page
    kube = small_cluster()
    await kube.patch(
        GPU_TRAINING_JOBS, "small-a", {"status": {"state": "Failed"}}, namespace="default", subresource="status"
    )
    async with running(kube) as world:
        report = await world.document("/v1/jobs/default/small-a")
    assert "Neighbours" not in [one["what"] for one in report["timeline"]], "an ended job has no neighbours"


def test_gpus_are_selected_and_divided_into_pages_of_whole_nodes():
    gpus = gpu_views([shared_node(), *(gpu_node(f"n{number:03}", 8) for number in range(60))])
    first, last = gpu_page(gpus), gpu_page(gpus, page=99)
    assert (first.selected, first.pages, first.page, last.page) == (483, 3, 1, 3)
    assert len({gpu.node for gpu in first.items}) == NODES_PER_PAGE
    assert len(last.items) == 8 * (61 - 2 * NODES_PER_PAGE)
    assert [gpu.device.index for gpu in gpu_page(gpus, show=Show.UNHEALTHY).items] == [2]
    assert [gpu.node for gpu in gpu_page(gpus, "DEFAULT/small-b").items] == ["a100-1"]
    assert gpu_page(gpus, "n059", Show.IDLE).selected == 8
    assert gpu_page(gpus, "nothing").items == []


async def test_plan_has_the_table_and_the_pictures_of_a_simulation(tmp_path):
    async with running(small_cluster()) as world:
        plan = await world.document("/v1/plan")
        head, whole, *_ = plan["table"]
        assert (plan["jobs"], head[0], len(whole)) == (4, "strategy", len(head))
        _, page = await world.get("/plan")
        assert whole[0] in page
        assert "trace-utilization.png" in plan["pictures"]
        for name in plan["pictures"]:
            assert f'src="/plan/{name}"' in page
            async with world.session.get(f"{world.url}/plan/{name}") as answer:
                assert (answer.status, (await answer.read())[:4]) == (200, b"\x89PNG")
        for name in ("trace.json", "..%2Ftrace.csv", "none.png"):
            assert (await world.get(f"/plan/{name}"))[0] == 404
    older = {"title": "t", "jobs": 1, "seeds": 1, "assumptions": [], "cpu_s": {}}
    for number, content in enumerate(("{}", json.dumps(older), None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if content is not None:
            (folder / "trace.json").write_text(content)
        async with running(small_cluster(), plan=folder) as world:
            status, text = await world.get("/plan")
            assert (status, "run: carpool simulate --trace TRACE.csv --out" in text) == (404, True)


async def test_without_a_plan_no_page_links_to_one():
    async with running(small_cluster()) as world:
        assert 'href="/plan"' in (await world.get("/"))[1]
        world.board.plan_folder = None
        assert "carpool board --plan FOLDER" in (await world.get("/plan"))[1]
    async with running(small_cluster(), plan=None) as world:
        assert 'href="/plan"' not in (await world.get("/"))[1]


async def test_texts_of_users_are_no_html():
    kube = small_cluster()
    seed_job(kube, "evil")
    job = kube.dump(GPU_TRAINING_JOBS, "evil", "default")
    text = "<script>alert(1)</script>"
    failed = {"type": "Failed", "status": "True", "reason": "Oops", "message": text}
    kube.seed(GPU_TRAINING_JOBS, job | {"status": job["status"] | {"state": "Failed", "conditions": [failed]}})
    async with running(kube) as world:
        for path in ("/jobs/default/evil", f"/?search={text}", f"/queue?namespace={text}", "/jobs/default/<script>"):
            _, page = await world.get(path)
            assert "<script>alert" not in page
            assert "&lt;script&gt;" in page


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8044", "127.0.0.1.evil.example", "", "[::1"])
async def test_pages_of_other_hosts_get_nothing(host):
    async with running(small_cluster()) as world:
        status, text = await world.get("/v1/gpus", Host=host)
        assert (status, "a100" in text) == (421, False)
        assert "expected the host 127.0.0.1 or localhost" in text
        assert (await world.get("/v1/gpus", Host="localhost:1"))[0] == 200


@pytest.mark.parametrize(
    ("path", "site", "destination", "status"),
    [
        ("/v1/gpus", "cross-site", "empty", 403),
        ("/v1/gpus", "same-site", "script", 403),
        ("/events?topic=gpus", "cross-site", "empty", 403),
        ("/queue", "cross-site", "iframe", 403),
        ("/queue", "cross-site", "document", 200),
        ("/jobs/default/small-a", "same-site", "document", 200),
        ("/jobs/default/small-a/explain", "cross-site", "document", 403),
        ("/v1/explain/default/small-a", "cross-site", "document", 403),
        ("/jobs/default/small-a/explain", "same-origin", "document", 200),
        ("/jobs/default/small-a/explain", "none", "document", 200),
        ("/v1/explain/default/small-a", "same-origin", "empty", 200),
    ],
)
async def test_other_sites_may_only_link_to_pages(path, site, destination, status):
    async with running(small_cluster()) as world:
        found, text = await world.get(path, **{"Sec-Fetch-Site": site, "Sec-Fetch-Dest": destination})
        assert (found, "a request of another site" in text) == (status, status == 403)


async def test_each_viewer_has_the_rights_of_its_token():
    tokens = {"all": EVERYTHING, "team": {"team/gputrainingjobs", "default/gputrainingjobs"}, "none": frozenset()}
    async with running(small_cluster(), tokens=tokens) as world:
        found = {who: [(await world.get(path, who))[0] for path in PATHS] for who in (*tokens, "wrong", "")}
        assert found == {
            "all": [200] * 6, "team": [403, 403, 403, 403, 200, 403], "none": [403] * 6, "wrong": [401] * 6,
            "": [401] * 6,
        }  # fmt: skip
        assert (await world.get("/v1/jobs?namespace=team", "team"))[0] == 200
        _, page = await world.get("/jobs", "team")
        assert "name a namespace: /jobs?namespace=NAMESPACE" in page
        _, text = await world.get("/v1/gpus", "team")
        assert json.loads(text)["error"].startswith("you may not list gpunodes; explain, what-if and queue read jobs")
        assert "ClusterRole carpool-view" in text
        _, page = await world.get("/queue", "team")
        assert "you may not list gputrainingjobs of all namespaces" in page
        for path in PAGES[:-1]:
            status, page = await world.get(path)
            assert (status, "expected a bearer token in the header Authorization" in page) == (401, True)
        for topic, statuses in (("gpus", [200, 403, 401]), ("queue", [200, 403, 401]), ("team/x", [200, 200, 401])):
            for who, expected in zip(("all", "team", ""), statuses, strict=True):
                headers = {"Authorization": f"Bearer {who}"}
                async with world.session.get(f"{world.url}/events?topic={topic}", headers=headers) as answer:
                    assert answer.status == expected


async def test_a_withdrawn_right_is_missed_after_seconds():
    tokens = {"viewer": {*EVERYTHING}}
    async with running(small_cluster(), tokens=tokens) as world:
        assert (await world.get("/v1/gpus", "viewer"))[0] == 200
        tokens["viewer"].clear()
        asked = len(world.kube.calls)
        assert (await world.get("/v1/gpus", "viewer"))[0] == 200
        assert len(world.kube.calls) == asked
        world.clock.advance(REMEMBERED_S + 1)
        assert (await world.get("/v1/gpus", "viewer"))[0] == 403


async def test_viewers_share_one_watch_of_each_kind():
    async with running(small_cluster()) as world:
        for path in ("/", "/queue") * 5:
            assert (await world.get(path))[0] == 200
        lists = [call.plural for call in world.kube.calls if call[0] == "list"]
        assert sorted(lists) == ["gpunodes", "gputrainingjobs", "nodes", "pods"]


async def test_page_hears_of_changes_of_its_topic_only():
    async with running(small_cluster()) as world:
        gpus, job = (aiter(world.watch.notices(topic)) for topic in ("gpus", "default/small-b"))
        await world.get("/v1/gpus")
        heard = [asyncio.ensure_future(anext(one)) for one in (gpus, job)]
        await asyncio.sleep(0)
        seed_node(world.kube, gpu_node("new", 2))
        assert await asyncio.wait_for(heard[0], LIMIT_S)
        assert not heard[1].done()
        assert (await world.document("/v1/gpus"))["fleet"]["gpus"] == 6
        seed_job(world.kube, "small-b", memory_mib=5000)
        assert await asyncio.wait_for(heard[1], LIMIT_S)
        deleted, life = (asyncio.ensure_future(anext(one)) for one in (job, aiter(world.watch.notices("no/job"))))
        await asyncio.sleep(0)
        await world.kube.delete(GPU_TRAINING_JOBS, "small-b", namespace="default")
        assert await asyncio.wait_for(deleted, LIMIT_S)
        world.clock.advance(IDLE_S)
        assert await asyncio.wait_for(life, LIMIT_S) is False
        async with world.session.get(f"{world.url}/events?topic=gpus") as answer:
            assert answer.content_type == "text/event-stream"
            world.kube.lose(GPU_NODES, "new")
            await answer.content.readuntil(b": connected\n\n")
            seed_node(world.kube, gpu_node("newer", 1))
            assert await answer.content.readuntil(b"\n\n") == b"data: changed\n\n"


async def test_queue_page_hears_of_a_change_once_its_forecast_has_it():
    async with running(small_cluster()) as world:

        async def page_shows(number: int) -> None:
            async for _ in world.watch.notices("queue"):
                if len((await world.document("/v1/queue"))["items"]) == number:
                    return

        assert len((await world.document("/v1/queue"))["items"]) == 2
        page = asyncio.create_task(page_shows(3))
        heard = asyncio.ensure_future(anext(aiter(world.watch.notices("default/later"))))
        await asyncio.sleep(0)
        seed_job(world.kube, "later")
        seed_pod(world.kube, "later", schedulingGates=[{"name": "carpool.dev/admission"}])
        assert await asyncio.wait_for(heard, LIMIT_S)
        assert len((await world.document("/v1/queue"))["items"]) == 2, "the forecast is remembered"
        world.clock.advance(QUEUE_AGE_S)
        await asyncio.wait_for(page, LIMIT_S)


async def test_board_without_rights_answers_with_a_sentence():
    async with running(small_cluster(), own={"default/gputrainingjobs"}) as world:
        status, page = await world.get("/")
        assert status == 403
        assert "you may not list gpunodes" in page
        assert (await world.get("/jobs/default/small-a"))[0] == 200
        assert "None, or you may not list events" in (await world.get("/jobs/default/small-a"))[1]
    async with running(small_cluster(), own=set(), tokens={"all": EVERYTHING}) as world:
        status, text = await world.get("/v1/gpus", "all")
        assert status == 503
        assert "the board itself may not list gpunodes" in text


async def test_invalid_input_and_a_lost_cluster_are_sentences():
    async with running(small_cluster()) as world:
        for path, status, sentence in (
            ("/v1/jobs/default/none", 404, "no GpuTrainingJob none in namespace default"),
            ("/v1/explain/default/none", 404, "no GpuTrainingJob none in namespace default"),
            ("/v1/gpus?page=0", 400, "page: Input should be greater than or equal to 1, found '0'"),
            ("/v1/nothing", 404, "no such page"),
        ):
            found, text = await world.get(path)
            assert (found, sentence in json.loads(text)["error"]) == (status, True), text
        async with world.session.post(f"{world.url}/v1/gpus") as answer:
            assert answer.status == 405
        for error in (Unreachable("no answer from the API server"), KubeConfigError("cannot read the token file x")):
            world.kube.fail_next("get", GPU_TRAINING_JOBS, error)
            status, text = await world.get("/v1/jobs/default/small-a")
            assert (status, str(error) in text) == (503, True)


async def test_a_silent_api_server_is_told_from_a_quiet_cluster():
    async with running(small_cluster()) as world:
        assert (await world.get("/"))[0] == 200
        world.clock.advance(STALE_S - 1)
        assert (await world.get("/"))[0] == 200
        world.clock.advance(2)
        status, page = await world.get("/")
        assert (status, "nothing was heard of gpunodes for 5 min" in page) == (503, True)


async def test_answers_may_not_be_framed_stored_or_run_foreign_scripts():
    async with running(FakeKube(FakeClock())) as world, world.session.get(world.url) as answer:
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert "No node reports GPUs" in await answer.text()


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer a.b-c", "a.b-c"),
        ("bearer  x ", "x"),
        ("Bearer ", None),
        ("Basic x", None),
        ("Bearer a b", None),
        ("", None),
    ],
)
def test_only_bearer_tokens_are_tokens(header, token):
    assert bearer_token(header) == token


async def test_client_certificate_never_takes_the_place_of_a_viewers_token():
    endpoint = Endpoint("https://api", None, Token(), has_certificate=True)
    with pytest.raises(KubeConfigError, match="would take the place of every caller's token"):
        connecting(endpoint, FakeClock())("a-viewer's-token")
    assert connecting(endpoint, FakeClock())(None)
    other = Endpoint("https://api", None, Token(lambda _: "own")).for_token("viewer's")
    assert other.token.at(0.0) == "viewer's"
