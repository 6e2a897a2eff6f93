"""`carpool explain` and `carpool what-if`: the scheduler's own decision on a live cluster, with the asker's rights."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
from carpool_core.clock import Clock, SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.config import KubeConfigError
from carpool_core.kube.errors import KubeError
from carpool_core.products import PRODUCTS, hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode, Reservation
from carpool_core.settings import SettingsError, click_options
from carpool_core.values import GpuUuid, JobUid, PodUid
from carpool_predictor.estimator import predict
from carpool_predictor.source import SubprocessTracer, features_of

from carpool_extender.answers import lines, with_own
from carpool_extender.applicant import Applicant
from carpool_extender.assessments import Assessments
from carpool_extender.cluster import Cluster
from carpool_extender.decide import best_place, explain
from carpool_extender.gangs import Gangs
from carpool_extender.measured import seconds
from carpool_extender.policies import UnknownPolicyError, find_policy
from carpool_extender.rules import Rules
from carpool_extender.settings import AskSettings
from carpool_extender.standing import Standing
from carpool_extender.watches import JobRow
from carpool_extender.workloads import NotOurs, applicant_of

Predictor = Callable[[GpuTrainingJob, list[str]], Awaitable[GpuTrainingJob]]


@dataclass(frozen=True)
class Asker:
    """Who asks."""

    clock: Clock
    job_policies: bool = False
    """Whether the site lets jobs choose their policy."""
    each_gpu: bool = False
    """Whether to tell of every GPU on a line of its own, where the same is to be said of many."""


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one moment: what the extender knows of it, but its rests of GPUs that could not be prepared."""

    cluster: Cluster

    def succeeded(self, job_uid: JobUid) -> int:
        """Return 0: only the pods say how many workers have done their work, and an asker need not read them."""
        return 0


def snapshot(nodes: Sequence[GpuNode], rules: Rules, clock: Clock) -> Snapshot:
    """Take in GpuNodes.

    An agent counts as silent by its heartbeat and the asker's clock: other than the extender the asker sees it once.
    """
    standing, now = Standing(clock), clock.now().timestamp()
    cluster = Cluster(rules.slots, standing)
    heard = [(seconds(node.status.heartbeat_time or "") or now, node) for node in nodes]
    for at, node in sorted(heard, key=lambda one: one[0]):
        standing.heard(node.metadata.name, node.status.heartbeat_time, max(0.0, now - at))
    for node in nodes:
        cluster.apply(node)
    return Snapshot(cluster)


async def explained(api: KubeApi, name: str, namespace: str, rules: Rules, asker: Asker) -> list[str]:
    """Say where a job's workers are and why, and of every GPU what the decision would be without them.

    Raises:
        KubeError: The job or the GpuNodes could not be read.
    """
    job = await api.get(GPU_TRAINING_JOBS, name, JobRow, namespace=namespace)
    told, without, own_gpus = [], [], set()
    for node in await _nodes(api):
        own = [r for r in node.spec.reservations if r.job_uid == job.metadata.uid]
        told += [
            f"{r.pod_name} has a place on {node.metadata.name}: {r.reason or 'no reason was written'}" for r in own
        ]
        own_gpus |= {uuid for r in own for uuid in r.gpu_uuids}
        without.append(_without(node, own))
    try:
        applicant = applicant_of(job, allowed=asker.job_policies)
    except NotOurs as refusal:
        return [*told, str(refusal)]
    seen = snapshot(without, rules, asker.clock)
    if not told:
        waits = _gang(seen, applicant, rules)
        told = [f"{namespace}/{name} has no place yet", *([waits] if waits else [])]
    return [*told, *_gpus(seen.cluster, applicant, rules, asker, frozenset(own_gpus))]


async def asked(api: KubeApi, job: GpuTrainingJob, rules: Rules, predictor: Predictor, asker: Asker) -> list[str]:
    """Say where a job would go now, beside whom and how fast; nothing is created."""
    nodes = await _nodes(api)
    products = {hardware_name(device.product) for node in nodes for device in node.status.devices}
    known = await predictor(job, sorted(products))
    prediction = known.status.prediction
    told = (
        [] if prediction is None else [f"prediction: {prediction.outcome} ({prediction.reason}) {prediction.message}"]
    )
    try:
        applicant = applicant_of(msgspec.convert(msgspec.to_builtins(known), JobRow), allowed=asker.job_policies)
    except NotOurs as refusal:
        return [*told, str(refusal)]
    seen = snapshot(nodes, rules, asker.clock)
    found, waits = best_place(seen.cluster.view(), applicant, rules), _gang(seen, applicant, rules)
    if found is None or waits:
        told.append(f"would have to wait now{f': {waits}' if waits else ''}")
    else:
        told.append(f"would go to {found[0]}: {found[1].reason}")
    return [*told, *_gpus(seen.cluster, applicant, rules, asker)]


