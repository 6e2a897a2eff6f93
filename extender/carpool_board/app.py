"""The board's HTTP application: typed read-only routes below `/v1`, and pages that show the same documents."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from carpool_core.clock import Clock, ServerClock, parse_rfc3339
from carpool_core.durations import format_duration
from carpool_core.kube.api import GPU_TRAINING_JOBS, Selector, list_all
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import Forbidden, Invalid, KubeError, NotFound
from carpool_core.kubectl.commands import number_text, read_events, read_job
from carpool_core.kubectl.output import UnansweredError
from carpool_core.kubectl.views import EventView, JobViewList, job_view
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.schema import Resource, field
from carpool_core.settings import SettingsError
from carpool_extender.explain.commands import AnswerView, read_site
from carpool_extender.explain.explain import NoSuchJobError, explain_job
from carpool_extender.explain.queue_forecast import QueueView
from carpool_extender.settings import AskSettings
from carpool_simulator.report import About
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, HTMLResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool_board.viewers import OF_GPUS, OF_QUEUE, Right, Viewers, bearer_token
from carpool_board.views import GpuPage, JobReport, Show, gpu_page, job_report
from carpool_board.watch import GPUS, QUEUE, ClusterWatch

LOOPBACK = ("127.0.0.1", "localhost")
"""Host names by which a browser on this machine reaches the board."""
_EXPLANATIONS = 2
"""Explanations that are computed at once: each reads the whole cluster."""
_EXPLANATION = re.compile("/v1/explain/.*|/jobs/[^/]*/[^/]*/explain")
_HEADERS = {
    # Everything comes from the board itself, and no other page may show it in a frame.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Search = Annotated[str, Query(max_length=256, description="Part of a node, a product, or a tenant NAMESPACE/NAME.")]
Shown = Annotated[Show, Query(description="all, busy (with a tenant), idle (healthy and without one) or unhealthy.")]
Number = Annotated[int, Query(ge=1, le=1_000_000, description="Number of the page.")]
Namespace = Annotated[str, Query(max_length=63, description="Only jobs of this namespace.")]


_PLAN_NAME = "trace"
"""Beginning of the files that `carpool simulate` writes."""


class NoPlanError(ValueError):
    """The folder holds no results."""


class Plan(Resource, frozen=True, kw_only=True):
    """Results of a simulation: a line for each strategy, against the first."""

    kind: Annotated[Literal["Plan"], field("Kind of the document.")] = "Plan"
    title: Annotated[str, field("The workload.")]
    jobs: Annotated[int, field("Number of its jobs.")]
    seeds: Annotated[int, field("Runs of each strategy.")]
    table: Annotated[list[list[str]], field("Cells, the head first.")]
    assumptions: Annotated[list[str], field("What was assumed, a sentence each.")]
    made: Annotated[str, field("Time and version of the run.")]
    pictures: Annotated[list[str], field("File names of its pictures, at /plan/NAME.")]


def read_plan(folder: Path | None) -> Plan:
    """Read the results of `carpool simulate --out FOLDER`.

    Raises:
        NoPlanError: There are none, or they are of another version; the message has the command that writes them.
    """
    if folder is None:
        raise NoPlanError("expected a folder of a simulation, found none: run carpool board --plan FOLDER")
    path = folder / f"{_PLAN_NAME}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError) as error:
        raise NoPlanError(
            f"expected the results of a simulation in {path}, found none that can be read; run: "
            f"carpool simulate --trace TRACE.csv --out {path.parent}, and name that folder with --plan"
        ) from error
    return Plan(
        title=found.title,
        jobs=found.jobs,
        seeds=found.seeds,
        table=found.table,
        assumptions=found.assumptions,
        made=f"{found.made.when} UTC, version {found.made.version}",
        pictures=sorted(one.name for one in folder.glob(f"{_PLAN_NAME}-*.png")),
    )


class Board:
    """Reads the documents of the routes, each with the rights of its viewer.

    Args:
        site: Installation by whose settings jobs are explained, as NAMESPACE/NAME.
        needs_token: Whether each request needs the viewer's bearer token.
        namespace: Namespace of the jobs that are listed if none is named; empty means all.
    """

    def __init__(
        self, viewers: Viewers, watch: ClusterWatch, clock: Clock, site: str, *, needs_token: bool, namespace: str = "",
        plan: Path | None = None,
    ) -> None:  # fmt: skip
        self._viewers, self.watch, self._clock, self._site = viewers, watch, clock, site
        self.needs_token, self.namespace, self.plan_folder = needs_token, namespace, plan
        self._explaining = asyncio.Semaphore(_EXPLANATIONS)

    def _token(self, request: Request) -> str | None:
        """Return the viewer's token; None where viewers have the rights of the process."""
        if not self.needs_token:
            return None
        if (token := bearer_token(request.headers.get("authorization", ""))) is None:
            raise Forbidden(
                "expected a bearer token in the header Authorization, found none: open the board through a proxy that "
                "signs you in (docs/board.md), or run `carpool board` on your own machine",
                status=401,
            )
        return token

    async def gpus(self, request: Request, search: Search = "", show: Shown = Show.ALL, page: Number = 1) -> GpuPage:
        """Return a page of GPUs."""
        await self._viewers.require(self._token(request), *OF_GPUS)
        return gpu_page(await self.watch.gpus(), search, show, page)

    async def queue(self, request: Request, namespace: Namespace = "") -> QueueView:
        """Return the pending jobs, of one namespace if it is given."""
        await self._viewers.require(self._token(request), *OF_QUEUE)
        found = await self.watch.queue()
        items = [one for one in found.items if namespace in ("", one.namespace)]
        return msgspec.structs.replace(found, items=items)

    async def jobs(self, request: Request, namespace: Namespace = "") -> JobViewList:
        """Return the jobs of a namespace; `*` means all."""
        selector = Selector("" if namespace == "*" else namespace or self.namespace)
        async with self._viewers.connect(self._token(request)) as api:
            try:
                found = await list_all(api, GPU_TRAINING_JOBS, GpuTrainingJob, selector)
            except Forbidden as error:
                if error.status == 401 or selector.namespace:
                    raise
                raise Forbidden(
                    f"{error}; name a namespace: {request.url.path}?namespace=NAMESPACE", status=403
                ) from error
            now = ServerClock(self._clock, api).now()
        items = sorted((job_view(one, now) for one in found), key=lambda one: (one.namespace, one.name))
        return JobViewList(items=items)

    async def job(self, request: Request, namespace: str, name: str) -> JobReport:
        """Return one job, with its events if the viewer may read them."""
        async with self._viewers.connect(self._token(request)) as api:
            job, events = await read_job(api, name, namespace), list[EventView]()
            with suppress(Forbidden):
                events = await read_events(api, job)
            return job_report(job, events, ServerClock(self._clock, api).now())

    async def explain(self, request: Request, namespace: str, name: str) -> AnswerView:
        """Return where a job is and why not elsewhere, computed in a thread with a client of its own."""
        token = self._token(request)

        async def answer() -> AnswerView:
            async with self._viewers.connect(token) as api:
                site = await read_site(api, AskSettings(site=self._site), frozenset(), self._clock)
                found = await explain_job(api, name, namespace, site.config, site.options)
                return AnswerView(infeasible=found.is_infeasible, lines=[*found.lines, site.note])

        async with self._explaining:
            return await asyncio.to_thread(lambda: asyncio.run(answer()))

    async def plan(self, request: Request) -> Plan:
        """Return the results of a simulation."""
        await self._viewers.require(self._token(request), *OF_GPUS)
        return read_plan(self.plan_folder)

    async def picture(self, request: Request, name: str) -> Response:
        """Return a picture of that simulation."""
        await self._viewers.require(self._token(request), *OF_GPUS)
        if self.plan_folder is None or name not in read_plan(self.plan_folder).pictures:
            raise NotFound(f"no picture {name} of a simulation", status=404)
        return FileResponse(self.plan_folder / name, media_type="image/png")

    async def notices(self, request: Request, topic: Annotated[str, Query(max_length=320)]) -> Response:
        """Return a stream of server-sent events: one after changes of a topic."""
        namespace, _, name = topic.partition("/")
        of_job = (Right("get", GPU_TRAINING_JOBS, namespace, name),)
        await self._viewers.require(self._token(request), *{GPUS: OF_GPUS, QUEUE: OF_QUEUE}.get(topic, of_job))

        async def stream() -> AsyncIterator[str]:
            yield ": connected\n\n"
            async for is_changed in self.watch.notices(topic):
                yield "data: changed\n\n" if is_changed else ": alive\n\n"

        # nginx would hold the events back otherwise.
        return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


