"""`carpool predict` and `carpool graph`."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
import msgspec
from carpool_core.products import PRODUCTS, GpuProduct, UnknownProductError, find_product
from carpool_core.resources.features import ALL_LINEAR, Adapter, ModelFeatures, Parallelism
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.settings import InputError
from carpool_core.values import CrossEntropy, Optimizer, ParallelKind, Precision, Quantization
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from carpool_predictor.advice import Change, changed_contexts
from carpool_predictor.calibration.document import Calibration, read_calibration
from carpool_predictor.catalog import store
from carpool_predictor.catalog.hub import published
from carpool_predictor.catalog.names import LIBRARIES
from carpool_predictor.features import Abstention, MalformedError, Sample
from carpool_predictor.models import activity, memory, step_time
from carpool_predictor.optimizers import unknown_optimizer
from carpool_predictor.predict import PredictionContext, prepare
from carpool_predictor.report import as_json, as_text, report_on
from carpool_predictor.rows import WorkerDied, predict_rows
from carpool_predictor.tracing.process import FactoryModel, TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer

Target = ModelFeatures | TraceRequest


_TOKENS = "tokens:"
"""Prefix of the shape of an input of whole numbers."""


def parse_sample(text: str) -> Sample:
    """Return the input in a text such as `3,224,224`, `512` or `tokens:512`.

    Raises:
        InputError: The text is not a list of one to four positive whole numbers.
    """
    try:
        shape = tuple(int(part) for part in text.removeprefix(_TOKENS).split(","))
    except ValueError as e:
        raise InputError(f"--input expects the shape of one sample, such as 3,224,224; found {text!r}") from e
    if min(shape) < 1 or len(shape) > 4:
        raise InputError(f"--input expects one to four positive sizes, such as 3,224,224; found {text!r}")
    return Sample(shape, text.startswith(_TOKENS))


def target_of(what: str, inputs: list[Sample], num_classes: int | None, training: Training) -> Target:
    """Return the features or the trace request that a name on the command line denotes.

    Raises:
        InputError: The name is invalid, or a file cannot be read.
    """
    if what.endswith((".yaml", ".yml", ".json")):
        if inputs or num_classes is not None:
            raise InputError(
                f"expected neither --input nor --num-classes with the features file {what}, which was traced with "
                "its own values; leave them out, or trace the model again with `carpool graph`"
            )
        return read_features(Path(what))
    path, colon, function = what.rpartition(":")
    if colon:
        if not Path(path).is_file() or not path.endswith(".py"):
            raise InputError(f"expected a Python file before the colon of {what!r}, found no such file")
        if num_classes is not None:
            raise InputError(f"--num-classes is for catalog models; {what} builds its classifier itself: leave it out")
        if not inputs:
            raise InputError(
                f"{what} needs --input, the shape of one sample, such as --input 3,224,224 or --input tokens:512; once "
                "for each input of the model"
            )
        return TraceRequest(factory=FactoryModel(path=path, function=function, inputs=inputs), training=training)
    library, _, name = what.partition("/")
    if not name or library not in LIBRARIES:
        raise InputError(
            "expected timm/NAME, torchvision/NAME, transformers/NAME, FILE.py:FACTORY or a features "
            f"file (.yaml), found {what!r}{_suggestion(what)}"
        )
    if len(inputs) > 1:
        raise InputError(f"several --input are for a model of your own; {what} knows its inputs: give at most one")
    shape = list(inputs[0].shape) if inputs else None
    source: dict[str, Any] = {"name": what, "input": shape, "numClasses": num_classes}
    try:
        catalog = msgspec.convert({k: v for k, v in source.items() if v is not None}, type=CatalogModel)
    except msgspec.ValidationError as e:
        raise InputError(f"expected a catalog model such as timm/resnet50, found {what!r}: {e}") from e
    return TraceRequest(model=ModelSource(catalog=catalog), training=training)


def _suggestion(what: str) -> str:
    names = [f"{library}/{what}" for library in LIBRARIES if store.shipped().family(f"{library}/{what}") is not None]
    names += [name for name in [f"transformers/{what}"] if published(what) is not None and name not in names]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def read_features(path: Path) -> ModelFeatures:
    """Return the features in a file by `carpool graph`, alone or under the key `features`.

    Raises:
        InputError: The file cannot be read or does not hold features.
    """
    try:
        content = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise InputError(f"cannot read features from {path}: {e}") from e
    if isinstance(content, dict) and set(content) == {"features"}:
        content = content["features"]
    if isinstance(content, dict) and content.get("kind") == "GpuTrainingJob":
        raise InputError(
            f"expected a features file, found the manifest of a job in {path}: ask `carpool what-if {path}`"
        )
    try:
        return msgspec.convert(content, type=ModelFeatures)
    except msgspec.ValidationError as e:
        raise InputError(f"{path} does not hold features as `carpool graph` writes them: {e}") from e


def write_features(features: ModelFeatures) -> str:
    """Return a YAML block to paste under `spec.model`."""
    return msgspec.yaml.encode({"features": msgspec.to_builtins(features)}, order=None).decode()


_TARGET_HELP = """MODEL is timm/NAME, torchvision/NAME, transformers/NAME, FILE.py:FACTORY (a function without
arguments that returns an nn.Module), or a features file that `carpool graph` wrote."""


class OptimizerType(click.ParamType[Optimizer]):
    """An optimizer by name; an error about another name has the nearest ones."""

    name = "optimizer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Optimizer:
        """Return the optimizer."""
        try:
            return Optimizer(value)
        except ValueError:
            self.fail(unknown_optimizer(value), param, ctx)


_ROWS_OPTIONS = frozenset({"rows", "out", "calibration", "trace_timeout", "trace_memory"})
"""Options that apply to a file of rows."""


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
            "--input",
            "inputs",
            multiple=True,
            metavar="SHAPE",
            help="Shape of one sample: C,H,W of an image, such as 3,224,224, or the tokens of a text, such as 2048. "
            "The catalog model's own if absent; of text models 512 tokens. A model of your own takes tokens as "
            "tokens:512, and one --input for each of its inputs.",
        ),
        click.option(
            "--num-classes", type=click.IntRange(1, 1_000_000), help="Outputs of a catalog model's classifier."
        ),
        click.option("--batch-size", type=click.IntRange(1, 1_000_000), default=32, show_default=True),
        click.option(
            "--optimizer",
            type=OptimizerType(),
            default="adamw",
            show_default=True,
            help=f"How it runs: {', '.join(Optimizer)}.",
        ),
        click.option("--precision", type=click.Choice([p.value for p in Precision]), default="fp32", show_default=True),
        click.option("--activation-checkpointing", is_flag=True, help="Recompute activations instead of keeping them."),
        click.option(
            "--gradient-accumulation",
            type=click.IntRange(1, 100_000),
            default=1,
            show_default=True,
            help="Forward and backward passes of one step, each of --batch-size samples.",
        ),
        click.option("--lora-rank", type=click.IntRange(1, 4096), help="Train a LoRA adapter of this rank only."),
        click.option(
            "--lora-targets",
            default=ALL_LINEAR,
            show_default=True,
            metavar="NAME,…",
            help="Layers with an adapter, such as q_proj,v_proj; all-linear is every linear layer but the head.",
        ),
        click.option(
            "--lora-dropout",
            type=click.FloatRange(0, 1, max_open=True),
            default=0.0,
            show_default=True,
            help="Dropout before the adapter.",
        ),
        click.option(
            "--quantization",
            type=click.Choice([q.value for q in Quantization]),
            help="Storage of the frozen weights beside a LoRA adapter.",
        ),
        click.option(
            "--cross-entropy",
            type=click.Choice([c.value for c in CrossEntropy]),
            default="full",
            show_default=True,
            help="How a loss over tokens stores its logits: with an FP32 copy, in their own type, in chunks, or never.",
        ),
        click.option("--compile", is_flag=True, help="The model runs under torch.compile; intervals are wider."),
        click.option("--activation-offloading", is_flag=True, help="Kept activations wait in the host's memory."),
        click.option("--varying-lengths", is_flag=True, help="Batches differ in length, up to the one of --input."),
        click.option(
            "--parallelism",
            type=click.Choice([k.value for k in ParallelKind]),
            help="What --gpus GPUs divide; the answer is for each of them, without communication.",
        ),
        click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, help="GPUs that divide state."),
        click.option("--cpu-offload", is_flag=True, help="What fsdp or zero-1 to zero-3 divide is on the host."),
        click.option(
            "--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs that divide layers."
        ),
        click.option("--trace-timeout", type=float, default=120, show_default=True, help="Seconds for tracing."),
        click.option("--trace-memory", type=int, default=4096, show_default=True, help="MiB for tracing."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _adapter(options: dict[str, Any]) -> Adapter | None:
    if options["lora_rank"] is not None:
        targets = [part.strip() for part in options["lora_targets"].split(",") if part.strip()]
        return Adapter(rank=options["lora_rank"], targets=targets, dropout=options["lora_dropout"])
    if options["lora_targets"] != ALL_LINEAR or options["lora_dropout"] or options["quantization"]:
        raise InputError(
            "expected --lora-rank with --lora-targets, --lora-dropout or --quantization, because only an adapter can "
            "be trained beside frozen weights; add --lora-rank 8"
        )
    return None


def _parallelism(options: dict[str, Any]) -> Parallelism | None:
    given = {name: options[name] for name in ("gpus", "cpu_offload", "tensor_parallel")}
    kind = options["parallelism"]
    if kind is None and (given["gpus"] > 1 or given["cpu_offload"]):
        raise InputError("expected --parallelism with --gpus and --cpu-offload: ddp, fsdp or zero-1 to zero-3")
    if kind is None and given["tensor_parallel"] == 1:
        return None
    return Parallelism(kind=ParallelKind(kind or ParallelKind.DDP), **given)


def _request(options: dict[str, Any]) -> PredictRequest:
    adapter, quantization = _adapter(options), options["quantization"]
    training = Training(
        batch_size=options["batch_size"],
        optimizer=options["optimizer"],
        precision=Precision(options["precision"]),
        activation_checkpointing=options["activation_checkpointing"],
        gradient_accumulation=options["gradient_accumulation"],
        adapter=adapter,
        quantization=None if quantization is None else Quantization(quantization),
        cross_entropy=CrossEntropy(options["cross_entropy"]),
        compile=options["compile"],
        activation_offloading=options["activation_offloading"],
        varying_lengths=options["varying_lengths"],
        parallelism=_parallelism(options),
        steps=options.get("steps"),
    )
    target = target_of(options["model"], list(map(parse_sample, options["inputs"])), options["num_classes"], training)
    return PredictRequest(options["model"], target, training, _limits(options))


def _limits(options: dict[str, Any]) -> TraceLimits:
    return TraceLimits(timeout_s=options["trace_timeout"], memory_mib=options["trace_memory"])


def _features(request: PredictRequest) -> ModelFeatures | Abstention:
    if isinstance(request.target, ModelFeatures):
        return request.target
    with waiting(f"tracing {request.model} …"):
        return asyncio.run(SubprocessTracer(request.limits).run(request.target))


def _products(gpus: tuple[str, ...]) -> list[GpuProduct]:
    if "all" in gpus:
        return list(PRODUCTS)
    try:
        return list(dict.fromkeys(map(find_product, gpus)))
    except UnknownProductError as e:
        raise InputError(f"{e}; on a cluster, the node agent derives other products from NVML") from e


@click.command(
    short_help="Predict memory, activity and step time of training jobs.",
    help="Predict memory, activity and step time of a training job, or of many. No GPU is needed.\n\n"
    + _TARGET_HELP
    + "\n\nIn the tables, `MiB` is the expected peak, `at most` its bound, and `in jobs` the share of jobs below it. "
    "`learned` names the values that measurements of such models on that GPU cover; others have wider intervals."
    '\n\nWith --rows, each line is {"id", "catalog": {"name", "input", "numClasses"} or "features", '
    '"training": {"batchSize", "optimizer", "precision", "activationCheckpointing", "gradientAccumulation", '
    '"adapter": {"kind", "rank", "targets", "dropout"}, "quantization", "crossEntropy", "compile", '
    '"activationOffloading", "varyingLengths", "parallelism": {"kind", "gpus", "cpuOffload", "tensorParallel"}, '
    '"steps"}, "gpu"}, and is '
    "answered with one line. An invalid row is answered with status `error`; the others go on, and the exit code is 2 "
    "at the end.",
)
@request_options(is_model_required=False)
@click.option(
    "--steps", type=click.IntRange(1, 10**12), help="Steps of the whole training, to show its duration alone."
)
@click.option(
    "--gpu", "products", multiple=True, default=["all"], show_default=True,
    help="GPU product, an unambiguous part of its name, or `all`; once for each product.",
)  # fmt: skip
@click.option("--json", "json_output", is_flag=True, help="Print JSON, units in the names.")
@click.option(
    "--advice", is_flag=True, help="Show what activation checkpointing and other changes would save; traces each."
)
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
    products: tuple[str, ...],
    json_output: bool,
    advice: bool,
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
            raise InputError("--out is for the answers to --rows; redirect the answer for one MODEL with > FILE")
        else:
            _predict_one(
                _request(options), _products(products), calibration, json_output=json_output, is_advised=advice
            )
    except MalformedError as e:
        raise InputError(str(e)) from e


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _refuse_ignored(context: click.Context) -> None:
    """Refuse options that the rows themselves contain, because they would be ignored."""
    given = {option.name: option.opts[0] for option in context.command.params if _is_given(context, option.name or "")}
    if ignored := [flag for name, flag in given.items() if name not in _ROWS_OPTIONS]:
        raise InputError(
            f"expected no {', '.join(ignored)} with --rows, where each row names its own training and GPU, and answers "
            "are JSON; write it into the rows"
        )


def _predict_one(
    request: PredictRequest,
    products: list[GpuProduct],
    calibration: Path | None,
    *,
    json_output: bool,
    is_advised: bool,
) -> None:
    if is_advised and not isinstance(request.target, TraceRequest):
        raise InputError(f"--advice traces the model again, and {request.model} holds features; name the model itself")
    document = _read_calibration(calibration)
    job = prepare(_features(request), request.training)
    changed: list[tuple[Change, PredictionContext]] = []
    if is_advised and isinstance(request.target, TraceRequest) and isinstance(job, PredictionContext):
        with waiting(f"tracing changes of {request.model} …"):
            changed = asyncio.run(changed_contexts(request.target, job, SubprocessTracer(request.limits)))
    report = report_on(request.model, job, products, document, changed)
    prediction, training = report.prediction, request.training
    if json_output:
        click.echo(msgspec.json.encode(as_json(report)))
    elif prediction.outcome == "Predicted":
        console = Console()
        title = f"{request.model}, batch {training.batch_size}, {training.optimizer}, {training.precision}"
        console.print(as_text(title, report))
    if prediction.outcome == "Abstained":
        raise InputError(f"no prediction ({prediction.reason}): {prediction.message}")


def _read_calibration(path: Path | None) -> Calibration | None:
    try:
        return None if path is None else read_calibration(path.read_bytes()).for_workers(1)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e}") from e


def _predict_rows(rows: Path, out: Path, limits: TraceLimits, calibration: Path | None) -> None:
    document = _read_calibration(calibration)
    for shipped in (activity, memory, step_time, store):
        shipped.shipped()  # reports a broken installation before the output is opened
    try:
        if _is_same(rows, out):
            raise InputError(f"expected another file than {rows} in --out, found the same; it was left unchanged")
        with rows.open("rb") as lines:
            first = next((line for line in lines if line.strip()), None)
            if first is None:
                raise InputError(f"expected rows in {rows}, one JSON object a line, found none")
            # Opening truncates the file, so that it happens last.
            with click.open_file(str(out), "wb") as answers, row_progress(rows) as on_progress:
                tally = predict_rows(chain([first], lines), answers, limits, on_progress, calibration=document)
    except OSError as e:
        raise InputError(f"cannot read {rows} or write {out}: {e}") from e
    except WorkerDied as e:
        raise click.ClickException(str(e)) from e
    if errors := tally["error"]:
        raise InputError(f"{errors:,} of {tally.total():,} rows of {rows} were refused; their answers give the reasons")


def _is_same(rows: Path, out: Path) -> bool:
    """Whether input and output are the same file, by any name or link; terminals and pipes may be both."""
    if not rows.is_file():
        return False
    if str(out) == "-":
        return os.path.samestat(rows.stat(), os.fstat(1))
    return out.exists() and out.samefile(rows)


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
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner on a terminal."""
    console = console or Console(stderr=True)
    with console.status(escape(what)) if console.is_terminal else nullcontext():
        yield


@contextmanager
def row_progress(rows: Path) -> Iterator[Callable[[Counter[str], int], None]]:
    """Show the progress through a file; yields the callback for each answered chunk."""
    console, begin, last = Console(stderr=True), time.monotonic(), ""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rows.stat().st_size)

        def on_progress(tally: Counter[str], read_bytes: int) -> None:
            nonlocal last
            counts = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.items()))
            rate = tally.total() / max(time.monotonic() - begin, 1e-6)
            last = f"{tally.total():,} rows ({counts}), {rate:,.0f} a second"
            bar.update(task, advance=read_bytes, description=last)

        yield on_progress
    if last:
        console.print(last, highlight=False)
