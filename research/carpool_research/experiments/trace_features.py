"""Traces the simulated models again, without a GPU: `python -m carpool_research.experiments.trace_features`.

Writes the simulator's `features.json`. Run it when the traced features of a step change.
"""

import asyncio
from pathlib import Path

import click
import msgspec
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer, Precision
from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.cli import Target, parse_sample, target_of
from carpool_predictor.features import Abstention
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.process import TraceLimits
from carpool_predictor.tracing.source import SubprocessTracer
from carpool_simulator import profiles

FILE = Path(profiles.__file__).with_name("features.json")
CIFAR_CLASSES = {"cifar100": 100}
LARGE_INPUTS = ("inception", "xception")
"""Architectures that are trained on 299 x 299."""
TRANSFORMERS = {
    "radrm/BERT_base/Wiki/32": ("transformers/bert-base-uncased", 512),
    "radrm/BERT_large/Wiki/8": ("transformers/bert-large-uncased", 512),
    "radrm/xlnet_base/Wiki/8": ("transformers/xlnet-base-cased", 512),
    "radrm/xlnet_large/Wiki/4": ("transformers/xlnet-large-cased", 512),
    "radrm/gpt2_large/Wiki/8": ("transformers/gpt2-large", 512),
}
"""Hub name and tokens of a sample. The lengths are not published; 512 is BERT's limit. The optimizer is AdamW, as in
the published training scripts, and every GPU has the published batch size."""
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


def text_features(kind: str) -> ModelFeatures:
    """Trace a transformer of `TRANSFORMERS` at its own batch size, which the store does not have."""
    name, tokens = TRANSFORMERS[kind]
    training = Training(batch_size=int(kind.rpartition("/")[2]), optimizer=Optimizer.ADAMW, precision=Precision.FP32)
    return trace_recipe(recipe_of(CatalogModel(name=name, input=[tokens])), training)


def image_target(kind: str, known: ModelFeatures) -> Target:
    """Return the trace request of a CNN, with the training of its present features."""
    shape, classes = input_of(kind)
    batch = known.steps[-1].batch_size
    training = Training(batch_size=batch, optimizer=known.optimizer, precision=known.precision)
    return target_of(known.name, [parse_sample(shape)], classes, training)


async def traced(target: Target) -> ModelFeatures | Abstention:
    """Return the features; traces the model unless the store has them."""
    return target if isinstance(target, ModelFeatures) else await SubprocessTracer(LIMITS).run(target)


@click.command(help=__doc__)
@click.option("--only", default="", help="Only kinds that begin with this text.")
def main(only: str) -> None:
    """Trace every kind in the file, and write the file after each."""
    found = msgspec.json.decode(FILE.read_bytes(), type=dict[str, ModelFeatures])
    for kind in [*found, *(TRANSFORMERS.keys() - found.keys())]:
        if not kind.startswith(only):
            continue
        if kind in TRANSFORMERS:
            features: ModelFeatures | Abstention = text_features(kind)
        else:
            features = asyncio.run(traced(image_target(kind, found[kind])))
        if isinstance(features, Abstention):
            raise click.ClickException(f"{kind}: {features.message}")
        found[kind] = features
        FILE.write_bytes(msgspec.json.encode(found, order="sorted") + b"\n")
        click.echo(f"{kind}: {features.steps[-1].reserved_bytes:,} bytes reserved")


if __name__ == "__main__":
    main()