class Route(NamedTuple):
    """A document as JSON and as a page."""

    path: str
    page: str
    template: str
    read: Callable[..., Awaitable[Resource]]
    document: type[Resource]
    summary: str


def create_app(board: Board) -> FastAPI:
    """Build the application."""
    app = FastAPI(title="Carpool board", version=version("carpool"), openapi_url="/v1/openapi.json", docs_url=None,
                  redoc_url=None, description="Read-only. Each answer has the rights of its viewer.")  # fmt: skip
    routes = (
        Route("/v1/gpus", "/", "gpus.html", board.gpus, GpuPage, "GPUs with their tenants, by node"),
        Route("/v1/queue", "/queue", "queue.html", board.queue, QueueView, "Pending jobs in order, and why they wait"),
        Route("/v1/jobs", "/jobs", "jobs.html", board.jobs, JobViewList, "Jobs of a namespace; * means all"),
        Route("/v1/jobs/{namespace}/{name}", "/jobs/{namespace}/{name}", "job.html", board.job, JobReport,
              "One job with its timeline"),
        Route("/v1/explain/{namespace}/{name}", "/jobs/{namespace}/{name}/explain", "explain.html", board.explain,
              AnswerView, "Where a job is, and why not elsewhere"),
        Route("/v1/plan", "/plan", "plan.html", board.plan, Plan, "Results of a simulation"),
    )  # fmt: skip
    app.openapi = lambda: _openapi(app, [one.document for one in routes])  # type: ignore[method-assign]
    app.add_middleware(_Guard, checks_host=not board.needs_token)
    app.mount("/static", StaticFiles(directory=Path(__file__).with_name("static")))
    app.get("/events", include_in_schema=False)(board.notices)
    app.get("/plan/{name}", include_in_schema=False)(board.picture)
    templates = _environment()
    templates.globals |= {"has_plan": board.plan_folder is not None, "own_namespace": board.namespace or "*"}

    def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
        shown = templates.get_template(template).render(query=request.query_params, path=request.path_params, **values)
        return HTMLResponse(shown, status)

    def add(route: Route) -> None:
        found = Depends(route.read)

        @app.get(route.path, responses=_returns(route.document), summary=route.summary)
        async def document(found: Any = found) -> Response:
            return Response(msgspec.json.encode(found), media_type="application/json")

        @app.get(route.page, include_in_schema=False)
        async def as_page(request: Request, found: Any = found) -> Response:
            return page(request, route.template, found=found)

    for route in routes:
        add(route)

    @app.get("/v1", include_in_schema=False)
    async def api_page(request: Request) -> Response:
        return page(request, "api.html", api=app.openapi())

    async def failed(request: Request, error: Exception) -> Response:
        status, sentence = _described(error)
        if request.url.path.startswith("/v1/"):
            answer = Response(msgspec.json.encode({"error": sentence}), status, media_type="application/json")
        else:
            answer = page(request, "error.html", status, title=HTTPStatus(status).phrase, sentence=sentence)
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    errors = (KubeError, KubeConfigError, SettingsError, UnansweredError, NoSuchJobError, NoPlanError)
    for kind in (*errors, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, failed)
    return app


