"""`carpool status`, `top`, `logs` and `diagnose`."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import click
import msgspec
from rich.live import Live
from rich.text import Text

from carpool_core.clock import ServerClock, SystemClock
from carpool_core.durations import format_duration
from carpool_core.keys import LABEL_JOB
from carpool_core.kube.api import EVENTS, GPU_NODES, GPU_TRAINING_JOBS, PODS, KubeApi, Selector, list_all
from carpool_core.kube.errors import Invalid, NotFound
from carpool_core.kube.pods import ContainerStatus, Pod, WorkerName, parse_worker_name
from carpool_core.kubectl.output import (
    ALL_NAMESPACES,
    FORMAT,
    NAMESPACE,
    OTHER_JOBS,
    Format,
    UnansweredError,
    ask,
    job_argument,
    print_document,
    table,
)
from carpool_core.kubectl.views import (
    Diagnosis,
    EventView,
    GpuView,
    GpuViewList,
    JobView,
    JobViewList,
    Progress,
    gpu_views,
    is_open,
    job_view,
)
from carpool_core.kubectl.views import (
    diagnose as diagnosis_of,
)
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.settings import KubeSettings, click_options
from carpool_core.values import DeviceHealth, pluralize

MAX_EVENTS = 10
"""Events that `diagnose` prints."""
_SECONDS = len("2026-01-01T00:00:00")
"""Characters of a timestamp up to its seconds, which all timestamps have."""


_NEVER_STARTED = ("StartError", "ContainerCannotRun")
"""Reasons of runtimes for the end of a container whose program could not be started."""


async def read_job(api: KubeApi, name: str, namespace: str | None) -> GpuTrainingJob:
    """Read a job. Raises `UnansweredError` if it does not exist, else the errors of the API."""
    namespace = namespace or api.namespace
    try:
        return await api.get(GPU_TRAINING_JOBS, name, GpuTrainingJob, namespace=namespace)
    except NotFound as error:
        if error.reason != "NotFound":  # the resource type itself is missing
            raise
        raise UnansweredError(f"no GpuTrainingJob {name} in namespace {namespace}{OTHER_JOBS}") from error


@click.command(short_help="Print jobs: state, prediction, place, co-tenants, progress.")
@job_argument(required=False)
@NAMESPACE
@ALL_NAMESPACES
@FORMAT
@click_options(KubeSettings)
def status(settings: KubeSettings, job: str | None, namespace: str | None, all_namespaces: bool, form: Format) -> None:
    """Print JOB, or all jobs of a namespace: state, prediction, place, co-tenants and progress.

    Progress is in steps where the step probe counts them, and else an estimate from time.
    """
    if job is not None and all_namespaces:
        raise UnansweredError("a job is in one namespace: leave out -A, or name no job")

    async def question(api: KubeApi) -> list[JobView]:
        now = ServerClock(SystemClock(), api)
        if job is not None:
            found = [await read_job(api, job, namespace)]
        else:
            selector = Selector("" if all_namespaces else namespace or api.namespace)
            found = await list_all(api, GPU_TRAINING_JOBS, GpuTrainingJob, selector)
        return [job_view(one, now.now()) for one in found]

    jobs = sorted(ask(settings, question), key=lambda one: (one.namespace, one.name))
    if form.is_document:
        print_document(JobViewList(items=jobs), form)
        return
    if not jobs:
        click.echo("no jobs found" if all_namespaces else "no jobs found; -A prints those of all namespaces", err=True)
        return
    click.echo(_job_table(jobs, is_wide=form is Format.WIDE, with_namespace=all_namespaces))


def _job_table(jobs: Sequence[JobView], *, is_wide: bool, with_namespace: bool) -> str:
    columns = ["NAME", "STATE", "PREDICTED", "WHERE", "CO-TENANTS", "PROGRESS"]
    columns += ["MODE", "MEASURED", "SLOWDOWN", "STEP", "RESTARTS", "REASON"] if is_wide else []
    rows = []
    for one in jobs:
        seen, modes = one.observed, ", ".join(one.modes)
        cells = [
            one.name,
            one.state.value,
            _prediction_text(one) or one.prediction,
            _place_text(one),
            ", ".join(one.cotenants),
            _progress_text(one.progress),
        ]
        if is_wide:
            measured = "" if seen is None else f"{seen.peak_memory_mib:,} MiB{_percent(seen.gpu_util_percent, ', ')}"
            step = "" if seen is None or seen.step_time_seconds is None else format_duration(seen.step_time_seconds)
            slowdown = "" if one.expected_slowdown is None else f"{one.expected_slowdown:.2f}"
            cells += [modes, measured, slowdown, step, str(one.restarts), one.reason]
        rows.append([one.namespace, *cells] if with_namespace else cells)
    return table(["NAMESPACE", *columns] if with_namespace else columns, rows)


def _prediction_text(one: JobView) -> str:
    if one.predicted_memory_mib is None:
        return ""
    bound = "" if one.memory_bound_mib is None else f" (at most {one.memory_bound_mib:,})"
    return f"{one.predicted_memory_mib:,} MiB{bound}{_percent(one.predicted_util_percent, ', ')}"


def _percent(value: float | None, prefix: str = "") -> str:
    return "" if value is None else f"{prefix}{value:.0f}%"


def _place_text(one: JobView) -> str:
    return f"{', '.join(one.nodes)} ({', '.join(one.products)})" if one.nodes else ""


def _progress_text(progress: Progress | None) -> str:
    if progress is None:
        return ""
    done, expected = progress.steps_done, progress.expected_seconds
    total = "" if progress.steps is None else f" of {progress.steps:,}"
    age = "" if progress.steps_age_seconds is None else f" {format_duration(progress.steps_age_seconds)} ago"
    steps = "" if done is None else f"{done:,}{total} steps{age}, "
    times = format_duration(progress.elapsed_seconds) + ("" if expected is None else f" of {format_duration(expected)}")
    times += "" if progress.latest_seconds is None else f", at most {format_duration(progress.latest_seconds)}"
    if progress.ratio is None:
        return f"{steps}{times}"
    return f"{'' if done is not None else 'about '}{progress.ratio:.0%} ({steps}{times})"


@click.command(short_help="Print GPUs with their tenants and use, refreshing.")
@click.option("--once", is_flag=True, help="Print once and exit, as without a terminal.")
@click.option(
    "--interval", default=2.0, show_default=True, type=click.FloatRange(min=0.5), help="Seconds between reads."
)
@FORMAT
@click_options(KubeSettings)
def top(settings: KubeSettings, once: bool, interval: float, form: Format) -> None:
    """Print every GPU with its tenants, measured beside counted memory, and utilization; refreshes until Ctrl-C.

    Idle GPUs are counted by product; -o wide has each. GpuNodes belong to the cluster: you need the right to read them.
    """

    async def question(api: KubeApi) -> list[GpuView]:
        return gpu_views(await list_all(api, GPU_NODES, GpuNode))

    gpus = ask(settings, question)
    if form.is_document:
        print_document(GpuViewList(items=gpus), form)
        return
    if not gpus:
        raise UnansweredError("no node reports GPUs; is the node agent running?")
    is_wide = form is Format.WIDE
    if once or not sys.stdout.isatty():
        click.echo(_gpu_table(gpus, is_wide=is_wide))
        return

    async def refresh(api: KubeApi) -> None:
        def shown(found: list[GpuView]) -> Text:
            return Text(_gpu_table(found, is_wide=is_wide), no_wrap=True)

        with Live(shown(gpus), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                live.update(shown(await question(api)), refresh=True)

    with suppress(KeyboardInterrupt):
        ask(settings, refresh)


def _gpu_table(gpus: Sequence[GpuView], *, is_wide: bool) -> str:
    """Return the GPUs with tenants or faults, and the number of the idle ones; all GPUs if it is wide."""
    columns = ["NODE", "GPU", "PRODUCT", "MODE", "TENANT", "MEMORY", "COUNTED", "UTIL", "SM"]
    columns += ["SLOWDOWN", "PARTITION", "UUID"] if is_wide else []
    rows, idle = [], Counter[str]()
    for one in gpus:
        device, number = one.device, len(one.tenants)
        if one.is_idle and not is_wide:
            idle[device.product] += 1
            continue
        state = pluralize(number, "tenant") if number else "idle"
        state += "" if device.health is DeviceHealth.HEALTHY else f", {device.health.value}: {device.health_message}"
        memory = f"{one.used_mib:,} / {device.memory_mib:,} MiB"
        mode = "" if device.mode is None else device.mode.value
        rows.append([one.node, str(device.index), device.product, mode, state, memory, *[""] * 5, device.uuid])
        for tenant in one.tenants:
            counted = "whole GPU" if tenant.counted_mib is None else f"{tenant.counted_mib:,} MiB"
            use = ["", "", ""]
            if tenant.use is not None:
                active = tenant.use.sm_active_ratio
                use = [f"{tenant.use.memory_mib:,} MiB", _percent(tenant.use.gpu_util_percent)]
                use.append("" if active is None else f"{active:.0%}")
            partition = "" if tenant.partition is None else tenant.partition.value
            cells = [f"  {tenant.namespace}/{tenant.job}", use[0], counted, *use[1:]]
            rows.append([*[" "] * 4, *cells, f"{tenant.expected_slowdown:.2f}", partition, " "])
    for product, number in sorted(idle.items()):
        rows.append([" ", str(number), product, " ", "idle", *[" "] * 4])
    return table(columns, [row[: len(columns)] for row in rows])


class _EventObject(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    involved_object: _EventObject = _EventObject()
    type: str = ""
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None


@click.command(short_help="Print all that is known of a job's use of its GPUs.")
@job_argument()
@NAMESPACE
@FORMAT
@click_options(KubeSettings)
def diagnose(settings: KubeSettings, job: str, namespace: str | None, form: Format) -> None:
    """Print what is known of the use that JOB makes of its GPUs.

    Predicted beside measured quantities, attempts, the latest events, and findings with their usual causes.
    """

    async def question(api: KubeApi) -> Diagnosis:
        found = await read_job(api, job, namespace)
        return diagnosis_of(found, await read_events(api, found), ServerClock(SystemClock(), api).now())

    answer = ask(settings, question)
    if form.is_document:
        print_document(answer, form)
        return
    one = answer.job
    click.echo(f"{one.namespace}/{one.name}: {one.state.value} ({one.reason}) {one.message}".rstrip())
    where = f"{_place_text(one)}, {', '.join(one.modes)}" if one.nodes else "no GPU"
    beside = f" beside {', '.join(one.cotenants)}" if one.cotenants else ""
    click.echo(f"place: {where}{beside}; progress: {_progress_text(one.progress) or 'not started'}\n")
    rows = [
        [
            c.quantity,
            c.product,
            *map(number_text, (p.median, p.lower, p.upper)),
            number_text(c.measured),
            number_text(c.at_most),
        ]
        for c in answer.comparisons
        for p in [c.predicted]
    ]
    attempts = [
        [str(a.number), one.state.value if is_open(a) else a.outcome, f"{a.peak_memory_mib:,} MiB", a.message]
        for a in answer.attempts
    ]
    events = [[event.time, event.reason, event.object, event.message] for event in answer.events]
    for columns, found in (
        (["QUANTITY", "PRODUCT", "PREDICTED", "AT LEAST", "AT MOST", "MEASURED", "NOW AT MOST"], rows),
        (["ATTEMPT", "OUTCOME", "PEAK", "MESSAGE"], attempts),
        (["TIME", "EVENT", "OBJECT", "MESSAGE"], events),
    ):
        if found:
            click.echo(f"{table(columns, found)}\n")
    for finding in answer.findings or ["nothing unusual"]:
        click.echo(f"finding: {finding}")


_WHOLE = 100
"""Numbers from here on are printed without decimals, smaller ones with three digits."""


def number_text(value: float | None) -> str:
    """Return a number with as many digits as its measurement has; empty for none."""
    return "" if value is None else f"{value:,.0f}" if value >= _WHOLE else f"{value:.3g}"


async def read_events(api: KubeApi, job: GpuTrainingJob) -> list[EventView]:
    """Return the latest events of a job and of its pods, the latest last; none of an earlier job of its name."""
    found = await list_all(api, EVENTS, _Event, Selector(job.metadata.namespace))
    views = []
    for event in found:
        of, named = event.involved_object, parse_worker_name(event.involved_object.name)
        is_pod = of.kind == "Pod" and named is not None and named.job == job.metadata.name
        moment = event.last_timestamp or event.event_time or ""
        is_of_job = is_pod or (of.kind, of.name) == ("GpuTrainingJob", job.metadata.name)
        if is_of_job and moment[:_SECONDS] >= (job.metadata.creation_timestamp or "")[:_SECONDS]:
            about = f"{of.kind} {of.name}"
            views.append(
                EventView(type=event.type, reason=event.reason, object=about, message=event.message, time=moment)
            )
    return sorted(views, key=lambda one: one.time)[-MAX_EVENTS:]


def _has_run(container: ContainerStatus) -> bool:
    ended = container.state.terminated
    has_ended = ended is not None and ended.finished_at is not None and ended.reason not in _NEVER_STARTED
    return container.state.running is not None or container.restart_count > 0 or has_ended


@click.command(short_help="Print the logs of a job's workers.")
@job_argument()
@NAMESPACE
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the workers end.")
@click.option("--tail", type=click.IntRange(min=0), help="Lines of each worker; all when left out.")
@click.option("-w", "--worker", type=click.IntRange(min=0), help="Index of one worker; all when left out.")
@click.option("-c", "--container", help="Container; the template's first when left out.")
@click_options(KubeSettings)
def logs(
    settings: KubeSettings,
    job: str,
    namespace: str | None,
    follow: bool,
    tail: int | None,
    worker: int | None,
    container: str | None,
) -> None:
    """Print the logs of the workers of JOB in its latest attempt; with several workers each line names its own."""

    async def question(api: KubeApi) -> bool:
        found = await read_job(api, job, namespace)
        view = job_view(found, ServerClock(SystemClock(), api).now())
        where = Selector(found.metadata.namespace, labels=f"{LABEL_JOB}={job}")
        named = [(parse_worker_name(pod.metadata.name), pod) for pod in await list_all(api, PODS, Pod, where)]
        workers = [(name, pod) for name, pod in named if name is not None and name.job == job]
        latest = max((name.attempt for name, _ in workers), default=0)
        chosen = [(n, p) for n, p in workers if n.attempt == latest and worker in (None, n.worker)]
        if not chosen:
            which = "pods" if worker is None else f"worker {worker}"
            why = f"it is {view.state.value} ({view.reason}) {view.message}".rstrip()
            raise UnansweredError(f"{found.metadata.namespace}/{job} has no {which}; {why}")
        calls = [_print_log(api, name, pod, view) for name, pod in sorted(chosen, key=lambda w: w[0])]
        return any(await asyncio.gather(*calls))

    async def _print_log(api: KubeApi, name: WorkerName, pod: Pod, view: JobView) -> bool:
        """Print one worker's log; return whether there is one."""
        prefix, is_empty = f"[worker-{name.worker}] " if view.workers > 1 else "", True
        if not pod.spec.node_name:  # the API server's answer is an empty log
            click.echo(f"{prefix}no log: {name.pod} is not on a node yet ({view.reason}) {view.message}", err=True)
            return False
        first = pod.spec.containers[0].name if pod.spec.containers else ""
        lines = api.logs(
            pod.metadata.name,
            namespace=pod.metadata.namespace,
            container=container or first,
            is_followed=follow,
            tail_lines=tail,
        )
        try:
            async for line in lines:
                click.echo(f"{prefix}{line}")
                is_empty = False
        except (Invalid, NotFound) as error:  # such as a container that waits for its image
            click.echo(f"{prefix}no log: {error.server_message}", err=True)
            return False
        if is_empty and not any(map(_has_run, pod.status.container_statuses)):
            click.echo(f"{prefix}no log: {name.pod} never started ({view.reason}) {view.message}", err=True)
            return False
        return True

    with suppress(KeyboardInterrupt):
        if not ask(settings, question):
            raise click.exceptions.Exit(1)
