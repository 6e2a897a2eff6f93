"""Judges the predictor on measurements of training jobs, by source (`research/data/published.csv`).

The source `carpool` is what `finetuning` measured on an H200, in `research/measurements`.

Each case is predicted as `carpool predict` would with the stated settings. Peaks of three kinds are compared with what
the predictor has for each: live tensors, memory that the allocator holds, and memory of the process. The upper bound is
always that of the process, which holds more than the allocator's peak.
"""

import asyncio
import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median

import click
import msgspec
from carpool_core.products import find_product
from carpool_core.resources.features import Adapter, ModelFeatures, Parallelism
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_core.resources.prediction import Interval
from carpool_core.values import MIB, CrossEntropy, Optimizer, ParallelKind, Precision, Quantization
from carpool_predictor.features import Abstention
from carpool_predictor.models.memory import WORKSPACE_SHARE, context_mib, shipped
from carpool_predictor.models.step_time import TENSOR_SHARES, step_time_on, tensor_group
from carpool_predictor.predict import COMPILED_TIME_FACTOR, PredictionContext, prepare
from carpool_predictor.tracing.process import TraceLimits
from carpool_predictor.tracing.source import SubprocessTracer

from carpool_research.report import markdown
from carpool_research.tables import read_table

DATA = Path(__file__).parents[1] / "data"
CASES = DATA / "published.csv"
OWN = Path(__file__).parents[1] / "measurements" / "h200_finetuning.csv"
FEATURES = DATA / "published_features.json"
"""Traced features of the cases, by name, or the reason why there are none."""
LIMITS = TraceLimits(timeout_s=900, memory_mib=6144)
UNNAMED_GPU = "NVIDIA A100-SXM4-40GB"
"""Product for peaks whose GPU is not stated or not known; only the context depends on it."""
LARGE = 2.9e9
"""Parameters from which a model counts as one of three billion, as several names have it."""
INSIDE = ("allocated", "reserved")
"""Kinds of peaks that leave the context of CUDA out."""
COLUMNS = (
    "case", "source", "kind", "model", "input", "num_classes", "batch", "precision", "optimizer", "checkpointing",
    "accumulation", "lora_rank", "lora_targets", "lora_dropout", "quantization", "cross_entropy", "compile",
    "offloading", "parallelism", "gpu", "memory_mib", "step_time_s",
    "link", "quote", "excluded",
)  # fmt: skip


def is_held_out(source: str) -> bool:
    """Whether the first constants were chosen without a source, by the first byte of its name's SHA-256."""
    return hashlib.sha256(source.encode()).digest()[0] % 3 == 0


@dataclass(frozen=True)
class Case:
    """One published measurement with its settings."""

    name: str
    source: str
    kind: str
    """`allocated`, `reserved`, `process` or `unstated`; empty for a step time only."""
    model: CatalogModel | None
    training: Training
    gpu: str
    memory_mib: float | None
    step_time_s: float | None
    """The time of one step; None unless the case states a GPU that the predictor knows."""
    excluded: str
    """Reason why the case is not judged; empty if it is."""

    collection: str = "first"
    """Collection of sources: `first`, or one of those that were judged before constants were chosen on them."""

    @property
    def split(self) -> str:
        """Use of the case for step times: `fit`, `held out`, or its collection, on which none was chosen."""
        first = "held out" if is_held_out(self.source) else "fit"
        return first if self.collection == "first" else self.collection

    @property
    def is_expressible(self) -> bool:
        """Whether the predictor's settings can express the case; contradictory ones count as expressed."""
        return not self.excluded.startswith("inexpressible")