def _described(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the sentence of an error."""
    match error:
        case Forbidden():
            return 401 if error.status == 401 else 403, str(error)
        case NoSuchJobError() | NoPlanError() | NotFound():
            return 404, str(error)
        case UnansweredError():
            return 404, error.message
        case Invalid():
            return 400, str(error)
        case RequestValidationError():
            return 400, "; ".join(f"{one['loc'][-1]}: {one['msg']}, found {one['input']!r}" for one in error.errors())
        case HTTPException(status_code=404):
            return 404, "no such page; open one of /, /queue, /jobs, /plan and /v1"
        case HTTPException():
            return error.status_code, str(error.detail)
        case _:
            return 503, f"the cluster could not be read: {error}"


class _Guard:
    """Adds headers to every answer, and refuses what pages of others ask for, as such or by DNS rebinding."""

    def __init__(self, app: ASGIApp, checks_host: bool) -> None:
        self._app, self._checks_host = app, checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http" and self._checks_host:
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if host.partition(":")[0] not in LOOPBACK:
                sentence = (
                    f"expected the host {' or '.join(LOOPBACK)}, found {host!r}: open the address that was printed"
                )
                return await Response(f"{sentence}\n", 421, media_type="text/plain")(scope, receive, with_headers)
            # Others may link to pages, but not to explanations: each reads the whole cluster.
            is_link = headers.get("sec-fetch-dest") == "document" and not _EXPLANATION.fullmatch(scope["path"])
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
                sentence = (
                    "expected a request of the board's own pages, found a request of another site: open the job's page"
                )
                return await Response(f"{sentence}\n", 403, media_type="text/plain")(scope, receive, with_headers)
        return await self._app(scope, receive, with_headers)


def _returns(document: type[Resource]) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route in OpenAPI."""
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    schema = {"$ref": f"#/components/schemas/{document.__name__}"}
    return {
        200: {"description": document.__doc__ or "", "content": {"application/json": {"schema": schema}}},
        "default": {"description": "A sentence.", "content": {"application/json": {"schema": error}}},
    }


def _openapi(app: FastAPI, documents: Sequence[type[Resource]]) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of the types that are encoded."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, schemas = msgspec.json.schema_components(documents, ref_template="#/components/schemas/{name}")
        found["components"]["schemas"] |= schemas
        found["components"]["securitySchemes"] = {"viewer": {"type": "http", "scheme": "bearer"}}
        for path in found["paths"].values():
            path["get"]["responses"].pop("422", None)  # FastAPI's own answer, in place of which a sentence is sent
        app.openapi_schema = found
    return app.openapi_schema


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("carpool_board"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {"count": _count, "duration": format_duration, "moment": _moment, "segment": _segment}
    return found


def _count(value: float | None) -> str:
    return number_text(value) if value is None or isinstance(value, float) else f"{value:,}"


def _moment(text: str) -> str:
    return parse_rfc3339(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if text else "now"


def _segment(text: str) -> str:
    """Return a name as one segment of a URL's path."""
    return quote(text, safe="")
