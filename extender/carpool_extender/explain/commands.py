"""`carpool explain` and `carpool what-if`: the commands."""

import asyncio
import re
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec
from carpool_core.clock import SystemClock
from carpool_core.kube.api import KubeApi
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import Forbidden, KubeError, Refused
from carpool_core.products import PRODUCTS, hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.settings import SettingsError, click_options
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.calibration.run_history import model_key
from carpool_predictor.calibration.store import CalibrationStore, UnreadableCalibrationError, parse_config_map_name
from carpool_predictor.predict import predict
from carpool_predictor.tracing.source import SubprocessTracer, features_of

from carpool_extender.explain.enquiry import Answer, Asker, NoSuchJobError, asked, explained
from carpool_extender.explain.manifest import ManifestError, checked, read
from carpool_extender.explain.site import given, settled
from carpool_extender.framework.diagnosis import broken
from carpool_extender.framework.scores import SchedulerConfig, UnknownPolicyError, find_policy
from carpool_extender.settings import AskSettings
from carpool_extender.workloads import JobOptions


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts jobs that were never submitted, as the operator would."""

    calibration: Calibration | None = None
    """What the operator learned; None: as shipped."""
    is_strict: bool = False
    """Whether jobs run alone where too little was measured."""
    notes: tuple[str, ...] = ()
    """What whoever asks should know of it."""

    async def traced(self, job: GpuTrainingJob, products: list[str]) -> GpuTrainingJob:
        """Predict a job on the products of the cluster, as its nodes call them; simulated GPUs teach no hardware."""
        spec = job.spec
        features = await features_of(spec.model, spec.training, SubprocessTracer())
        names = set(map(hardware_name, products))
        known = [product for product in PRODUCTS if product.name in names]
        learned = None if self.calibration is None else self.calibration.for_gpus(names.difference(products))
        prediction = predict(features, spec.training, known, learned, model_key(spec.model), is_strict=self.is_strict)
        return msgspec.structs.replace(job, status=msgspec.structs.replace(job.status, prediction=prediction))


async def forecast(api: KubeApi, settings: AskSettings) -> Forecast:
    """Read what the operator learned, with the rights of whoever asks."""
    place = parse_config_map_name(settings.calibration)
    if place is None:
        return Forecast()
    try:
        kept = await CalibrationStore(api, *place).read()
    except Refused as error:
        note = f"predicted as shipped, because what was learned ({settings.calibration}) cannot be read: {error}"
        return Forecast(notes=(f"{note}; where nothing was measured the operator may let the job run alone",))
    except UnreadableCalibrationError as error:
        # The operator cannot read it either, and goes on with what is shipped.
        note = f"predicted as shipped, because what was learned ({settings.calibration}) cannot be read: {error}"
        return Forecast(is_strict=not settings.share_unmeasured, notes=(note,))
    # The operator takes a ConfigMap that does not exist yet for an empty one, and creates it with the first lesson.
    elsewhere = f"nothing has been learned yet, or the operator keeps it elsewhere than in {settings.calibration}"
    notes = () if kept.version else (elsewhere,)
    return Forecast(kept.calibration, is_strict=not settings.share_unmeasured, notes=notes)


class UnansweredError(click.ClickException):
    """What was asked cannot be answered; ends with 2, as click does on wrong options. An answer of no ends with 1."""

    exit_code = 2


_ALL = click.option("--all", "each_gpu", is_flag=True, help="Tell of every GPU on a line of its own.")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


def _named(_: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Refuse what can be no name: the API server would be asked for something else."""
    if name is None or _NAME.fullmatch(name):
        return name
    what = "a job" if parameter.name == "job" else "a namespace"
    first, slash, last = name.partition("/")
    hint = f"; did you mean {last} -n {first}?" if slash and what == "a job" else ""
    raise click.BadParameter(f"expected the name of {what}, of small letters, digits, - and ., found {name!r}{hint}")


_NAMESPACE = click.option(
    "-n", "--namespace", callback=_named, help="The job's namespace; that of the kubeconfig's context when left out."
)