def _case(row: Mapping[str, str]) -> Case:
    rank, quantization, classes = row["lora_rank"], row["quantization"], row["num_classes"]
    kind, gpus, host = (*row["parallelism"].split(), "", "", "")[:3]
    targets, dropout = row["lora_targets"].split(), float(row["lora_dropout"] or 0)
    training = Training(
        batch_size=int(row["batch"]),
        optimizer=Optimizer(row["optimizer"]),
        precision=Precision(row["precision"]),
        activation_checkpointing=row["checkpointing"] == "yes",
        gradient_accumulation=int(row["accumulation"]),
        adapter=Adapter(rank=int(rank), targets=targets, dropout=dropout) if rank else None,
        quantization=Quantization(quantization) if quantization else None,
        cross_entropy=CrossEntropy(row["cross_entropy"] or CrossEntropy.FULL),
        compile=row["compile"] == "yes",
        activation_offloading=row["offloading"] == "yes",
        varying_lengths={"varying": True, "": False}[row.get("lengths", "")],
        parallelism=Parallelism(kind=ParallelKind(kind), gpus=int(gpus), cpu_offload=host == "cpu") if kind else None,
    )
    shape = [int(n) for n in row["input"].split()] or None
    model = {"name": row["model"], "input": shape, "numClasses": int(classes) if classes else None}
    given = {key: value for key, value in model.items() if value is not None}
    return Case(
        name=row["case"],
        source=row["source"],
        kind=row["kind"],
        model=msgspec.convert(given, type=CatalogModel) if row["model"] else None,
        training=training,
        gpu=row["gpu"] or UNNAMED_GPU,
        memory_mib=float(row["memory_mib"]) if row["memory_mib"] else None,
        step_time_s=float(row["step_time_s"]) if row["step_time_s"] and row["gpu"] else None,
        excluded=row["excluded"],
        collection=row.get("collection", "first"),
    )


def read_cases(*paths: Path) -> list[Case]:
    """Return the cases of files, by default the published and the own ones.

    Raises:
        DataError: A column is missing, or a row is invalid.
    """
    return [case for path in paths or (CASES, OWN) for case in read_table(path, COLUMNS, _case)]


def read_features(path: Path = FEATURES) -> dict[str, ModelFeatures | str]:
    """Return the traced features of the cases by name, or the reasons for none."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, ModelFeatures | str])


def trace(cases: Iterable[Case], path: Path, progress: Callable[[str], None]) -> None:
    """Trace the judged cases and add their features to a file; equal settings are traced once."""
    found = read_features(path) if path.is_file() else {}
    seen: dict[bytes, ModelFeatures | str] = {}
    tracer = SubprocessTracer(LIMITS)
    for case in cases:
        if case.excluded or case.model is None:
            continue
        progress(case.name)
        key = msgspec.json.encode((case.model, case.training))
        if key not in seen:
            answer = asyncio.run(tracer.trace(ModelSource(catalog=case.model), case.training))
            seen[key] = f"{answer.reason}: {answer.message}" if isinstance(answer, Abstention) else answer
        found[case.name] = seen[key]
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=0) + b"\n")


@dataclass(frozen=True)
class Judged:
    """A case beside its prediction."""

    case: Case
    context: PredictionContext

    @cached_property
    def bound_mib(self) -> float:
        """Upper bound of the process's peak."""
        return self.context.memory_on(find_product(self.case.gpu)).upper_mib

    @cached_property
    def estimate_mib(self) -> float:
        """Prediction of what the case measured."""
        cost = self.context.cost
        if self.case.kind == "allocated":
            return cost.peak_bytes / MIB
        if self.case.kind == "reserved":
            return cost.reserved_bytes / MIB
        return self.context.memory_on(find_product(self.case.gpu)).median_mib

    @cached_property
    def step_time(self) -> Interval:
        """Predicted step time, in seconds."""
        return self.context.on(find_product(self.case.gpu)).prediction.step_time_seconds


def judge(cases: Iterable[Case], features: Mapping[str, ModelFeatures | str]) -> Iterator[Judged]:
    """Yield the cases that the predictor answers."""
    for case in cases:
        found = features.get(case.name)
        if case.excluded or not isinstance(found, ModelFeatures):
            continue
        context = prepare(found, case.training)
        if isinstance(context, PredictionContext):
            yield Judged(case, context)


GROUPS: dict[str, Callable[[Judged], bool]] = {
    "all": lambda _: True,
    "≥ 3B": lambda one: one.context.features.parameters >= LARGE,
    "allocator": lambda one: one.case.kind in INSIDE,
    "process": lambda one: one.case.kind not in INSIDE,
}
"""Groups of judged cases by name."""


