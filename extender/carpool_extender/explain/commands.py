"""`carpool explain`, `carpool what-if` and `carpool queue`."""

import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import click
import msgspec
from carpool_core.clock import Clock, ServerClock, SystemClock
from carpool_core.durations import format_duration
from carpool_core.keys import GROUP_VERSION, SCHEDULER_NAME
from carpool_core.kube.api import CONFIG_MAPS, GPU_TRAINING_JOBS, PODS, KubeApi
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, NotFound, Refused
from carpool_core.kube.pods import WorkerName
from carpool_core.kubectl.output import (
    FORMAT,
    NAMESPACE,
    OTHER_JOBS,
    Format,
    UnansweredError,
    ask,
    job_argument,
    namespace_option,
    print_document,
    table,
    wrapped,
)
from carpool_core.pod_template import is_about_the_pod, template_error, template_message
from carpool_core.products import DeviceClass, hardware_name, products_of
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.schema import Resource, describe_decode_error, field
from carpool_core.settings import Setting, SettingsError, click_options, load, settings_of
from carpool_core.values import pluralize, without_nulls
from carpool_predictor.advice import advise
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_key
from carpool_predictor.calibration.store import CalibrationStore, UnreadableCalibrationError, parse_config_map_name
from carpool_predictor.predict import predict
from carpool_predictor.tracing.source import SubprocessTracer, features_of
from click.core import ParameterSource

from carpool_extender.explain.explain import Answer, NoSuchJobError, explain_job, read_cluster
from carpool_extender.explain.explain import what_if as answer_what_if
from carpool_extender.explain.queue_forecast import Options, QueuedJobView, QueueView, forecast_queue, read_pending_jobs
from carpool_extender.framework.diagnosis import broken
from carpool_extender.framework.scores import SchedulerConfig, UnknownPolicyError
from carpool_extender.settings import AskSettings, parse_tenancy_groups
from carpool_extender.workloads import JobOptions

T = TypeVar("T")
_Question = Callable[[KubeApi, AskSettings, SchedulerConfig, Options], Awaitable[T]]

STDIN = Path("-")
"""The path of standard input."""
_UNCHECKED_RULES = re.compile(
    r"\s*(?:, |\* )?<nil>: Invalid value: \"?null\"?: some validation rules were not checked[^,\]\n]*"
)
"""Text that the API server appends to a refusal if CEL rules could not run."""


_POD_METADATA = ("labels", "annotations")
"""Fields of the template's metadata that a pod takes."""


class ManifestError(ValueError):
    """The manifest is invalid; `str()` is the reason."""


class CheckedManifest(NamedTuple):
    """A job that the API server accepts."""

    job: GpuTrainingJob
    notes: list[str]
    """Sentences for the user."""
    unchecked: list[str]
    """Sentences on what could not be checked."""


def read_manifest(path: Path, namespace: str | None) -> dict[str, Any]:
    """Read a manifest: a YAML file with one GpuTrainingJob, or `-` for standard input.

    The user may have named a namespace; the manifest may then name no other.

    Raises:
        ManifestError: It is no GpuTrainingJob of this version, has no name, or names another namespace.
    """
    try:
        found = msgspec.yaml.decode(sys.stdin.buffer.read() if path == STDIN else path.read_bytes())
    except msgspec.MsgspecError as error:
        message = " ".join(str(error).split())
        raise ManifestError(f"{path}: expected a GpuTrainingJob in one YAML document: {message}") from error
    found = found if isinstance(found, dict) else {}
    for key, expected in (("kind", "GpuTrainingJob"), ("apiVersion", GROUP_VERSION)):
        if found.get(key) != expected:
            raise ManifestError(f"{path}: expected {key} {expected}, found {found.get(key) or 'none'}")
    metadata = found.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise ManifestError(f"{path}: expected metadata.name, found none; give the job a name")
    own = metadata.get("namespace")
    if namespace and own and own != namespace:
        raise ManifestError(
            f"{path}: the namespace of the manifest, {own}, is not {namespace}, which -n names; leave one of them out"
        )
    return {**found, "metadata": {**metadata, "namespace": own or namespace or ""}}


