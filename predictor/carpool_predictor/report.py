"""The answer of `carpool predict` for one job: prediction, memory parts, largest batches; as JSON and as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import msgspec
from carpool_core.durations import format_duration
from carpool_core.products import GpuProduct
from carpool_core.resources.job import Training
from carpool_core.resources.prediction import ActivityPrediction, Interval, MemoryPrediction, Prediction
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from carpool_predictor.advice import Change
from carpool_predictor.calibration.document import Calibration
from carpool_predictor.features import Abstention
from carpool_predictor.predict import (
    WHAT_HAPPENS,
    BatchFinder,
    LargestBatch,
    MemoryParts,
    PredictionContext,
    ProductAnswer,
    abstain,
    is_tried_beyond,
    parts_of,
    summarize,
    usable_mib,
    usable_of_profile_mib,
)


@dataclass(frozen=True, slots=True)
class Saving:
    """The effect of one change of the training on a GPU product."""

    change: Change
    memory: MemoryPrediction
    """Memory with the change."""
    saves_mib: int
    """Median without the change less the median with it."""
    largest: LargestBatch
    """Largest batch of one pass on the whole GPU, with the change."""


@dataclass(frozen=True, slots=True)
class ProductReport:
    """The answer for one GPU product."""

    answer: ProductAnswer
    parts: MemoryParts
    largest: LargestBatch
    """Largest batch on the whole GPU."""
    mig: dict[str, LargestBatch]
    """Largest batch on an instance of each MIG profile."""
    advice: tuple[Saving, ...] = ()
    """Changes that save memory, if asked for."""


@dataclass(frozen=True, slots=True)
class Report:
    """The answer for one job."""

    name: str
    prediction: Prediction
    memory_inside: bool = False
    """Whether the model lies inside the memory model's training data."""
    products: tuple[ProductReport, ...] = ()
    steps: int | None = None
    """Steps of the whole training, if given."""


def report_on(
    name: str,
    job: PredictionContext | Abstention,
    gpus: Sequence[GpuProduct],
    calibration: Calibration | None = None,
    changed: Sequence[tuple[Change, PredictionContext]] = (),
) -> Report:
    """Predict a job on each product, with memory parts, largest batches and the effects of changes."""
    if isinstance(job, Abstention):
        return Report(name, abstain(job))
    finders = {id(context): BatchFinder(context) for context in (job, *(context for _, context in changed))}

    def finder(context: PredictionContext) -> BatchFinder:
        return finders.get(id(context)) or BatchFinder(context)

    def saving(change: Change, context: PredictionContext, product: GpuProduct, median_mib: int) -> Saving:
        memory = context.memory_on(product)
        largest = finder(context).within(product, usable_mib(product))
        return Saving(change, memory, median_mib - memory.median_mib, largest)

    products, here_finders = [], []
    for product in gpus:
        here = job.calibrated(calibration, product)
        here_finders.append(finder(here))
        found = _on(here, here_finders[-1], product)
        before = found.answer.prediction.memory.median_mib
        advice = tuple(saving(c, one.calibrated(calibration, product), product, before) for c, one in changed)
        products.append(replace(found, advice=advice))
    prediction = summarize(job, [product.answer for product in products], here_finders)
    return Report(name, prediction, job.correction.inside, tuple(products), job.training.steps)


def length_of(steps: int, step_time_s: Interval) -> Interval:
    """Return the duration of a training alone, in seconds; each step has the same error."""
    return Interval(**{end: steps * value for end, value in interval_json(step_time_s).items()})


def _on(job: PredictionContext, finder: BatchFinder, product: GpuProduct) -> ProductReport:
    answer = job.on(product)
    # A site that does not share unmeasured stacks, the default, tries more jobs.
    strict = job.on(product, is_strict=True, before=answer)
    if is_tried_beyond(strict.prediction.memory, product):
        answer = replace(answer, prediction=strict.prediction)
    return ProductReport(
        answer,
        parts_of(job, product, answer.prediction.memory),
        finder.within(product, usable_mib(product)),
        {p: finder.within(product, usable_of_profile_mib(product, p)) for p in product.mig_profiles},
    )


