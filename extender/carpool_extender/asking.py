"""`carpool explain` and `carpool what-if`: the scheduler's own decision on a live cluster, with the asker's rights."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import msgspec
from carpool_core.clock import SystemClock
from carpool_core.kube.api import GPU_NODES, GPU_TRAINING_JOBS, KubeApi, Selector
from carpool_core.kube.client import connect
from carpool_core.kube.errors import KubeError
from carpool_core.products import PRODUCTS, hardware_name
from carpool_core.resources.job import GpuTrainingJob
from carpool_core.resources.node import GpuNode
from carpool_core.settings import KubeSettings, click_options
from carpool_predictor.estimator import predict
from carpool_predictor.source import SubprocessTracer, features_of

from carpool_extender.applicant import Applicant
from carpool_extender.cluster import Cluster
from carpool_extender.decide import best_place, explain
from carpool_extender.policies import POLICIES, find_policy
from carpool_extender.rules import Rules
from carpool_extender.watches import JobRow
from carpool_extender.workloads import demand_of_row

Predictor = Callable[[GpuTrainingJob, list[str]], Awaitable[GpuTrainingJob]]


async def explained(api: KubeApi, name: str, namespace: str, rules: Rules) -> list[str]:
    """Say where a job's workers are and why, and of every GPU what the decision would be without them.

    Raises:
        KubeError: The job or the GpuNodes could not be read.
    """
    job = await api.get(GPU_TRAINING_JOBS, name, JobRow, namespace=namespace)
    told, cluster = [], Cluster(rules.slots)
    for node in await _nodes(api):
        own = [r for r in node.spec.reservations if r.job_uid == job.metadata.uid]
        told += [
            f"{r.pod_name} has a place on {node.metadata.name}: {r.reason or 'no reason was written'}" for r in own
        ]
        left = [r for r in node.spec.reservations if r not in own]
        spec = msgspec.structs.replace(node.spec, reservations=left)
        cluster.apply(msgspec.structs.replace(node, spec=spec))
    told = told or [f"{namespace}/{name} has no place yet"]
    return [*told, *_gpus(cluster, Applicant(demand_of_row(job)), rules)]


async def asked(api: KubeApi, job: GpuTrainingJob, rules: Rules, predictor: Predictor) -> list[str]:
    """Say where a job would go now, beside whom and how fast; nothing is created."""
    cluster = Cluster(rules.slots)
    products = set()
    for node in await _nodes(api):
        cluster.apply(node)
        products |= {hardware_name(device.product) for device in node.status.devices}
    known = await predictor(job, sorted(products))
    row = msgspec.convert(msgspec.to_builtins(known), JobRow)
    prediction = known.status.prediction
    told = (
        [] if prediction is None else [f"prediction: {prediction.outcome} ({prediction.reason}) {prediction.message}"]
    )
    applicant = Applicant(demand_of_row(row))
    found = best_place(cluster.view(), applicant, rules)
    told.append("would have to wait now" if found is None else f"would go to {found[0]}: {found[1].reason}")
    return [*told, *_gpus(cluster, applicant, rules)]


def _gpus(cluster: Cluster, applicant: Applicant, rules: Rules) -> list[str]:
    found = explain(cluster.view(), applicant, sorted(cluster.nodes), rules)
    return [f"  {line}" for line in found] or ["  no node reports GPUs; is the node agent running?"]


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


_POLICY = click.option(
    "--policy", type=click.Choice([*POLICIES]), default="least-slowdown", show_default=True, help="The scheduler's."
)
_SLOTS = click.option("--slots-per-gpu", "slots", default=8, show_default=True, help="Most tenants of one GPU.")
_NAMESPACE = click.option("-n", "--namespace", default="default", show_default=True, help="The job's namespace.")


@click.command("explain")
@click.argument("job")
@_NAMESPACE
@_POLICY
@_SLOTS
@click_options(KubeSettings)
def explain_command(settings: KubeSettings, job: str, namespace: str, policy: str, slots: int) -> None:
    """Say why JOB is where it is, why not elsewhere, and by how much each GPU fits or misses."""
    _say(settings, lambda api: explained(api, job, namespace, Rules(find_policy(policy), slots)))


@click.command("what-if")
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_NAMESPACE
@_POLICY
@_SLOTS
@click_options(KubeSettings)
def what_if(settings: KubeSettings, manifest: Path, namespace: str, policy: str, slots: int) -> None:
    """Say where the job in MANIFEST would go now, beside whom and how fast; nothing is created."""
    try:
        job = msgspec.yaml.decode(manifest.read_bytes(), type=GpuTrainingJob)
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{manifest}: expected a GpuTrainingJob: {error}") from error
    meta = msgspec.structs.replace(job.metadata, namespace=job.metadata.namespace or namespace)
    named = msgspec.structs.replace(job, metadata=meta)
    _say(settings, lambda api: asked(api, named, Rules(find_policy(policy), slots), traced))


def _say(settings: KubeSettings, ask: Callable[[KubeApi], Awaitable[list[str]]]) -> None:
    async def run() -> list[str]:
        async with connect(settings, clock=SystemClock()) as api:
            return await ask(api)

    try:
        lines = asyncio.run(run())
    except KubeError as error:
        raise click.ClickException(f"the cluster could not be asked: {error}") from error
    click.echo("\n".join(lines))
