"""`carpool explain` and `carpool what-if`."""

import asyncio
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from carpool_core.clock import ServerClock, SystemClock
from carpool_core.keys import GROUP_VERSION
from carpool_core.kube.api import CONFIG_MAPS, GPU_TRAINING_JOBS, KubeApi
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import Conflict, Forbidden, Invalid, KubeError, NotFound, Refused
from carpool_core.products import DeviceClass, hardware_name, products_of
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.schema import describe_decode_error
from carpool_core.settings import Setting, SettingsError, click_options, load, settings_of
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_key
from carpool_predictor.calibration.store import CalibrationStore, UnreadableCalibrationError, parse_config_map_name
from carpool_predictor.predict import predict
from carpool_predictor.tracing.source import SubprocessTracer, features_of
from click.core import ParameterSource

from carpool_extender.explain.explain import Answer, NoSuchJobError, explain_job
from carpool_extender.explain.explain import what_if as answer_what_if
from carpool_extender.explain.queue_forecast import Options
from carpool_extender.framework.diagnosis import broken
from carpool_extender.framework.scores import SchedulerConfig, UnknownPolicyError, find_policy
from carpool_extender.settings import AskSettings, parse_tenancy_groups
from carpool_extender.workloads import JobOptions

STDIN = Path("-")
"""The path of standard input."""
_UNCHECKED_RULES = re.compile(
    r"\s*(?:, |\* )?<nil>: Invalid value: \"?null\"?: some validation rules were not checked[^,\]\n]*"
)
"""Text that the API server appends to a refusal if CEL rules could not run."""


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
    for field, expected in (("kind", "GpuTrainingJob"), ("apiVersion", GROUP_VERSION)):
        if found.get(field) != expected:
            raise ManifestError(f"{path}: expected {field} {expected}, found {found.get(field) or 'none'}")
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
    except Conflict:
        notes.append("a job of this name exists already; this answer is for another one with this manifest")
    except Forbidden:
        unchecked.append(
            "not checked: whether the API server would accept the manifest (you may not create gputrainingjobs in "
            f"namespace {metadata['namespace']})"
        )
    try:
        return CheckedManifest(msgspec.convert({**body, "status": {}}, GpuTrainingJob), notes, unchecked)
    except msgspec.ValidationError as error:
        raise ManifestError(describe_decode_error(str(error))) from error


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
            learned = learned.for_gpus(simulated).for_namespace(job.metadata.namespace)
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


class SiteSettings(NamedTuple):
    """The settings that hold for an answer."""

    settings: AskSettings
    note: str
    """A sentence with the settings that differ from the defaults, and their source."""