async def check_manifest(api: KubeApi, manifest: dict[str, Any]) -> CheckedManifest:
    """Have the API server validate a job in a dry run, with the caller's rights.

    Raises:
        ManifestError: The API server refuses it.
        KubeError: The API server could not be reached.
    """
    metadata = {**manifest["metadata"], "namespace": manifest["metadata"].get("namespace") or api.namespace}
    notes, unchecked, body = list[str](), list[str](), {**manifest, "metadata": metadata}
    try:
        body = await api.create(GPU_TRAINING_JOBS, body, namespace=metadata["namespace"], is_dry_run=True)
    except Invalid as error:
        message = _UNCHECKED_RULES.sub("", error.server_message)
        raise ManifestError(f"the API server would refuse it: {message}") from error
    except NotFound as error:
        if not error.server_message.startswith("namespaces "):  # the resource type itself is missing
            raise
        remedy = "create it, or name another by -n or metadata.namespace"
        raise ManifestError(f"namespace {metadata['namespace']} does not exist: {remedy}") from error
    except Conflict:
        notes.append("a job of this name exists already; this answer is for another one with this manifest")
    except Forbidden:
        unchecked.append(
            "not checked: whether the API server would accept the manifest (you may not create gputrainingjobs in "
            f"namespace {metadata['namespace']})"
        )
    try:
        job = msgspec.convert({**body, "status": {}}, GpuTrainingJob)
    except msgspec.ValidationError as error:
        raise ManifestError(describe_decode_error(str(error))) from error
    unchecked += await _check_template(api, job)
    return CheckedManifest(job, notes, unchecked)


async def _check_template(api: KubeApi, job: GpuTrainingJob) -> list[str]:
    """Have the API server validate a pod of the template in a dry run; return what could not be checked.

    Raises:
        ManifestError: The template has unknown or invalid fields.
        KubeError: The API server could not be reached.
    """
    if lost := template_error(job):
        raise ManifestError(f"the job would fail: {lost}")
    template, namespace = without_nulls(job.spec.template), job.metadata.namespace
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in _POD_METADATA}
    spec = {**template.get("spec", {}), "schedulerName": SCHEDULER_NAME, "restartPolicy": "Never"}
    body = {"metadata": {**metadata, "name": WorkerName(job.metadata.name, 0, 1).pod}, "spec": spec}
    try:
        await api.create(PODS, body, namespace=namespace, is_dry_run=True)
    except Invalid as error:
        why = template_message(error, body) if is_about_the_pod(error) else error.server_message
        raise ManifestError(f"the job would fail: {why}") from error
    except Conflict:
        return []  # a job of this name has pods: the API server compares names last
    except Forbidden as error:
        return [f"not checked: whether the API server would accept a pod of spec.template ({error.server_message})"]
    return []


@dataclass(frozen=True, slots=True)
class JobPredictor:
    """Predicts jobs that were never submitted, as the operator would."""

    calibration: Calibration | None = None
    """The operator's calibration; None for predictions as shipped."""
    is_strict: bool = False
    """Whether jobs run alone where too little was measured."""
    notes: tuple[str, ...] = ()
    """Sentences on the calibration for the user."""

    async def predict(self, job: GpuTrainingJob, kinds: Collection[DeviceClass]) -> GpuTrainingJob:
        """Return the job with its prediction on these GPUs; simulated GPUs use no learned calibration."""
        spec = job.spec
        features = await features_of(spec.model, spec.training, SubprocessTracer())
        products = {kind.product for kind in kinds}
        learned = self.calibration
        if learned is not None:
            simulated = set(map(hardware_name, products)) - products
            learned = learned.for_gpus(simulated).for_workers(spec.gpus_per_worker)
            learned = learned.for_namespace(job.metadata.namespace)
        prediction = predict(
            features,
            spec.training,
            products_of(kinds),
            learned,
            model_key(spec.model),
            is_strict=self.is_strict,
            now=SystemClock().now().timestamp(),
        )
        return msgspec.structs.replace(job, status=msgspec.structs.replace(job.status, prediction=prediction))

    async def advice(self, job: GpuTrainingJob, kinds: Collection[DeviceClass]) -> list[str]:
        """Return what changes of the training would save, for a job whose batch fits no GPU; traces each change."""
        prediction, model = job.status.prediction, job.spec.model
        if prediction is None or prediction.fitting_batch is None or model is None or model.features is not None:
            return []
        found = await advise(model, job.spec.training, products_of(kinds), SubprocessTracer())
        return [found] if found else []