@click.command("explain", short_help="Say why a job is where it is, and why not elsewhere.")
@click.argument("job", callback=_named)
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def explain_command(settings: AskSettings, job: str, namespace: str | None, each_gpu: bool) -> None:
    """Say why JOB is where it is, why not elsewhere, and by how much each GPU fits or misses.

    Of a job without a place it says whose turn it is, and what would have to change for it to have one now.

    Decides as the extender does, by the settings of the site where you may read them; only that a GPU could not be
    prepared a moment ago the extender alone remembers.
    """

    async def ask(api: KubeApi, _: AskSettings, rules: SchedulerConfig, asker: Asker) -> Answer:
        return await explained(api, job, namespace or api.namespace, rules, asker)

    _say(settings, each_gpu, ask, predicts=False)


@click.command("what-if", short_help="Say where a job would go now, and beside whom; nothing is created.")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def what_if(settings: AskSettings, manifest: Path, namespace: str | None, each_gpu: bool) -> None:
    """Say where the job in MANIFEST would go now, beside whom and how fast; nothing is created.

    MANIFEST is a file, or - for the standard input. Where it names a namespace, -n may name no other.

    Ends with 1 where the API server would refuse the manifest, the site does not let the job choose the policy that
    it names, or no GPU of the cluster could ever run it; with 2 where that could not be found out.

    Decides as the extender does, by the settings of the site where you may read them; only that a GPU could not be
    prepared a moment ago the extender alone remembers.
    """
    try:
        wanted = read(manifest, namespace)
    except (ManifestError, OSError) as error:
        raise UnansweredError(str(error)) from error

    async def ask(api: KubeApi, of_the_site: AskSettings, rules: SchedulerConfig, asker: Asker) -> Answer:
        found = await checked(api, wanted)
        known = await forecast(api, of_the_site)
        answer = await asked(api, found.job, rules, known.traced, replace(asker, unchecked=found.unchecked))
        return Answer([*found.notes, *known.notes, *answer.lines], answer.is_hopeless)

    _say(settings, each_gpu, ask, predicts=True)


def _may_ask(settings: AskSettings) -> str:
    role = f"{settings.site.rpartition('/')[2] or 'carpool'}-snapshot"
    return (
        "whoever asks has to read jobs and GpuNodes, which belong to the whole cluster: an administrator can bind the "
        f"ClusterRole {role} by a ClusterRoleBinding (docs/security.md, Users)"
    )


_Ask = Callable[[KubeApi, AskSettings, SchedulerConfig, Asker], Awaitable[Answer]]


def _say(settings: AskSettings, each_gpu: bool, ask: _Ask, *, predicts: bool) -> None:
    clock, flags = SystemClock(), given(click.get_current_context())

    async def run() -> Answer:
        find_policy(settings.policy)  # what was given wrongly is told whether the cluster can be reached or not
        settings.conditions.conditions()
        async with connect(settings.kube, clock=clock) as api:
            found, note = await settled(api, settings, flags, predicts=predicts)
            rules = SchedulerConfig(find_policy(found.policy), found.slots_per_gpu, found.conditions.conditions())
            choices = JobOptions(found.job_policies, found.count_peaks)
            answer = await ask(api, found, rules, Asker(clock, choices, found.queue_order, each_gpu))
            return Answer([*answer.lines, note], answer.is_hopeless)

    try:
        told = asyncio.run(run())
    except Forbidden as error:
        raise UnansweredError(f"{error}; {_may_ask(settings)}") from error
    except KubeError as error:
        raise UnansweredError(f"the cluster could not be asked: {error}") from error
    except ManifestError as error:
        raise click.ClickException(str(error)) from error
    except (NoSuchJobError, KubeConfigError, SettingsError, UnknownPolicyError) as error:
        raise UnansweredError(str(error)) from error
    # What another program reads stands on one line, however long.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo("\n".join(told.lines if width is None else [broken(line, width) for line in told.lines]))
    if told.is_hopeless:
        raise click.exceptions.Exit(1)
