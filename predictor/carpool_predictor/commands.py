"""`carpool predict` and `carpool graph`."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from carpool_core.products import PRODUCTS, GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from click.core import ParameterSource

from carpool_predictor.cli.targets import Target, TargetError, parse_shape, target_of, write_features
from carpool_predictor.features.abstention import Abstention
from carpool_predictor.features.malformed import MalformedError
from carpool_predictor.tracing.source import SubprocessTracer, TraceLimits

if TYPE_CHECKING:
    from carpool_predictor.calibration.document import Calibration
    from carpool_predictor.cli.bulk import Tally

_TARGET_HELP = """MODEL is timm/NAME, torchvision/NAME, transformers/NAME, gpumemnet/LAYERS (a list of layers in the
notation of GPUMemNet's data, such as "gpumemnet/[('linear', 64, 8256), ('ReLU', 64, 0), ('linear', 10, 650)]"),
FILE.py:FACTORY (a function without arguments that returns an nn.Module), or a features file that `carpool graph`
wrote."""


STDOUT = 1
"""File descriptor of the standard output."""
SHOWN_AFTER_S = 0.2
"""What takes longer, in seconds, is told to whoever waits at a terminal."""
_OF_ROWS = frozenset({"rows", "out", "calibration", "trace_timeout", "trace_memory"})
"""Options that count for a file of rows."""


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


def question_options(*, is_model_required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the argument and options that say what is trained, and how far tracing may go."""
    options = (
        click.argument("model", required=is_model_required),
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

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _question(options: dict[str, Any]) -> Question:
    training = Training(
        batch_size=options["batch_size"],
        optimizer=Optimizer(options["optimizer"]),
        precision=Precision(options["precision"]),
        activation_checkpointing=options["activation_checkpointing"],
        steps=options.get("steps"),
    )
    try:
        target = target_of(options["model"], parse_shape(options["shape"]), options["num_classes"], training)
    except TargetError as e:
        raise InputError(str(e)) from e
    return Question(options["model"], target, training, _limits(options))


def _limits(options: dict[str, Any]) -> TraceLimits:
    return TraceLimits(timeout_s=options["trace_timeout"], memory_mib=options["trace_memory"])


def _features(question: Question, meanwhile: Callable[[], None] = lambda: None) -> ModelFeatures | Abstention:
    target = question.target
    if isinstance(target, ModelFeatures):
        return target
    import asyncio

    async def traced() -> ModelFeatures | Abstention:
        tracing = asyncio.create_task(SubprocessTracer(question.limits).run(target))
        try:
            await asyncio.to_thread(meanwhile)
        except MalformedError:
            tracing.cancel()
            await asyncio.gather(tracing, return_exceptions=True)  # it may have failed for the same file
            raise
        await asyncio.wait({tracing}, timeout=SHOWN_AFTER_S)
        if tracing.done() or not sys.stderr.isatty():
            return await tracing
        from carpool_predictor.cli.progress import waiting

        with waiting(f"tracing {question.model} …"):
            return await tracing

    return asyncio.run(traced())


def _load() -> None:
    """Load all that predicts, which takes less time than the trace that another process is busy with."""
    from carpool_predictor.catalog import store
    from carpool_predictor.cost_models import activity, memory, step_time

    importlib.import_module("carpool_predictor.cli.report")
    for shipped in (activity, memory, step_time, store):
        shipped.shipped()


def _products(gpu: str) -> list[GpuProduct]:
    if gpu == "all":
        return list(PRODUCTS)
    try:
        return [find_product(gpu)]
    except UnknownProductError as e:
        raise InputError(str(e)) from e


@click.command(
    short_help="Predict memory, activity and step time of training jobs.",
    help="Predict memory, activity and step time of a training job, or of many. No GPU is needed.\n\n"
    + _TARGET_HELP
    + '\n\nWith --rows, each line is {"id", "catalog": {"name", "input", "numClasses"} or "features", '
    '"training": {"batchSize", "optimizer", "precision", "activationCheckpointing", "steps"}, "gpu"}, and is '
    "answered with one line. A row that makes no sense is answered with status `error`; the others go on, and the exit "
    "code is 2 at the end.",
)
@question_options(is_model_required=False)
@click.option(
    "--steps", type=click.IntRange(1, 10**12), help="Steps of the whole training, to be told how long it takes alone."
)
@click.option("--gpu", default="all", show_default=True, help="GPU product, an unambiguous part of its name, or `all`.")
@click.option("--json", "json_output", is_flag=True, help="Print JSON, units in the names.")
@click.option(
    "--calibration", type=click.Path(path_type=Path, dir_okay=False), help="What finished jobs taught, as JSON."
)
@click.option("--rows", type=click.Path(path_type=Path, dir_okay=False), help="File of rows, one JSON object a line.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), default=Path("-"), show_default=True,
    help="Where the answers to --rows go; - is the standard output.",
)  # fmt: skip
@click.pass_context
def predict(
    context: click.Context,
    /,
    gpu: str,
    json_output: bool,
    calibration: Path | None,
    rows: Path | None,
    out: Path,
    **options: Any,
) -> None:
    """Trace, predict, print; exit code 2 where there is no prediction."""
    if (rows is None) == (options["model"] is None):
        raise InputError("expected either MODEL or --rows, found " + ("neither" if rows is None else "both"))
    try:
        if rows is not None:
            _refuse_ignored(context)
            _predict_rows(rows, out, _limits(options), calibration)
        elif _is_given(context, "out"):
            raise InputError("--out is for the answers to --rows; send the answer for one MODEL on with > FILE")
        else:
            _predict_one(_question(options), _products(gpu), calibration, json_output=json_output)
    except MalformedError as e:
        raise InputError(str(e)) from e


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _refuse_ignored(context: click.Context) -> None:
    """Refuse what rows say themselves: whoever gives it would believe that it counts."""
    given = {option.name: option.opts[0] for option in context.command.params if _is_given(context, option.name or "")}
    if ignored := [flag for name, flag in given.items() if name not in _OF_ROWS]:
        raise InputError(
            f"expected no {', '.join(ignored)} beside --rows, where each row says for itself what is trained on which "
            "GPU, and the answers are JSON; write it into the rows"
        )


def _predict_one(
    question: Question, products: list[GpuProduct], calibration: Path | None, *, json_output: bool
) -> None:
    learned = None if calibration is None else _learned(calibration)
    features = _features(question, _load)
    from carpool_predictor.cli.report import as_json, report_on
    from carpool_predictor.prediction.estimator import prepare

    report = report_on(question.model, prepare(features, question.training), products, learned)
    prediction = report.prediction
    if json_output:
        click.echo(msgspec.json.encode(as_json(report)))
    elif prediction.outcome == "Predicted":
        from rich.console import Console

        from carpool_predictor.cli.show import as_text

        console = Console()
        console.print(as_text(_title(question), report, width=console.width))
    if prediction.outcome == "Abstained":
        raise InputError(f"no prediction ({prediction.reason}): {prediction.message}")


def _learned(path: Path) -> "Calibration":
    from carpool_predictor.calibration.document import read_calibration

    try:
        return read_calibration(path.read_bytes())
    except OSError as e:
        raise InputError(f"cannot read {path}: {e}") from e


def _title(question: Question) -> str:
    training = question.training
    return f"{question.model}, batch {training.batch_size}, {training.optimizer}, {training.precision}"


def _predict_rows(rows: Path, out: Path, limits: TraceLimits, calibration: Path | None) -> None:
    from carpool_predictor.cli.bulk import WorkerDied, predict_rows
    from carpool_predictor.cli.progress import following

    learned = None if calibration is None else _learned(calibration)
    _load()  # what is broken is told here, before an answer is written or another process needs it
    try:
        if _is_same(rows, out):
            raise InputError(f"expected another file than {rows} in --out, found the same; it was left as it is")
        with rows.open("rb") as asked:
            first = next((line for line in asked if line.strip()), None)
            if first is None:
                raise InputError(f"expected rows in {rows}, one JSON object a line, found none")
            # Opened only now: what it held is gone.
            with click.open_file(str(out), "wb") as answers, following(rows) as on_progress:
                tally = predict_rows(chain([first], asked), answers, limits, on_progress, calibration=learned)
    except OSError as e:
        raise InputError(f"cannot read {rows} or write {out}: {e}") from e
    except WorkerDied as e:
        raise click.ClickException(str(e)) from e
    if tally.statuses["error"]:
        raise InputError(_told(tally, rows))


def _is_same(rows: Path, out: Path) -> bool:
    """Whether answers would go where rows come from, by whatever name or link; terminals and pipes can be both."""
    if not rows.is_file():
        return False
    if str(out) == "-":
        return os.path.samestat(rows.stat(), os.fstat(STDOUT))
    return out.exists() and out.samefile(rows)


def _told(tally: "Tally", rows: Path) -> str:
    return f"{tally.statuses['error']:,} of {tally.rows:,} rows of {rows} were refused; their answers say why"


@click.command(
    short_help="Print a model's features, to paste under spec.model of a job.",
    help="Print a model's features, to paste under spec.model of a GpuTrainingJob.\n\n" + _TARGET_HELP,
)
@question_options(is_model_required=True)
def graph(**options: Any) -> None:
    """Trace and print."""
    found = _features(_question(options))
    if isinstance(found, Abstention):
        raise InputError(f"no features ({found.reason}): {found.message}")
    click.echo(write_features(found), nl=False)
