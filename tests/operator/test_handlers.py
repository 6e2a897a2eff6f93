"""What kopf hands over, and how it is configured."""

import asyncio
import logging
from itertools import islice

import aiohttp
import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from carpool_core.settings import KubeSettings
from carpool_operator.handlers import RetryDelays, handle_event, kopf_settings, registry_for
from kopf._cogs.clients.api import request as call
from kopf._cogs.clients.auth import APIContext
from operator_fixtures import job_body
from operator_world import World


def event(kind: str | None, **metadata: str) -> kopf.RawEvent:
    body = job_body()
    body["metadata"] |= {"uid": "u1", "resourceVersion": "5", **metadata}
    return kopf.RawEvent(type=kind, object=body)  # type: ignore[typeddict-item]


def test_events_feed_the_jobs() -> None:
    operator = World().operator
    for kind in (None, "ADDED", "MODIFIED"):
        handle_event(operator, event(kind))
    assert len(operator.jobs) == 1
    handle_event(operator, event("DELETED", uid="of-a-namesake"))
    assert len(operator.jobs) == 1
    handle_event(operator, event("DELETED"))
    assert len(operator.jobs) == 0


def test_older_news_is_ignored() -> None:
    operator = World().operator
    handle_event(operator, event("MODIFIED", resourceVersion="9"))
    handle_event(operator, event("MODIFIED", resourceVersion="10"))
    handle_event(operator, event("MODIFIED", resourceVersion="8"))
    job = operator.jobs.get("default/x")
    assert job is not None
    assert job.metadata.resource_version == "10"


def test_list_in_mid_life_asks_for_a_sweep() -> None:
    operator = World().operator
    handle_event(operator, event(None))
    assert not operator.is_resync_requested, "the first list tells of everything"
    handle_event(operator, event(None))
    assert operator.is_resync_requested


def test_malformed_job_stops_nothing() -> None:
    operator = World().operator
    odd = event("ADDED")
    odd["object"]["spec"]["workers"] = "many"  # type: ignore[typeddict-item]
    handle_event(operator, odd)
    assert len(operator.jobs) == 0


def test_kopf_leaves_no_names_of_its_own_in_objects() -> None:
    settings = kopf_settings()
    assert settings.persistence.finalizer == "carpool.dev/operator"
    assert not settings.posting.enabled
    assert settings.peering.standalone
    registry = registry_for(World().operator, KubeSettings(), World().clock, asyncio.Event())
    assert not registry._changing.get_all_handlers(), "a handler of changes would write annotations"
    assert not registry._spawning.get_all_handlers(), "a daemon would add a finalizer"


@pytest.mark.parametrize("status", [503, 500, 403, 429])
async def test_api_server_in_trouble_does_not_end_the_operator(status: int) -> None:
    """Regression: after five refusals, within twelve seconds, kopf gave up and the process ended."""
    troubles = 40

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal troubles
        troubles -= 1
        if troubles >= 0:
            return web.json_response({"kind": "Status", "code": status, "message": "etcd has no leader"}, status=status)
        return web.json_response({"items": [job_body()]})

    application = web.Application()
    application.router.add_get("/jobs", answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        answered = await call(
            "get",
            "/jobs",
            settings=kopf_settings(RetryDelays(then_s=0)),
            context=APIContext(kopf.AiohttpSession(server=str(server.make_url("/")), aiohttp_session=session)),
            logger=logging.getLogger("kopf"),
        )
        assert len((await answered.json())["items"]) == 1


def test_pauses_grow_and_never_end() -> None:
    pauses = kopf_settings().networking.error_backoffs
    assert isinstance(pauses, RetryDelays)
    for _ in range(2):
        assert [*islice(pauses, 6)] == [0.5, 1, 2, 3, 5, 5], "each call begins anew"
