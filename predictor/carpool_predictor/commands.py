"""`carpool predict` and `carpool graph`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from carpool_core.products import PRODUCTS, GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import Prediction
from carpool_core.values import Optimizer, Precision
from rich.console import Console

from carpool_predictor.abstention import Abstention
from carpool_predictor.estimator import predict as predict_on
from carpool_predictor.show import as_json, as_table
from carpool_predictor.source import SubprocessTracer, TraceLimits
from carpool_predictor.targets import Target, TargetError, parse_shape, target_of, write_features

_TARGET_HELP = """MODEL is timm/NAME, torchvision/NAME, FILE.py:FACTORY (a function without arguments that returns an
nn.Module), or a features file that `carpool graph` wrote."""


class InputError(click.ClickException):
    """The command's input is wrong, or there is no answer to it."""

    exit_code = 2


@dataclass(frozen=True)
class Question:
    """What both commands are asked about."""

    model: str
    target: Target
    training: Training
    limits: TraceLimits


def question_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and options that say what is trained, and how far tracing may go."""
    options = (
        click.argument("model"),
        click.option(
            "--input", "shape", metavar="C,H,W", help="Shape of one sample. The catalog model's own if absent."
        ),
        click.option(
            "--num-classes", type=click.IntRange(1, 1_000_000), help="Outputs of a catalog model's classifier."
        ),
        click.option("--batch-size", type=click.IntRange(1, 1_000_000), default=32, show_default=True),
        click.option(
            "--optimizer", type=click.Choice([o.value for o in Optimizer]), default="adamw", show_default=True
        ),
        click.option("--precision", type=click.Choice([p.value for p in Precision]), default="fp32", show_default=True),
        click.option("--activation-checkpointing", is_flag=True, help="Recompute activations instead of keeping them."),
        click.option("--trace-timeout", type=float, default=120, show_default=True, help="Seconds for tracing."),
        click.option("--trace-memory", type=int, default=4096, show_default=True, help="MiB for tracing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _question(options: dict[str, Any]) -> Question:
    training = Training(
        batch_size=options["batch_size"],
        optimizer=Optimizer(options["optimizer"]),
        precision=Precision(options["precision"]),
        activation_checkpointing=options["activation_checkpointing"],
    )
    try:
        target = target_of(options["model"], parse_shape(options["shape"]), options["num_classes"], training)
    except TargetError as e:
        raise InputError(str(e)) from e
    limits = TraceLimits(timeout_s=options["trace_timeout"], memory_mib=options["trace_memory"])
    return Question(options["model"], target, training, limits)


def _features(question: Question) -> ModelFeatures | Abstention:
    if isinstance(question.target, ModelFeatures):
        return question.target
    target = question.target

    async def trace() -> ModelFeatures | Abstention:
        return await SubprocessTracer(question.limits).run(target)

    return asyncio.run(trace())


def _products(gpu: str) -> list[GpuProduct]:
    if gpu == "all":
        return list(PRODUCTS)
    try:
        return [find_product(gpu)]
    except UnknownProductError as e:
        raise InputError(str(e)) from e


@click.command(help="Predict memory, activity and step time of a training job. No GPU is needed.\n\n" + _TARGET_HELP)
@question_options
@click.option("--gpu", default="all", show_default=True, help="GPU product, an unambiguous part of its name, or `all`.")
@click.option("--json", "json_output", is_flag=True, help="Print JSON, units in the names.")
def predict(gpu: str, json_output: bool, **options: Any) -> None:
    """Trace, predict, print; exit code 2 where there is no prediction."""
    products, question = _products(gpu), _question(options)
    prediction = predict_on(_features(question), question.training, products)
    if json_output:
        click.echo(msgspec.json.encode(as_json(question.model, prediction)))
    elif prediction.outcome == "Predicted":
        console = Console()
        console.print(as_table(_title(question), prediction, width=console.width))
    if prediction.outcome == "Abstained":
        raise InputError(_refusal(prediction))


def _title(question: Question) -> str:
    training = question.training
    return f"{question.model}, batch {training.batch_size}, {training.optimizer}, {training.precision}"


def _refusal(prediction: Prediction) -> str:
    return f"no prediction ({prediction.reason}): {prediction.message}"


@click.command(help="Print a model's features, to paste under spec.model of a GpuTrainingJob.\n\n" + _TARGET_HELP)
@question_options
def graph(**options: Any) -> None:
    """Trace and print."""
    found = _features(_question(options))
    if isinstance(found, Abstention):
        raise InputError(f"no features ({found.reason}): {found.message}")
    click.echo(write_features(found), nl=False)