async def read_site_settings(api: KubeApi, asked: AskSettings, flags: frozenset[str]) -> SiteSettings:
    """Return the caller's settings, and for all that the caller did not set, those in the chart's ConfigMap.

    The flags that the caller set win over the ConfigMap, which is read with the caller's rights.

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
            find_policy(merged.policy)
            merged.conditions.conditions()
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
    return SiteSettings(settings, f"settings: {'; '.join(parts)}")


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


class UnansweredError(click.ClickException):
    """The question cannot be answered: exit code 2, as for wrong options. A negative answer exits with 1."""

    exit_code = 2


_ALL = click.option("--all", "each_gpu", is_flag=True, help="Print every GPU on a line of its own.")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


def _valid_name(_: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    if name is None or _NAME.fullmatch(name):
        return name
    what = "a job" if parameter.name == "job" else "a namespace"
    first, slash, last = name.partition("/")
    hint = f"; did you mean {last} -n {first}?" if slash and what == "a job" else ""
    raise click.BadParameter(f"expected the name of {what}, of small letters, digits, - and ., found {name!r}{hint}")


_NAMESPACE = click.option(
    "-n",
    "--namespace",
    callback=_valid_name,
    help="The job's namespace; that of the kubeconfig's context when left out.",
)


@click.command("explain", short_help="Explain where a job is, and why not elsewhere.")
@click.argument("job", callback=_valid_name)
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def explain_command(settings: AskSettings, job: str, namespace: str | None, each_gpu: bool) -> None:
    """Explain where JOB is, why not elsewhere, and by how much each GPU fits or misses.

    For a job without a place it prints its place in the queue with its expected start, and what would have to change
    for a place now.

    The decision uses the site's settings where you may read them. Only the extender remembers which GPUs could not be
    prepared a moment ago, and at which end the order Alternate continues.
    """

    async def answer(api: KubeApi, _: AskSettings, config: SchedulerConfig, options: Options) -> Answer:
        return await explain_job(api, job, namespace or api.namespace, config, options)

    _print_answer(settings, each_gpu, answer)


@click.command("what-if", short_help="Print where a job would be placed now; nothing is created.")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def what_if(settings: AskSettings, manifest: Path, namespace: str | None, each_gpu: bool) -> None:
    """Print where the job in MANIFEST would be placed now, with which tenants and how fast; nothing is created.

    MANIFEST is a file, or - for standard input. If it names a namespace, -n may name no other.

    Exit code 1: the API server would refuse the manifest, the site does not allow the policy that the job selects, or
    no GPU of the cluster could ever run it. Exit code 2: the question could not be answered.

    The decision uses the site's settings where you may read them. Only the extender remembers which GPUs could not be
    prepared a moment ago, and at which end the order Alternate continues.
    """
    try:
        wanted = read_manifest(manifest, namespace)
    except (ManifestError, OSError) as error:
        raise UnansweredError(str(error)) from error

    async def answer(api: KubeApi, site: AskSettings, config: SchedulerConfig, options: Options) -> Answer:
        checked = await check_manifest(api, wanted)
        predictor = await job_predictor(api, site)
        options = replace(options, unchecked=checked.unchecked)
        found = await answer_what_if(api, checked.job, config, predictor.predict, options)
        return Answer([*checked.notes, *predictor.notes, *found.lines], found.is_infeasible)

    _print_answer(settings, each_gpu, answer)


def _missing_rights(settings: AskSettings) -> str:
    role = f"{settings.site.rpartition('/')[2] or 'carpool'}-view"
    return (
        "explain and what-if read jobs and GpuNodes of the whole cluster: an administrator can bind the ClusterRole "
        f"{role} by a ClusterRoleBinding (docs/security.md, Users)"
    )


def flags_given(context: click.Context) -> frozenset[str]:
    """Return the flags that the caller set, on the command line or by environment variables."""
    sources = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return frozenset(p.opts[0] for p in context.command.params if context.get_parameter_source(p.name or "") in sources)


_Question = Callable[[KubeApi, AskSettings, SchedulerConfig, Options], Awaitable[Answer]]


def _print_answer(settings: AskSettings, each_gpu: bool, question: _Question) -> None:
    clock, flags = SystemClock(), flags_given(click.get_current_context())

    async def run() -> Answer:
        find_policy(settings.policy)  # wrong flags are reported even if the cluster cannot be reached
        settings.conditions.conditions()
        async with connect(settings.kube, clock=clock) as api:
            site, note = await read_site_settings(api, settings, flags)
            config = SchedulerConfig(find_policy(site.policy), site.slots_per_gpu, site.conditions.conditions())
            job_options = JobOptions(site.job_policies, site.count_peaks, parse_tenancy_groups(site.tenancy_groups))
            options = Options(
                ServerClock(clock, api), job_options, site.queue_order, site.default_duration_seconds, each_gpu
            )
            found = await question(api, site, config, options)
            return Answer([*found.lines, note], found.is_infeasible)

    try:
        answer = asyncio.run(run())
    except Forbidden as error:
        raise UnansweredError(f"{error}; {_missing_rights(settings)}") from error
    except KubeError as error:
        raise UnansweredError(f"the cluster could not be reached: {error}") from error
    except ManifestError as error:
        raise click.ClickException(str(error)) from error
    except (NoSuchJobError, KubeConfigError, SettingsError, UnknownPolicyError) as error:
        raise UnansweredError(str(error)) from error
    # Output for another program keeps each statement on one line.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo("\n".join(answer.lines if width is None else [broken(line, width) for line in answer.lines]))
    if answer.is_infeasible:
        raise click.exceptions.Exit(1)