def memory_row(judged: Sequence[Judged]) -> dict[str, str]:
    """Return the median error, the share of bounds that hold, and the median of bound over measured."""
    pairs = [(one, one.case.memory_mib) for one in judged if one.case.memory_mib is not None]
    held = sum(one.bound_mib >= measured for one, measured in pairs)
    return {
        "judged": str(len(pairs)),
        "median error": f"{median(abs(one.estimate_mib / measured - 1) for one, measured in pairs):.1%}",
        "bound holds": f"{held}/{len(pairs)}",
        "bound/measured": f"{median(one.bound_mib / measured for one, measured in pairs):.2f}",
    }


def memory_tables(cases: Sequence[Case], judged: Sequence[Judged]) -> str:
    """Return the table of judged cases by source and kind, with the totals of the groups."""
    with_memory = [one for one in judged if one.case.memory_mib is not None]
    rows = []
    for source, kind in sorted({(one.case.source, one.case.kind) for one in with_memory}):
        total = [c for c in cases if (c.source, c.kind) == (source, kind) and c.memory_mib is not None]
        group = [one for one in with_memory if (one.case.source, one.case.kind) == (source, kind)]
        row = {
            "source": source,
            "kind": kind,
            "cases": str(len(total)),
            "expressible": str(sum(case.is_expressible for case in total)),
        }
        rows.append(row | memory_row(group))
    for name, is_of in GROUPS.items():
        if group := list(filter(is_of, with_memory)):
            rows.append({"source": f"**{name}**"} | memory_row(group))
    return markdown(rows)


def step_time_table(judged: Sequence[Judged]) -> str:
    """Return the table of step times by source."""
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in judged:
        if one.case.step_time_s is not None:
            groups[one.case.split, one.case.source].append(one)
    rows = []
    for (split, source), group in sorted(groups.items()):
        pairs = [(one.step_time, one.case.step_time_s or 0) for one in group]
        factors = [max(time.median / measured, measured / time.median) for time, measured in pairs]
        signed = median(time.median / measured for time, measured in pairs)
        held = sum(time.lower <= measured <= time.upper for time, measured in pairs)
        rows.append(
            {
                "source": source,
                "split": split,
                "judged": str(len(group)),
                "median factor": f"{median(factors):.2f}",
                "predicted/measured": f"{signed:.2f}",
                "interval holds": f"{held}/{len(group)}",
            }
        )
    return markdown(rows)


SPLITS, FOLDS = 100, 3
_CONSTANTS_MIB = (750, 1000, 1250, 1500, 1750)
_QUANTILE, _MARGIN = 0.95, 1.05


def _is_plain(one: Judged) -> bool:
    """Whether a step's peak is reserved memory and a constant, because no convolution needs a large workspace."""
    cost = one.context.cost
    return not one.context.correction.inside and cost.unfolded_bytes <= WORKSPACE_SHARE * cost.reserved_bytes


def _plain_mib(one: Judged, slope: float, constant_mib: float) -> float:
    fitted = find_product(shipped().product)
    context = context_mib(find_product(one.case.gpu)) - context_mib(fitted)
    return slope * one.context.cost.reserved_bytes / MIB + constant_mib + context


def _refitted(fit: Sequence[Judged], held_out: Sequence[Judged]) -> Iterator[tuple[Judged, float, float]]:
    """Yield held-out cases with the estimate and the bound of constants that were chosen on other sources.

    Chosen anew are what decision 70 chose: the slope and the constant of plain steps with the least mean of the
    sources' median errors, and their bound's factors, which cover 95% of the fit peaks, with a margin of 5%.
    """
    chosen = [one for one in fit if _is_plain(one) and one.case.kind not in INSIDE]

    def measured(one: Judged) -> float:
        return one.case.memory_mib or 0.0

    def error(constants: tuple[float, float]) -> float:
        by: dict[str, list[float]] = defaultdict(list)
        for one in chosen:
            by[one.case.source].append(abs(_plain_mib(one, *constants) / measured(one) - 1))
        return sum(map(median, by.values())) / len(by)

    slope, constant = min(product((1.0, shipped().slope), _CONSTANTS_MIB), key=error)
    whole = [one for one in chosen if one.case.training.quantization is None]
    factors = {}
    for is_quantized, group in ((False, whole or chosen), (True, chosen)):
        ratios = sorted(measured(one) / _plain_mib(one, slope, constant) for one in group)
        factors[is_quantized] = _MARGIN * max(1.0, ratios[math.ceil(_QUANTILE * len(ratios)) - 1])
    for one in held_out:
        if not _is_plain(one):
            yield one, one.estimate_mib, one.bound_mib
            continue
        median_mib = _plain_mib(one, slope, constant)
        estimate = one.estimate_mib if one.case.kind in INSIDE else median_mib
        yield one, estimate, median_mib * factors[one.case.training.quantization is not None]