async def job_predictor(api: KubeApi, settings: AskSettings) -> JobPredictor:
    """Read the operator's calibration with the caller's rights, and return a predictor with it."""
    place = parse_config_map_name(settings.calibration)
    if place is None:
        return JobPredictor()
    try:
        kept = await CalibrationStore(api, *place).read()
    except Refused as error:
        note = f"predicted as shipped, because the calibration {settings.calibration} cannot be read: {error}"
        return JobPredictor(notes=(f"{note}; where nothing was measured the operator may let the job run alone",))
    except UnreadableCalibrationError as error:
        # The operator cannot read it either and uses the shipped calibration.
        note = f"predicted as shipped, because the calibration {settings.calibration} cannot be read: {error}"
        return JobPredictor(is_strict=not settings.share_unmeasured, notes=(note,))
    missing = f"nothing has been learned yet, or the operator's calibration is not {settings.calibration}"
    notes = () if kept.version else (missing,)
    return JobPredictor(kept.calibration, is_strict=not settings.share_unmeasured, notes=notes)


_SITE = "--site (CARPOOL_SITE): expected NAMESPACE/NAME, such as carpool-system/carpool, or nothing"
_OWN = ("site", "kube")
"""Fields of `AskSettings` that only the caller sets."""


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] = {}


async def read_site_settings(api: KubeApi, asked: AskSettings, flags: frozenset[str]) -> tuple[AskSettings, str]:
    """Return the settings that hold for an answer, and a sentence with those that differ from the defaults.

    The flags that the caller set win over the chart's ConfigMap, which is read with the caller's rights.

    Raises:
        SettingsError: `asked.site` is not a NAMESPACE/NAME.
        KubeError: The API server could not be reached.
    """
    fields = [one for one in settings_of(AskSettings) if one.path[0] not in _OWN]
    ours = {one.env: _text(asked, one) for one in fields if one.flag in flags}
    settings, where, unread = asked, "", ""
    if (installation := parse_config_map_name(asked.site, _SITE)) is not None:
        namespace, name = installation[0], f"{installation[1]}-settings"
        where = f"ConfigMap {name} in {namespace}"
        try:
            found = await api.get(CONFIG_MAPS, name, _ConfigMap, namespace=namespace)
            merged = replace(load(AskSettings, {**found.data, **ours}), site=asked.site, kube=asked.kube)
            merged.scheduler_config()
            parse_tenancy_groups(merged.tenancy_groups)
            settings = merged
        except Forbidden:
            unread = f"you may not read {where}"
        except NotFound:
            unread = f"{where} does not exist (--site names another installation)"
        except (Invalid, SettingsError, UnknownPolicyError) as error:
            unread = f"{where} is invalid for this version: {error}"
    given, default = [_flag(settings, one) for one in fields if one.flag in flags], AskSettings()
    open_ = [one for one in fields if one.flag not in flags]
    theirs = [_flag(settings, one) for one in open_ if _text(settings, one) != _text(default, one)]
    parts = [f"{' '.join(given)} as given"] if given else []
    parts += [f"{' '.join(theirs)} by {where}"] if theirs else []
    others = "the others as shipped" if parts else "as shipped"
    parts.append(f"{others}, by {where}" if where and not unread and not theirs else others)
    parts += [f"the site's may differ: {unread}"] if unread else []
    return settings, f"settings: {'; '.join(parts)}"


class Site(NamedTuple):
    """How an installation decides."""

    settings: AskSettings
    config: SchedulerConfig
    options: Options
    note: str
    """A sentence with the settings that differ from the defaults, and their source."""


async def read_site(
    api: KubeApi, asked: AskSettings, flags: frozenset[str], clock: Clock, *, each_gpu: bool = False
) -> Site:
    """Return how the installation decides, by `read_site_settings`, whose errors it raises."""
    site, note = await read_site_settings(api, asked, flags)
    job_options = JobOptions(site.job_policies, site.count_peaks, parse_tenancy_groups(site.tenancy_groups))
    options = Options(ServerClock(clock, api), job_options, site.queue_order, site.default_duration_seconds, each_gpu)
    return Site(site, site.scheduler_config(), options, note)


