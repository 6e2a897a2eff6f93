"""Traces the simulated models again, without a GPU: `python -m carpool_extender.simulation.trace_features`.

Writes `features.json` beside this module. To be run whenever what the predictor wants to know of a step changes.
"""

import asyncio
from pathlib import Path

import click
import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_predictor.abstention import Abstention
from carpool_predictor.source import SubprocessTracer, TraceLimits
from carpool_predictor.targets import parse_shape, target_of

FILE = Path(__file__).with_name("features.json")
CIFAR_CLASSES = {"cifar100": 100}
LARGE_INPUTS = ("inception", "xception")
"""Architectures that are trained on 299 x 299."""
LIMITS = TraceLimits(timeout_s=1800, memory_mib=8192)


def input_of(kind: str) -> tuple[str, int]:
    """Return shape and classes of a kind's samples: `radrm/resnet50/ImageNet/64`, `lucid/ResNet18/32/0`."""
    source, model, third, *_ = kind.split("/")
    if source == "lucid":
        return "3,32,32", 10
    if third in CIFAR_CLASSES:
        return "3,32,32", CIFAR_CLASSES[third]
    size = 299 if any(name in model.lower() for name in LARGE_INPUTS) else 224
    return f"3,{size},{size}", 1000


async def traced(kind: str, known: ModelFeatures) -> ModelFeatures | Abstention:
    """Trace one kind with the training that its features are of."""
    shape, classes = input_of(kind)
    batch = known.steps[-1].batch_size
    training = Training(batch_size=batch, optimizer=known.optimizer, precision=known.precision)
    target = target_of(known.name, parse_shape(shape), classes, training)
    return target if isinstance(target, ModelFeatures) else await SubprocessTracer(LIMITS).run(target)


@click.command(help=__doc__)
@click.option("--only", default="", help="Only kinds that begin so.")
def main(only: str) -> None:
    """Trace every kind that the file has, and write it again after each."""
    found = msgspec.json.decode(FILE.read_bytes(), type=dict[str, ModelFeatures])
    for kind, known in found.items():
        if not kind.startswith(only):
            continue
        features = asyncio.run(traced(kind, known))
        if isinstance(features, Abstention):
            raise click.ClickException(f"{kind}: {features.message}")
        found[kind] = features
        FILE.write_bytes(msgspec.json.encode(found, order="sorted") + b"\n")
        click.echo(f"{kind}: {features.steps[-1].reserved_bytes:,} bytes reserved")


if __name__ == "__main__":
    main()