def split_table(judged: Sequence[Judged]) -> str:
    """Return the table of peaks under constants chosen without their source, for many random divisions into thirds.

    One division says little: it may leave a third of the sources without any peak of a process to choose on.
    """
    with_memory = [one for one in judged if one.case.memory_mib is not None]
    sources = sorted({one.case.source for one in with_memory})
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    judged_in: dict[str, int] = {}
    for seed in range(SPLITS):
        shuffled = random.Random(seed).sample(sources, len(sources))  # noqa: S311
        parts = [set(shuffled[start::FOLDS]) for start in range(FOLDS)]
        every = [
            answer
            for part in parts
            for answer in _refitted(
                [one for one in with_memory if one.case.source not in part],
                [one for one in with_memory if one.case.source in part],
            )
        ]
        for name, is_of in GROUPS.items():
            group = [answer for answer in every if is_of(answer[0])]
            judged_in[name] = len(group)
            found[name].append(_held_out_figures(group))
    return markdown([{"cases": name, "judged": str(judged_in[name])} | _over_splits(found[name]) for name in GROUPS])


def _held_out_figures(group: Sequence[tuple[Judged, float, float]]) -> tuple[float, float, float]:
    """Return the median error, the share of bounds that hold, and the median of bound over measured."""
    numbers = [(one.case.memory_mib or 0.0, estimate, bound) for one, estimate, bound in group]
    return (
        median(abs(estimate / peak - 1) for peak, estimate, _ in numbers),
        sum(bound >= peak for peak, _, bound in numbers) / len(numbers),
        median(bound / peak for peak, _, bound in numbers),
    )


def _over_splits(figures: Sequence[tuple[float, float, float]]) -> dict[str, str]:
    """Return means over the divisions, with the range of nine in ten."""
    errors, held, widths = zip(*figures, strict=True)
    return {
        "median error": _cell(errors, ".1%"),
        "bound holds": _cell(held, ".1%"),
        "divisions with 95% held": f"{sum(one >= _QUANTILE for one in held)}/{len(held)}",
        "bound/measured": _cell(widths, ".2f"),
    }


def _cell(values: Sequence[float], form: str) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return f"{sum(ordered) / len(ordered):{form}} ({low:{form}}–{high:{form}})"  # noqa: RUF001


_HELD = 0.85
_SHARES = (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)
_LAUNCHES_S = (0.0, 15e-6, 20e-6, 25e-6, 30e-6, 35e-6, 40e-6)


class Timed:
    """A case's step times by the share of tensor cores and the time of a launch."""

    def __init__(self, one: Judged) -> None:
        gpu, training, layers = find_product(one.case.gpu), one.case.training, one.context.features.layers
        self.source, self.group = one.case.source, tensor_group(gpu)
        self.chooses_share = training.precision not in (Precision.FP32, Precision.TF32)
        self.widening = COMPILED_TIME_FACTOR if training.compile else 1.0
        self.measured_s, is_convolutional = one.case.step_time_s or 0.0, layers.convolution > layers.linear
        self.times = {
            (share, launch_s): step_time_on(
                one.context.cost, gpu, training.precision,
                convolutional=is_convolutional, share=share, launch_s=launch_s,
            ).seconds
            for share, launch_s in product(_SHARES, _LAUNCHES_S)
        }  # fmt: skip

    def error(self, share: float, launch_s: float) -> float:
        """Return the logarithm of the larger of predicted over measured and its inverse."""
        return abs(math.log(self.times[share, launch_s].median / self.measured_s))

    def holds(self, share: float, launch_s: float) -> bool:
        """Whether the interval holds."""
        time = self.times[share, launch_s]
        return time.lower / self.widening <= self.measured_s <= time.upper * self.widening


def _mean_of_sources(cases: Iterable[Timed], shares: Mapping[str, float], launch_s: float) -> float:
    by: dict[str, list[float]] = defaultdict(list)
    for one in cases:
        by[one.source].append(one.error(shares[one.group], launch_s))
    return sum(map(median, by.values())) / len(by)


