"""`carpool predict` and `carpool graph`."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from carpool_core.products import PRODUCTS, GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.values import Optimizer, Precision
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carpool_predictor.catalog import store
from carpool_predictor.catalog.names import LIBRARIES
from carpool_predictor.features import Abstention, MalformedError
from carpool_predictor.rows import Tally
from carpool_predictor.tracing.process import FactoryModel, TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer

Target = ModelFeatures | TraceRequest


class TargetError(ValueError):
    """The target is invalid; the message says what was expected."""


def parse_shape(text: str | None) -> list[int] | None:
    """Return the shape in a text such as `3,224,224`; None for None.

    Raises:
        TargetError: The text is not a list of one to four positive whole numbers.
    """
    if text is None:
        return None
    try:
        shape = [int(part) for part in text.split(",")]
    except ValueError as e:
        raise TargetError(f"--input expects the shape of one sample, such as 3,224,224; found {text!r}") from e
    if min(shape) < 1 or len(shape) > 4:
        raise TargetError(f"--input expects one to four positive sizes, such as 3,224,224; found {text!r}")
    return shape


def target_of(what: str, shape: list[int] | None, num_classes: int | None, training: Training) -> Target:
    """Return the features or the trace request that a name on the command line denotes.

    Raises:
        TargetError: The name has no known form, or a file cannot be read.
    """
    if what.endswith((".yaml", ".yml", ".json")):
        if shape is not None or num_classes is not None:
            raise TargetError(
                f"expected neither --input nor --num-classes beside the features file {what}, which was traced with "
                "its own; leave them out, or trace the model again with `carpool graph`"
            )
        return read_features(Path(what))
    path, colon, function = what.rpartition(":")
    if colon:
        if not Path(path).is_file() or not path.endswith(".py"):
            raise TargetError(f"expected a Python file before the colon of {what!r}, found no such file")
        if num_classes is not None:
            raise TargetError(f"--num-classes is for catalog models; {what} builds its classifier itself: leave it out")
        if shape is None:
            raise TargetError(f"{what} needs --input, the shape of one sample, such as --input 3,224,224")
        return TraceRequest(factory=FactoryModel(path=path, function=function, input=shape), training=training)
    library, _, name = what.partition("/")
    if not name or library not in LIBRARIES:
        raise TargetError(
            "expected timm/NAME, torchvision/NAME, transformers/NAME, FILE.py:FACTORY or a features "
            f"file (.yaml), found {what!r}{_meant(what)}"
        )
    source: dict[str, Any] = {"name": what, "input": shape, "numClasses": num_classes}
    try:
        catalog = msgspec.convert({k: v for k, v in source.items() if v is not None}, type=CatalogModel)
    except msgspec.ValidationError as e:
        raise TargetError(f"expected a catalog model such as timm/resnet50, found {what!r}: {e}") from e
    return TraceRequest(model=ModelSource(catalog=catalog), training=training)


def _meant(what: str) -> str:
    known = [f"{library}/{what}" for library in LIBRARIES if store.shipped().family(f"{library}/{what}") is not None]
    return f"; did you mean {' or '.join(known)}?" if known else ""


def read_features(path: Path) -> ModelFeatures:
    """Return the features in a file by `carpool graph`, alone or under the key `features`.

    Raises:
        TargetError: The file cannot be read or does not hold features.
    """
    try:
        content = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise TargetError(f"cannot read features from {path}: {e}") from e
    if isinstance(content, dict) and set(content) == {"features"}:
        content = content["features"]
    try:
        return msgspec.convert(content, type=ModelFeatures)
    except msgspec.ValidationError as e:
        raise TargetError(f"{path} does not hold features as `carpool graph` writes them: {e}") from e


def write_features(features: ModelFeatures) -> str:
    """Return a YAML block to paste under `spec.model`."""
    return msgspec.yaml.encode({"features": msgspec.to_builtins(features)}, order=None).decode()


if TYPE_CHECKING:
    from carpool_predictor.calibration.document import Calibration

_TARGET_HELP = """MODEL is timm/NAME, torchvision/NAME, transformers/NAME, FILE.py:FACTORY (a function without
arguments that returns an nn.Module), or a features file that `carpool graph` wrote."""


STDOUT = 1
"""File descriptor of the standard output."""
SHOWN_AFTER_S = 0.2
"""Seconds after which a terminal shows that a trace is running."""
_OF_ROWS = frozenset({"rows", "out", "calibration", "trace_timeout", "trace_memory"})
"""Options that apply to a file of rows."""


class InputError(click.ClickException):
    """The input is invalid, or there is no prediction for it."""

    exit_code = 2


@dataclass(frozen=True)
class PredictRequest:
    """Arguments of both commands."""

    model: str
    target: Target
    training: Training
    limits: TraceLimits


def request_options(*, is_model_required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the argument and the options for model, training and limits of tracing."""
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