def _text(settings: AskSettings, one: Setting) -> str:
    """Return the value of a setting as its environment variable has it; empty if it is unset."""
    value: Any = settings
    for name in one.path:
        value = getattr(value, name)
    return "" if value is None else str(value)


def _flag(settings: AskSettings, one: Setting) -> str:
    """Return a setting as the flag that would set it."""
    value = _text(settings, one)
    if one.type is bool:
        return one.flag if value == str(True) else f"--no-{one.flag.removeprefix('--')}"
    return f"{one.flag} {value}" if value else f"{one.flag} ''"


class AnswerView(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Answer of `carpool explain` and `carpool what-if`."""

    kind: Annotated[Literal["Answer"], field("Kind of the document.")] = "Answer"
    infeasible: Annotated[bool, field("Whether the job could never run on this cluster; exit code 1 then.")]
    lines: Annotated[list[str], field("Statements, one each.")]


_ALL = click.option("--all", "each_gpu", is_flag=True, help="Print every GPU on a line of its own, as -o wide does.")


@click.command("explain", short_help="Explain where a job is, and why not elsewhere.")
@job_argument()
@NAMESPACE
@_ALL
@FORMAT
@click_options(AskSettings)
def explain_command(settings: AskSettings, job: str, namespace: str | None, each_gpu: bool, form: Format) -> None:
    """Explain where JOB is, why not elsewhere, and by how much each GPU fits or misses.

    For a job without a place it prints its place in the queue with its expected start, and what would have to change
    for a place now.

    The decision uses the site's settings where you may read them. Only the extender remembers which GPUs could not be
    prepared a moment ago, and at which end the order Alternate continues.
    """

    async def answer(api: KubeApi, _: AskSettings, config: SchedulerConfig, options: Options) -> Answer:
        return await explain_job(api, job, namespace or api.namespace, config, options)

    _print_answer(settings, each_gpu, form, answer)


_MANIFEST = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


@click.command("what-if", short_help="Print where a job would be placed now; nothing is created.")
@click.argument("manifest", required=False, type=_MANIFEST)
@click.option("-f", "--filename", type=_MANIFEST, help="MANIFEST, as kubectl names it.")
@NAMESPACE
@_ALL
@FORMAT
@click_options(AskSettings)
def what_if(
    settings: AskSettings,
    manifest: Path | None,
    filename: Path | None,
    namespace: str | None,
    each_gpu: bool,
    form: Format,
) -> None:
    """Print where the job in MANIFEST would be placed now, with which tenants and how fast; nothing is created.

    MANIFEST is a file, or - for standard input. If it names a namespace, -n may name no other. The API server checks
    the job and a pod of its template in dry runs, so that misspelt fields are found.

    Exit code 1: the API server would refuse the manifest, the site does not allow the policy that the job selects, or
    no GPU of the cluster could ever run it. Exit code 2: the question could not be answered.

    The decision uses the site's settings where you may read them. Only the extender remembers which GPUs could not be
    prepared a moment ago, and at which end the order Alternate continues.
    """
    path = manifest or filename
    if path is None or (manifest and filename):
        raise UnansweredError("expected one MANIFEST, as an argument or with -f; a file, or - for standard input")
    try:
        wanted = read_manifest(path, namespace)
    except (ManifestError, OSError) as error:
        raise UnansweredError(str(error)) from error

    async def answer(api: KubeApi, site: AskSettings, config: SchedulerConfig, options: Options) -> Answer:
        checked = await check_manifest(api, wanted)
        predictor = await job_predictor(api, site)
        options = replace(options, unchecked=checked.unchecked)
        found = await answer_what_if(api, checked.job, config, predictor.predict, options, predictor.advice)
        return Answer([*checked.notes, *found.lines, *predictor.notes], found.is_infeasible)

    _print_answer(settings, each_gpu, form, answer)


@click.command("queue", short_help="Print the pending jobs in order, with expected starts.")
@namespace_option("Only jobs of this namespace; their places count all jobs.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all namespaces, as without -n.")
@FORMAT
@click_options(AskSettings)
def queue(settings: AskSettings, namespace: str | None, all_namespaces: bool, form: Format) -> None:
    """Print the pending jobs of all namespaces in the order of the queue: why each waits, and when it may start.

    The forecast replays the extender's queue over the predicted ends of running jobs. A start is marked as assumed
    if a job of unknown length has to end before: it has no spec.training.steps, or no predicted step time.
    """

    async def question(api: KubeApi, _: AskSettings, config: SchedulerConfig, options: Options) -> QueueView:
        pending = await read_pending_jobs(api)
        if pending.unread:
            raise UnansweredError(f"{pending.unread}; {rights_remedy(settings.site)}")
        found = forecast_queue(pending, await read_cluster(api, config), config, options)
        chosen = [one for one in found if all_namespaces or namespace in (None, one.namespace)]
        return QueueView(order=options.order, items=chosen)

    answer, _ = _ask(settings, False, question)
    if form.is_document:
        print_document(answer, form)
        return
    if not answer.items:
        click.echo("no job waits", err=True)
        return
    columns = ["PLACE", "NAMESPACE", "NAME", "PRIORITY", "WORKERS", "LENGTH", "STARTS IN", "REASON", "MESSAGE"]
    rows = [
        [
            "" if one.position is None else str(one.position),
            one.namespace,
            one.name,
            str(one.priority),
            str(one.workers),
            "unknown" if one.expected_seconds is None else format_duration(one.expected_seconds),
            _start_text(one),
            one.reason,
            one.message,
        ]
        for one in answer.items
    ]
    # A wide answer, and one for another program, keeps each job on one line.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and form is not Format.WIDE else None
    click.echo(table(columns, rows if width is None else wrapped(columns, rows, width)))
    click.echo(f"{pluralize(len(rows), 'pending job')} by the order {answer.order}; starts are forecasts", err=True)


def _start_text(one: QueuedJobView) -> str:
    if one.starts_in_seconds is None:
        return ""
    return f"{format_duration(one.starts_in_seconds)}{' (assumed)' if one.start_is_assumed else ''}"


def rights_remedy(site: str) -> str:
    """Return the remedy for a missing right, at the installation NAMESPACE/NAME."""
    role = f"{site.rpartition('/')[2] or 'carpool'}-view"
    return (
        "explain, what-if and queue read jobs, pods and GpuNodes of the whole cluster: an administrator can bind the "
        f"ClusterRole {role} by a ClusterRoleBinding (docs/teams.md)"
    )


def flags_given(context: click.Context) -> frozenset[str]:
    """Return the flags that the caller set, on the command line or by environment variables."""
    sources = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return frozenset(p.opts[0] for p in context.command.params if context.get_parameter_source(p.name or "") in sources)


def _ask(settings: AskSettings, each_gpu: bool, question: _Question[T]) -> tuple[T, str]:
    """Return an answer by the site's settings, and a sentence on these."""
    clock, flags = SystemClock(), flags_given(click.get_current_context())

    async def run(api: KubeApi) -> tuple[T, str]:
        site = await read_site(api, settings, flags, clock, each_gpu=each_gpu)
        return await question(api, site.settings, site.config, site.options), site.note

    try:
        settings.scheduler_config()  # wrong flags are reported even if the cluster cannot be reached
        return ask(settings.kube, run, clock=clock, rights_remedy=rights_remedy(settings.site))
    except ManifestError as error:
        raise click.ClickException(str(error)) from error
    except NoSuchJobError as error:
        raise UnansweredError(f"{error}{OTHER_JOBS}") from error
    except (SettingsError, UnknownPolicyError) as error:
        raise UnansweredError(str(error)) from error


def _print_answer(settings: AskSettings, each_gpu: bool, form: Format, question: _Question[Answer]) -> None:
    answer, note = _ask(settings, each_gpu or form is not Format.TABLE, question)
    lines = [*answer.lines, note]
    if form.is_document:
        print_document(AnswerView(infeasible=answer.is_infeasible, lines=lines), form)
    else:
        # Output for another program keeps each statement on one line.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(lines if width is None else [broken(line, width) for line in lines]))
    if answer.is_infeasible:
        raise click.exceptions.Exit(1)