def chosen_times(fit: Sequence[Timed]) -> tuple[dict[str, float], float]:
    """Return shares by group and the time of a launch with the least mean of the sources' median errors (decision 84).

    Shares are chosen on steps in 16 bits; a group without any keeps the shipped one.
    """
    answers = []
    for launch_s in _LAUNCHES_S:
        shares = dict(TENSOR_SHARES)
        for group in shares:
            if own := [one for one in fit if one.group == group and one.chooses_share]:
                errors = {share: _mean_of_sources(own, {group: share}, launch_s) for share in _SHARES}
                shares[group] = min(errors, key=errors.__getitem__)
        answers.append((_mean_of_sources(fit, shares, launch_s), launch_s, shares))
    _, launch_s, shares = min(answers, key=lambda answer: answer[0])
    return shares, launch_s


def time_split_table(judged: Sequence[Judged]) -> str:
    """Return the figures of step times under constants chosen without their source, over the same divisions."""
    timed = [Timed(one) for one in judged if one.case.step_time_s is not None]
    sources, figures = sorted({one.source for one in timed}), []
    for seed in range(SPLITS):
        shuffled = random.Random(seed).sample(sources, len(sources))  # noqa: S311
        errors, held = [], 0
        for part in ({*shuffled[start::FOLDS]} for start in range(FOLDS)):
            shares, launch_s = chosen_times([one for one in timed if one.source not in part])
            for one in timed:
                if one.source in part:
                    errors.append(one.error(shares[one.group], launch_s))
                    held += one.holds(shares[one.group], launch_s)
        figures.append((math.exp(median(errors)), held / len(timed)))
    factors, holds = zip(*figures, strict=True)
    row = {"step times": str(len(timed)), "sources": str(len(sources))}
    row |= {"median factor": _cell(factors, ".2f"), "interval holds": _cell(holds, ".1%")}
    return markdown([row | {"divisions with 85% held": f"{sum(one >= _HELD for one in holds)}/{SPLITS}"}])


def excluded_table(cases: Iterable[Case]) -> str:
    """Return the reasons why cases are not judged, with their sources."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.excluded:
            groups[case.excluded].append(case)
    rows = [
        {"reason": reason, "cases": str(len(group)), "sources": ", ".join(sorted({case.source for case in group}))}
        for reason, group in sorted(groups.items())
    ]
    return markdown(rows)


def texts() -> dict[str, str]:
    """Return the tables of docs/experiments.md by their place in its frame."""
    cases = read_cases()
    judged = list(judge(cases, read_features()))
    return {
        "published_memory": memory_tables(cases, judged),
        "published_step_time": step_time_table(judged),
        "published_splits": split_table(judged),
        "published_time_splits": time_split_table(judged),
        "published_excluded": excluded_table(case for case in cases if case.collection == "first"),
    }


@click.command(short_help="Judge the predictor on published measurements, and print tables by source.")
@click.option("--trace", "is_traced", is_flag=True, help="Trace the cases again, instead of reading their features.")
@click.option("--cases", is_flag=True, help="Print each case, too.")
@click.option("--only", default="", help="Only cases whose source, name or collection begins with this text.")
def published(only: str, *, is_traced: bool, cases: bool) -> None:
    """Judge the predictor on published measurements, and print tables by source."""
    chosen = [c for c in read_cases() if any(name.startswith(only) for name in (c.source, c.name, c.collection))]
    if is_traced:
        trace(chosen, FEATURES, lambda name: click.echo(name, err=True))
    judged = list(judge(chosen, features := read_features()))
    if cases:
        for one in judged:
            measured, time = one.case.memory_mib, one.case.step_time_s
            shown = [one.case.name, one.case.kind]
            if measured is not None:
                shown += [
                    f"{measured:,.0f} MiB",
                    f"{one.estimate_mib / measured:.3f}",
                    f"{one.bound_mib / measured:.3f}",
                ]
            if time is not None:
                shown += [f"{time:.4g} s", f"{one.step_time.median / time:.3f}"]
            click.echo("  ".join(shown))
    for case in chosen:
        reason = case.excluded or features.get(case.name)
        if isinstance(reason, str):
            click.echo(f"{case.name}: {reason}")
    click.echo(f"\n{memory_tables(chosen, judged)}\n\n{step_time_table(judged)}")