def _request(options: dict[str, Any]) -> PredictRequest:
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
    return PredictRequest(options["model"], target, training, _limits(options))


def _limits(options: dict[str, Any]) -> TraceLimits:
    return TraceLimits(timeout_s=options["trace_timeout"], memory_mib=options["trace_memory"])


def _features(request: PredictRequest, meanwhile: Callable[[], None] = lambda: None) -> ModelFeatures | Abstention:
    target = request.target
    if isinstance(target, ModelFeatures):
        return target
    import asyncio

    async def traced() -> ModelFeatures | Abstention:
        tracing = asyncio.create_task(SubprocessTracer(request.limits).run(target))
        try:
            await asyncio.to_thread(meanwhile)
        except MalformedError:
            tracing.cancel()
            await asyncio.gather(tracing, return_exceptions=True)  # the trace may have failed for the same reason
            raise
        await asyncio.wait({tracing}, timeout=SHOWN_AFTER_S)
        if tracing.done() or not sys.stderr.isatty():
            return await tracing
        from carpool_predictor.cli import waiting

        with waiting(f"tracing {request.model} …"):
            return await tracing

    return asyncio.run(traced())


def _load() -> None:
    """Load all models and stores, while another process traces."""
    from carpool_predictor.catalog import store
    from carpool_predictor.models import activity, memory, step_time

    importlib.import_module("carpool_predictor.report")
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
    "answered with one line. An invalid row is answered with status `error`; the others go on, and the exit code is 2 "
    "at the end.",
)
@request_options(is_model_required=False)
@click.option(
    "--steps", type=click.IntRange(1, 10**12), help="Steps of the whole training, to show its duration alone."
)
@click.option("--gpu", default="all", show_default=True, help="GPU product, an unambiguous part of its name, or `all`.")
@click.option("--json", "json_output", is_flag=True, help="Print JSON, units in the names.")
@click.option("--calibration", type=click.Path(path_type=Path, dir_okay=False), help="Calibration document, as JSON.")
@click.option("--rows", type=click.Path(path_type=Path, dir_okay=False), help="File of rows, one JSON object a line.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), default=Path("-"), show_default=True,
    help="File for the answers to --rows; - is the standard output.",
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
    """Trace, predict and print; exit code 2 if there is no prediction."""
    if (rows is None) == (options["model"] is None):
        raise InputError("expected either MODEL or --rows, found " + ("neither" if rows is None else "both"))
    try:
        if rows is not None:
            _refuse_ignored(context)
            _predict_rows(rows, out, _limits(options), calibration)
        elif _is_given(context, "out"):
            raise InputError("--out is for the answers to --rows; send the answer for one MODEL on with > FILE")
        else:
            _predict_one(_request(options), _products(gpu), calibration, json_output=json_output)
    except MalformedError as e:
        raise InputError(str(e)) from e


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _refuse_ignored(context: click.Context) -> None:
    """Refuse options that the rows themselves contain, because they would be ignored."""
    given = {option.name: option.opts[0] for option in context.command.params if _is_given(context, option.name or "")}
    if ignored := [flag for name, flag in given.items() if name not in _OF_ROWS]:
        raise InputError(
            f"expected no {', '.join(ignored)} beside --rows, where each row says for itself what is trained on which "
            "GPU, and the answers are JSON; write it into the rows"
        )


def _predict_one(
    request: PredictRequest, products: list[GpuProduct], calibration: Path | None, *, json_output: bool
) -> None:
    learned = None if calibration is None else _learned(calibration)
    features = _features(request, _load)
    from carpool_predictor.predict import prepare
    from carpool_predictor.report import as_json, report_on

    report = report_on(request.model, prepare(features, request.training), products, learned)
    prediction = report.prediction
    if json_output:
        click.echo(msgspec.json.encode(as_json(report)))
    elif prediction.outcome == "Predicted":
        from rich.console import Console

        from carpool_predictor.report import as_text

        console = Console()
        console.print(as_text(_title(request), report, width=console.width))
    if prediction.outcome == "Abstained":
        raise InputError(f"no prediction ({prediction.reason}): {prediction.message}")


def _learned(path: Path) -> "Calibration":
    from carpool_predictor.calibration.document import read_calibration

    try:
        return read_calibration(path.read_bytes())
    except OSError as e:
        raise InputError(f"cannot read {path}: {e}") from e


def _title(request: PredictRequest) -> str:
    training = request.training
    return f"{request.model}, batch {training.batch_size}, {training.optimizer}, {training.precision}"


def _predict_rows(rows: Path, out: Path, limits: TraceLimits, calibration: Path | None) -> None:
    from carpool_predictor.cli import following
    from carpool_predictor.rows import WorkerDied, predict_rows

    learned = None if calibration is None else _learned(calibration)
    _load()  # reports a broken installation before the output is opened
    try:
        if _is_same(rows, out):
            raise InputError(f"expected another file than {rows} in --out, found the same; it was left as it is")
        with rows.open("rb") as asked:
            first = next((line for line in asked if line.strip()), None)
            if first is None:
                raise InputError(f"expected rows in {rows}, one JSON object a line, found none")
            # Opening truncates the file, so that it happens last.
            with click.open_file(str(out), "wb") as answers, following(rows) as on_progress:
                tally = predict_rows(chain([first], asked), answers, limits, on_progress, calibration=learned)
    except OSError as e:
        raise InputError(f"cannot read {rows} or write {out}: {e}") from e
    except WorkerDied as e:
        raise click.ClickException(str(e)) from e
    if tally.statuses["error"]:
        raise InputError(_told(tally, rows))


def _is_same(rows: Path, out: Path) -> bool:
    """Whether input and output are the same file, by any name or link; terminals and pipes may be both."""
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
@request_options(is_model_required=True)
def graph(**options: Any) -> None:
    """Trace and print."""
    found = _features(_request(options))
    if isinstance(found, Abstention):
        raise InputError(f"no features ({found.reason}): {found.message}")
    click.echo(write_features(found), nl=False)


@contextmanager
def telling(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current item: one changing line on a terminal, one line per item elsewhere."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: console.print(f"  {what}", highlight=False, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield lambda what: status.update(escape(what))


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner on a terminal."""
    console = console or Console(stderr=True)
    with console.status(escape(what)) if console.is_terminal else nullcontext():
        yield


@contextmanager
def following(rows: Path) -> Iterator[Callable[[Tally, int], None]]:
    """Show the progress through a file; yields the callback for each answered chunk."""
    console = Console(stderr=True)
    begin = time.monotonic()
    last = Tally()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rows.stat().st_size)

        def on_progress(tally: Tally, taken: int) -> None:
            nonlocal last
            last = tally
            bar.update(task, advance=taken, description=_progress_told(tally, time.monotonic() - begin))

        yield on_progress
    if last.rows:
        console.print(_progress_told(last, time.monotonic() - begin), highlight=False)


def _progress_told(tally: Tally, took_s: float) -> str:
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.statuses.items()))
    return f"{tally.rows:,} rows ({counts}), {tally.rows / max(took_s, 1e-6):,.0f} a second"