def _without(node: GpuNode, own: Sequence[Reservation]) -> GpuNode:
    """Return a node as if some pods were not there; what they use would be a stranger's without their reservations."""
    left = [r for r in node.spec.reservations if r not in own]
    pods = {r.pod_uid for r in own}
    tenants = [tenant for tenant in node.status.tenants if tenant.pod_uid not in pods]
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, reservations=left),
        status=msgspec.structs.replace(node.status, tenants=tenants),
    )


def _gang(seen: Snapshot, applicant: Applicant, rules: Rules) -> str | None:
    """Say why all of a job's workers have to wait until they all fit; None where they need not."""
    return Gangs(seen, Assessments(seen.cluster, rules), rules).refusal(applicant, PodUid(""))


def _gpus(
    cluster: Cluster, applicant: Applicant, rules: Rules, asker: Asker, own: frozenset[GpuUuid] = frozenset()
) -> list[str]:
    found = with_own(explain(cluster.view(), applicant, sorted(cluster.nodes), rules), own)
    told = lines(found, each=asker.each_gpu)
    return [f"  {line}" for line in told] or ["  no node reports GPUs; is the node agent running?"]


async def _nodes(api: KubeApi) -> list[GpuNode]:
    found, token = [], ""
    while True:
        page = await api.list_page(GPU_NODES, Selector(), continue_token=token)
        found += [msgspec.json.decode(item, type=GpuNode) for item in page.items]
        token = page.continue_token
        if not token:
            return found


async def traced(job: GpuTrainingJob, products: list[str]) -> GpuTrainingJob:
    """Predict a job that was never submitted, on the products of the cluster, as the operator would."""
    features = await features_of(job.spec.model, job.spec.training, SubprocessTracer())
    known = [product for product in PRODUCTS if product.name in products]
    prediction = predict(features, job.spec.training, known)
    return msgspec.structs.replace(job, status=msgspec.structs.replace(job.status, prediction=prediction))


_ALL = click.option("--all", "each_gpu", is_flag=True, help="Tell of every GPU on a line of its own.")
_NAMESPACE = click.option("-n", "--namespace", default="default", show_default=True, help="The job's namespace.")


@click.command("explain")
@click.argument("job")
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def explain_command(settings: AskSettings, job: str, namespace: str, each_gpu: bool) -> None:
    """Say why JOB is where it is, why not elsewhere, and by how much each GPU fits or misses.

    Decides as the extender does where it is told the same settings; only that a GPU could not be prepared a moment ago
    the extender alone remembers.
    """
    _say(settings, each_gpu, lambda api, rules, asker: explained(api, job, namespace, rules, asker))


@click.command("what-if")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_NAMESPACE
@_ALL
@click_options(AskSettings)
def what_if(settings: AskSettings, manifest: Path, namespace: str, each_gpu: bool) -> None:
    """Say where the job in MANIFEST would go now, beside whom and how fast; nothing is created.

    Decides as the extender does where it is told the same settings; only that a GPU could not be prepared a moment ago
    the extender alone remembers.
    """
    try:
        job = msgspec.yaml.decode(manifest.read_bytes(), type=GpuTrainingJob)
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{manifest}: expected a GpuTrainingJob: {error}") from error
    meta = msgspec.structs.replace(job.metadata, namespace=job.metadata.namespace or namespace)
    named = msgspec.structs.replace(job, metadata=meta)
    _say(settings, each_gpu, lambda api, rules, asker: asked(api, named, rules, traced, asker))


def _say(settings: AskSettings, each_gpu: bool, ask: Callable[[KubeApi, Rules, Asker], Awaitable[list[str]]]) -> None:
    clock = SystemClock()

    async def run() -> list[str]:
        rules = Rules(find_policy(settings.policy), settings.slots_per_gpu, settings.conditions.conditions())
        async with connect(settings.kube, clock=clock) as api:
            return await ask(api, rules, Asker(clock, settings.job_policies, each_gpu))

    try:
        told = asyncio.run(run())
    except KubeError as error:
        raise click.ClickException(f"the cluster could not be asked: {error}") from error
    except (KubeConfigError, SettingsError, UnknownPolicyError) as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(told))