INVALID = frozenset(
    {
        "UnknownCatalogModel", "CatalogUnsupported", "InputShapeInvalid", "FeaturesAbsurd",
        "FeaturesMismatch", "AdapterInvalid", "ParallelismInvalid", "CrossEntropyInvalid",
    }
)  # fmt: skip
"""Reasons of abstentions that mark the request itself as invalid."""


def status_of(abstention: str) -> str:
    """Return the status of an answer without a prediction, from the abstention's reason."""
    return "error" if abstention in INVALID else "abstained"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values, with units in the names.

    An answer to a row of `--rows` has the fields of one entry of `products`, without its largest batches, at the top.
    """
    prediction = report.prediction
    return {
        "id": report.name,
        "status": "ok" if prediction.outcome == "Predicted" else status_of(prediction.reason),
        "reason": prediction.reason,
        "message": prediction.message,
        "model_version": prediction.model_version,
        "products": [_product(report, product) for product in report.products],
    }


def _product(report: Report, product: ProductReport) -> dict[str, Any]:
    return {
        **entry_json(product.answer, product.parts, is_inside=report.memory_inside, steps=report.steps),
        "largest_batch": asdict(product.largest),
        "mig": {profile: {"largest_batch": asdict(found)} for profile, found in product.mig.items()},
        **({"advice": list(map(_saving_json, product.advice))} if product.advice else {}),
    }


def entry_json(answer: ProductAnswer, parts: MemoryParts, *, is_inside: bool, steps: int | None) -> dict[str, Any]:
    """Return the prediction for one product; `is_inside` is whether the memory model was trained on such models."""
    found = answer.prediction
    return {
        "gpu": found.product,
        "memory": {**memory_json(found.memory), "parts": asdict(parts)},
        "activity": activity_json(found.activity),
        "step_time_s": interval_json(found.step_time_seconds),
        **length_json(steps, found.step_time_seconds),
        "inside_training": {
            "memory": is_inside and answer.memory_calibrated,
            "activity": answer.activity_measured,
            "step_time": answer.step_time_inside,
        },
    }


def _saving_json(saving: Saving) -> dict[str, Any]:
    changed = msgspec.to_builtins(saving.change.apply(Training()))
    return {
        "change": saving.change.name,
        "training": {_camel(name): changed[_camel(name)] for name in saving.change.fields},
        "saves_mib": saving.saves_mib,
        "memory": memory_json(saving.memory),
        "largest_batch": asdict(saving.largest),
    }


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def memory_json(memory: MemoryPrediction) -> dict[str, Any]:
    """Return memory with its unit in the names."""
    return {
        "median_mib": memory.median_mib,
        "upper_mib": memory.upper_mib,
        "coverage": memory.coverage,
        "class": {"lower_mib": memory.class_lower_mib, "upper_mib": memory.class_upper_mib},
    }


def activity_json(activity: ActivityPrediction) -> dict[str, Any]:
    """Return activity with its units in the names."""
    occupancy = activity.sm_occupancy_ratio
    return {
        "gpu_util_percent": interval_json(activity.gpu_util_percent),
        "sm_active_ratio": interval_json(activity.sm_active_ratio),
        "sm_occupancy_ratio": None if occupancy is None else interval_json(occupancy),
        "dram_active_ratio": interval_json(activity.dram_active_ratio),
    }


def length_json(steps: int | None, step_time_s: Interval) -> dict[str, dict[str, float]]:
    """Return the duration of the training alone, with its unit in the name; empty without steps."""
    return {} if steps is None else {"length_s": interval_json(length_of(steps, step_time_s))}


def interval_json(interval: Interval) -> dict[str, float]:
    """Return median, lower and upper end."""
    return {"median": interval.median, "lower": interval.lower, "upper": interval.upper}


_SHORTENED = 1_000_000
"""Numbers from here on are rounded to two digits, to keep the columns narrow."""


def as_text(title: str, report: Report) -> RenderableType:
    """Return the tables of a report; intervals are shown for a single GPU."""
    return Group(*_tables(title, report))


def _tables(title: str, report: Report) -> Iterator[RenderableType]:
    if len(report.products) == 1:
        (product,) = report.products
        # The table's own title would be wrapped to the width of the table.
        yield Text(f"{title}, on {product.answer.prediction.product}", style="italic")
        yield from _verdicts(report)
        yield _one(report, product)
    else:
        yield _memory(title, report)
        yield from _verdicts(report)
        yield _speed(report)
        yield _parts(report)
        if any(product.mig for product in report.products):
            yield _mig(report)
    if any(product.advice for product in report.products):
        yield _advice(report)
    yield Text(f"{report.prediction.reason}: {report.prediction.message}", style="dim")


def _verdicts(report: Report) -> Iterator[Text]:
    """Yield a line on the products that the job may not fit, and one on those that it does not fit."""
    answers = [product.answer for product in report.products]
    beyond = [a for a in answers if a.prediction.memory.upper_mib > usable_mib(a.product)]
    tried = [_short(a.product.name) for a in beyond if is_tried_beyond(a.prediction.memory, a.product)]
    refused = [_short(a.product.name) for a in beyond if _short(a.product.name) not in tried]
    if tried:
        yield Text(f"may not fit {', '.join(tried)}: {WHAT_HAPPENS}", style="bold")
    if refused:
        yield Text(f"does not fit {', '.join(refused)}: it is refused there", style="bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _number(value: float, digits: int = 0) -> str:
    """Format a number in at most eight characters."""
    digits = digits if value < _SHORTENED / 10 else 0
    return f"{value:,.{digits}f}" if value < _SHORTENED else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def _batch(found: LargestBatch) -> str:
    """Format a largest batch."""
    if found.batch_size is None:
        return f"<{found.fewer_than:,}"
    if not found.batch_size:
        return "none"
    return f"{'≥' if found.limited_by_trace else ''}{found.batch_size:,}"


def _span(interval: Interval | None, scale: float = 1.0, digits: int = 0) -> str:
    """Format a median with its interval."""
    if interval is None:
        return ""
    median, lower, upper = (_number(x * scale, digits) for x in (interval.median, interval.lower, interval.upper))
    return f"{median} [dim]({lower} - {upper})[/dim]"


def _one(report: Report, product: ProductReport) -> Table:
    found = product.answer.prediction
    memory, activity = found.memory, found.activity
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("memory at its peak", f"{memory.median_mib:,} MiB")
    table.add_row("  at most", f"{memory.upper_mib:,} MiB in {memory.coverage:.0%} of jobs")
    table.add_row("  class", f"{memory.class_lower_mib // 1024} - {memory.class_upper_mib // 1024} GiB")
    for name in _names():
        table.add_row(f"  {name.removesuffix('_mib')}", f"{getattr(product.parts, name):,.0f} MiB")
    table.add_row("GPU utilization", f"{_span(activity.gpu_util_percent)} %")
    table.add_row("SM activity", f"{_span(activity.sm_active_ratio, 100)} %")
    table.add_row("SM occupancy", f"{_span(activity.sm_occupancy_ratio, 100)} %")
    table.add_row("DRAM activity", f"{_span(activity.dram_active_ratio, 100)} %")
    table.add_row("step time", f"{_span(found.step_time_seconds, 1000, 1)} ms")
    if report.steps is not None:
        length = length_of(report.steps, found.step_time_seconds)
        ends = f"[dim]({format_duration(length.lower)} - {format_duration(length.upper)})[/dim]"
        table.add_row(f"  {_steps(report.steps)}", f"{format_duration(length.median)} {ends}")
    table.add_row("largest batch", str(product.largest))
    for profile, largest in product.mig.items():
        table.add_row(f"  on {profile}", str(largest))
    inside = {"memory": _memory_learned(report, product)} | _speed_learned(product)
    table.add_row("covered by measurements", _named(inside) if any(inside.values()) else "none: intervals are wider")
    return table


def _memory(title: str, report: Report) -> Table:
    table = _table(title, "GPU", "MiB", "at most", "in jobs", "class GiB", "max batch", "learned")
    for product in report.products:
        memory = product.answer.prediction.memory
        table.add_row(
            _short(product.answer.prediction.product),
            _number(memory.median_mib),
            _number(memory.upper_mib),
            f"{memory.coverage:.0%}",
            _class(memory),
            _batch(product.largest),
            "yes" if _memory_learned(report, product) else "no",
        )
    return table


def _class(memory: MemoryPrediction) -> str:
    lower, upper = memory.class_lower_mib, memory.class_upper_mib
    return f"{lower // 1024}-{upper // 1024}" if upper < _SHORTENED else f">{_SHORTENED // 1024}"


def _speed(report: Report) -> Table:
    title, columns = "Activity alone", ["GPU", "util %", "SM %", "occ %", "DRAM %", "step ms"]
    if report.steps is not None:
        title, columns = f"{title}, and the duration of {_steps(report.steps)}", [*columns, "takes"]
    table = _table(title, *columns, "learned")
    for product in report.products:
        found = product.answer.prediction
        activity = found.activity
        table.add_row(
            _short(found.product),
            _number(activity.gpu_util_percent.median),
            _number(100 * activity.sm_active_ratio.median),
            _number(100 * activity.sm_occupancy_ratio.median) if activity.sm_occupancy_ratio else "",
            _number(100 * activity.dram_active_ratio.median),
            _number(1000 * found.step_time_seconds.median, 1),
            *([] if report.steps is None else [_length(report.steps * found.step_time_seconds.median)]),
            _named(_speed_learned(product)),
        )
    return table


def _steps(number: int) -> str:
    return f"{number:,} {'step' if number == 1 else 'steps'}"


def _length(seconds: float) -> str:
    """Format a duration in at most eight characters."""
    days = seconds / 86_400
    return format_duration(seconds) if days < _SHORTENED else f"{_number(days)} d"


def _memory_learned(report: Report, product: ProductReport) -> bool:
    return report.memory_inside and product.answer.memory_calibrated


def _speed_learned(product: ProductReport) -> dict[str, bool]:
    return {"activity": product.answer.activity_measured, "time": product.answer.step_time_inside}


def _named(inside: dict[str, bool]) -> str:
    """Return the names of the parts inside the training data."""
    return "all" if all(inside.values()) else ", ".join(name for name, is_so in inside.items() if is_so) or "none"


def _short(product: str) -> str:
    return product.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _names() -> list[str]:
    return [field.name for field in fields(MemoryParts)]


def _parts(report: Report) -> Table:
    """Return the parts by product; context and other are one column, to keep within 80 columns."""
    headings = ("weights", "grads", "optim", "activ", "worksp", "process")
    table = _table("Parts of the memory peak, MiB", "GPU", *headings)
    for product in report.products:
        *values, context_mib, other_mib = (getattr(product.parts, name) for name in _names())
        table.add_row(_short(product.answer.prediction.product), *map(_number, [*values, context_mib + other_mib]))
    return table


def _advice(report: Report) -> Table:
    """Return what each change saves; on several products, on how many of them the job fits with it."""
    first, *others = report.products
    if others:
        table = _table("Changes that save memory", "change", "saves GiB", "fits")
    else:
        table = _table("Changes that save memory", "change", "saves GiB", "MiB", "at most", "largest batch")
    for index, saving in enumerate(first.advice):
        row = [saving.change.name, f"{saving.saves_mib / 1024:,.1f}"]
        if others:
            fits = [p.advice[index].memory.upper_mib <= usable_mib(p.answer.product) for p in report.products]
            row.append(f"{sum(fits)} of {len(fits)}")
        else:
            row += [_number(saving.memory.median_mib), _number(saving.memory.upper_mib), _batch(saving.largest)]
        table.add_row(*row)
    return table


def _mig(report: Report) -> Table:
    table = _table("Largest batch on a MIG instance", "GPU")
    table.add_column("profile=batch")
    for product in report.products:
        if product.mig:
            batches = ", ".join(f"{profile}={_batch(found)}" for profile, found in product.mig.items())
            table.add_row(_short(product.answer.prediction.product), batches)
    return table
