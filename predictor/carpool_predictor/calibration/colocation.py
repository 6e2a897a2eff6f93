"""Slowdowns learned from pairs of jobs that shared a GPU: a linear mixed model over the shipped one. Pure.

A record is the logarithm r of a measured slowdown over the shipped model's median for the same pair::

    r = c0 + c1 * own utilization + c2 * the co-tenant's       all pairs on the product in the mode
      + sensitivity of the family + sensitivity of the job     beside any co-tenant
      + pressure of the co-tenant's family + of its job        on any job
      + effect of the pair of families

The line is a ridge regression towards the shipped model. The other parts are random effects with crossed levels
(Henderson's mixed model equations): an effect of n records is the mean of what the other parts leave of them, times
n / (n + k), where k is the variance between runs over that of the effect. So a job that ran beside one co-tenant is
known beside all. The interval of one more run keeps, on the logarithmic scale, of the shipped one's width::

    width = sqrt((sum of 1 / (n + k) + 1) / (sum of 1 / k + 1))          1 without records

Runs of the same two jobs, by their digests, move c0 once more, and their width is 0: equal runs differ by `RUN_FACTOR`
at most.

Steps are reported by the training itself. So a record counts only in the tenancy domain of the job that reported it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from carpool_core.resources.node import TenantProfile
from carpool_core.resources.prediction import ANY_FAMILY, OF_JOB, LearnedColocation, Prediction, family_of
from carpool_core.values import SharingMode
from msgspec import Meta

PAIR = 2
"""Jobs in a record: only pairs show which job slows another."""
MAX_PAIRS, MAX_SOLO = 1024, 256
"""Records kept."""
MAX_PUBLISHED = 48
"""Families and jobs in the prediction of a job for one product and mode, the most measured first."""
MODE_ROWS = 8.0
"""k of the line: pairs differ more from each other than their mean from the shipped model."""
FAMILY_RUNS, JOB_RUNS, PAIR_RUNS = 2.0, 0.25, 4.0
"""k of the effects of a family, of a job and of a pair of families, chosen on replays of Gavel's pairs: decision 81."""
SWEEPS = 3
"""Passes over the equations (Gauss-Seidel). Few shrink a little more; ten change Lucid's errors by less than 0.001."""
SAME_RUNS = 0.1
"""k of the runs of the same two jobs, which differ far less than two jobs of a family (assumed)."""
RUN_FACTOR = math.exp(1.28 * 0.05 * math.sqrt(2.0))
"""Upper end (90%) of one more run of the same two jobs over a measured one, if logarithms spread by 0.05: those of
equal jobs beside each other do by 0.046 (Gavel) and 0.034 (Lucid)."""
MAX_RATIO = math.log(4.0)
"""Measured over predicted slowdown beyond this is clipped, in logarithms."""

MAX_STEP_S = 1e6
"""Longest step time in a record, in seconds."""

_NAME = Annotated[str, Meta(max_length=128)]
_RATIO = Annotated[float, Meta(ge=0, le=1)]


class PairRecord(msgspec.Struct, frozen=True, array_like=True):
    """Measured slowdown of a job beside one co-tenant."""

    sample: _NAME
    """Name of the attempt and of its co-tenant; a later measurement replaces an earlier one."""
    namespace: _NAME
    domain: _NAME
    """Tenancy domain of the job."""
    product: _NAME
    simulated: bool
    mode: SharingMode
    family: _NAME
    """Name of the job's family, followed by the job's digest; see `job_name`."""
    other: _NAME
    """The same of the co-tenant."""
    util: _RATIO
    """Predicted utilization of the job alone."""
    other_util: _RATIO
    """The same of the co-tenant."""
    log_ratio: Annotated[float, Meta(ge=-MAX_RATIO, le=MAX_RATIO)]
    """Logarithm of measured over predicted slowdown."""


class SoloRecord(msgspec.Struct, frozen=True, array_like=True):
    """Measured step time of a job while no other pod worked on its GPU."""

    sample: _NAME
    """Name of the job and of its size; see `solo_name`."""
    namespace: _NAME
    domain: _NAME
    product: _NAME
    simulated: bool
    step_s: Annotated[float, Meta(gt=0, le=MAX_STEP_S)]
    family: _NAME = ""
    """Family of its model; see `solo_family`."""
    predicted_s: Annotated[float, Meta(ge=0, le=MAX_STEP_S)] = 0.0
    """Step time by the shipped model; 0 if unknown or longer than `MAX_STEP_S`."""


Record = TypeVar("Record", PairRecord, SoloRecord)


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the steps of an attempt show for other attempts."""

    pair: PairRecord | None = None
    solo: SoloRecord | None = None

    @property
    def key(self) -> str:
        """Identify the measurement to 5%, so that small changes are not written."""
        parts = []
        if self.solo is not None:
            parts.append(f"{self.solo.sample} on {self.solo.product} {math.log(self.solo.step_s) / 0.05:.0f}")
        if self.pair is not None:
            parts.append(f"{self.pair.sample} {self.pair.log_ratio / 0.05:.0f}")
        return " ".join(parts)


def job_name(family: str, digest: str) -> str:
    """Return the name of all jobs of a family with a digest of model and training; empty without a family."""
    return f"{family[:111]}{OF_JOB}{digest[-16:]}" if family else ""


def solo_name(digest: str, workers: int, gpus_per_worker: int) -> str:
    """Return the name of runs whose steps alone take equally long: digest of model and training, and their GPUs."""
    return digest if workers * gpus_per_worker == 1 else f"{digest} {workers}x{gpus_per_worker}"


def solo_family(family: str, workers: int, gpus_per_worker: int) -> str:
    """Return the family by which step times are compared; empty for a job of several GPUs, whose steps communicate."""
    return family if workers * gpus_per_worker == 1 else ""


class Origin(NamedTuple):
    """Origin of a measurement, as in the records."""

    namespace: str
    domain: str
    product: str
    simulated: bool


def pair_record(
    sample: str,
    origin: Origin,
    mode: SharingMode,
    own: TenantProfile,
    other: TenantProfile,
    slowdown: float,
    predicted: float,
) -> PairRecord | None:
    """Return the record of a job's measured slowdown beside one co-tenant; None if a family or the mode has none.

    `predicted` is the shipped model's median for the same pair, `slowdown.pair_slowdown`.
    """
    families = own.family, other.family
    if not all(families) or mode not in (SharingMode.MPS, SharingMode.TIME_SLICING):
        return None
    ratio = min(max(math.log(slowdown / predicted), -MAX_RATIO), MAX_RATIO)
    busy = own.gpu_util_percent / 100, other.gpu_util_percent / 100
    return PairRecord(sample, *origin, mode, *families, *busy, round(ratio, 4))


def add(records: Sequence[Record], record: Record, most: int) -> list[Record]:
    """Return the records with another one, in place of the same sample's in the same domain on the same product.

    If there are too many, the oldest of the domain with most records goes, so that no tenant displaces all others.
    """

    def key(one: Record) -> tuple[str, ...]:
        return one.sample, one.domain, one.product

    kept: list[Record] = [one for one in records if key(one) != key(record)]
    kept.append(record)
    while len(kept) > most:
        (largest, _), *_ = Counter(one.domain for one in kept).most_common(1)
        kept.remove(next(one for one in kept if one.domain == largest))
    return kept


def usable(records: Sequence[Record], namespace: str) -> list[Record]:
    """Return the records that count for jobs of a namespace: those of the domains in which it has reported itself."""
    domains = {one.domain for one in records if one.namespace == namespace}
    return [one for one in records if one.domain in domains]


Coefficients = tuple[float, float, float]
"""(c0, c1, c2)."""


class Correction(NamedTuple):
    """Correction of a predicted slowdown."""

    coefficients: Coefficients
    width: float
    """Share of the prediction's interval that remains, 0..1."""


class Effect(NamedTuple):
    """Common part of the records with one value of a level."""

    log_ratio: float
    runs: int


Level = tuple[float, Callable[[str, str], Hashable]]
"""k of a level, and its value for a job's name and its co-tenant's; None if they have none there."""

LEVELS: tuple[Level, ...] = (
    (FAMILY_RUNS, lambda own, other: family_of(own)),
    (FAMILY_RUNS, lambda own, other: family_of(other)),
    (JOB_RUNS, lambda own, other: own if OF_JOB in own else None),
    (JOB_RUNS, lambda own, other: other if OF_JOB in other else None),
    (PAIR_RUNS, lambda own, other: (family_of(own), family_of(other))),
)
"""Sensitivity of the family, pressure of the co-tenant's, the same of the two jobs, and effect of the pair."""


class Corrections:
    """Corrections of any pair of jobs, learned from the records of one product and mode.

    Args:
        records: Those of the product and mode.
    """

    def __init__(self, records: Sequence[PairRecord]) -> None:
        self._line = _line(records)
        self._same: dict[tuple[str, str], list[PairRecord]] = defaultdict(list)
        for one in records:
            if OF_JOB in one.family and OF_JOB in one.other:
                self._same[one.family, one.other].append(one)
        rows_of: list[dict[Hashable, list[int]]] = [defaultdict(list) for _ in LEVELS]
        for (_, value_of), groups in zip(LEVELS, rows_of, strict=True):
            for row, one in enumerate(records):
                groups[value_of(one.family, one.other)].append(row)
            groups.pop(None, None)
        left = [self._residual(one, self._line) for one in records]
        self._effects: list[dict[Hashable, Effect]] = [{} for _ in LEVELS]
        for _ in range(SWEEPS):
            for (k, _), groups, effects in zip(LEVELS, rows_of, self._effects, strict=True):
                for value, rows in groups.items():
                    before = effects.get(value, _NONE).log_ratio
                    after = sum(left[row] + before for row in rows) / (len(rows) + k)
                    effects[value] = Effect(after, len(rows))
                    for row in rows:
                        left[row] += before - after

    @staticmethod
    def _residual(one: PairRecord, coefficients: Coefficients) -> float:
        c0, c1, c2 = coefficients
        return one.log_ratio - c0 - c1 * one.util - c2 * one.other_util

    def beside(self, name: str, other: str) -> Correction:
        """Return the correction for a family or job beside another one."""
        effects = [
            (k, effects.get(value_of(name, other), _NONE))
            for (k, value_of), effects in zip(LEVELS, self._effects, strict=True)
        ]
        c0, c1, c2 = self._line
        c0 += sum(effect.log_ratio for _, effect in effects)
        doubt = 1 + sum(1 / (effect.runs + k) for k, effect in effects)
        width = math.sqrt(doubt / (1 + sum(1 / k for k, _ in effects)))
        if same := self._same.get((name, other)):
            c0 += sum(self._residual(one, (c0, c1, c2)) for one in same) / (len(same) + SAME_RUNS)
            width = 0.0
        return Correction((c0, c1, c2), width)


_NONE = Effect(0.0, 0)


@lru_cache(maxsize=64)
def _corrections(records: tuple[PairRecord, ...]) -> Corrections:
    return Corrections(records)


def _line(records: Sequence[PairRecord]) -> Coefficients:
    """Return the line that fits the records, shrunk towards the shipped model.

    Solves (XᵀX + kI) c = Xᵀr, whose matrix is positive definite, by Cramer's rule: predicting imports no NumPy.
    """
    gram = [[MODE_ROWS if row == column else 0.0 for column in range(3)] for row in range(3)]
    moments = [0.0, 0.0, 0.0]
    for one in records:
        x = (1.0, one.util, one.other_util)
        for row in range(3):
            moments[row] += x[row] * one.log_ratio
            for column in range(3):
                gram[row][column] += x[row] * x[column]
    whole = _determinant(gram)
    c0, c1, c2 = (
        _determinant([[*row[:i], moment, *row[i + 1 :]] for row, moment in zip(gram, moments, strict=True)]) / whole
        for i in range(3)
    )
    return c0, c1, c2


def _determinant(rows: Sequence[Sequence[float]]) -> float:
    """Return the determinant of three rows."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def correction_factor(coefficients: Sequence[float], own: float, other: float) -> float:
    """Return measured over predicted slowdown for a job of this utilization alone beside another one."""
    c0, c1, c2 = coefficients
    return math.exp(min(max(c0 + c1 * own + c2 * other, -MAX_RATIO), MAX_RATIO))


def learned_colocations(records: Iterable[PairRecord], product: str, name: str) -> list[LearnedColocation]:
    """Return the corrections for a family or job on a product: beside the families and jobs of records, and any other.

    Those that ran beside it come first, then the most measured.
    """
    here = [one for one in records if one.product == product]
    found: list[LearnedColocation] = []
    for mode in sorted({one.mode for one in here}):
        of_mode = tuple(one for one in here if one.mode is mode)
        learned, runs, known = _corrections(of_mode), Counter[str](), Counter[str]()
        line, *_ = learned.beside(ANY_FAMILY, ANY_FAMILY).coefficients
        for one in of_mode:
            known.update({one.family, one.other, family_of(one.family), family_of(one.other)})
            is_own = one.family == name or (one.other != name and family_of(one.family) == family_of(name))
            own, other = (one.family, one.other) if is_own else (one.other, one.family)
            if family_of(own) == family_of(name):
                runs[family_of(other)] += 1
                if own == name and OF_JOB in name and OF_JOB in other:
                    runs[other] += 1
        listed = sorted(known, key=lambda other: (-runs[other], -known[other], other))[: MAX_PUBLISHED - 1]
        for other in [*listed, ANY_FAMILY]:
            mine, its = learned.beside(name, other), learned.beside(other, name)
            slowed, slows = learned.beside(other, ANY_FAMILY), learned.beside(ANY_FAMILY, other)
            found.append(
                LearnedColocation(
                    family=other,
                    mode=mode,
                    runs=runs[other],
                    own=[round(c, 4) for c in mine.coefficients],
                    own_width=round(mine.width, 4),
                    other=[round(c, 4) for c in its.coefficients],
                    other_width=round(its.width, 4),
                    sensitivity=round(slowed.coefficients[0], 4),
                    pressure=round(slows.coefficients[0] - line, 4),
                )
            )
    return found


def with_colocations(prediction: Prediction, records: Sequence[PairRecord], name: str) -> Prediction:
    """Return a prediction with its job's name and what was learned about it beside co-tenants."""
    products = [
        msgspec.structs.replace(one, colocations=learned_colocations(records, one.product, name))
        for one in prediction.products
    ]
    return msgspec.structs.replace(prediction, products=products, family=name)


def measured_runs(colocations: Iterable[LearnedColocation]) -> int:
    """Return the bit length of the number of runs, plus the number of jobs: a prediction is renewed when it changes."""
    of_family = {is_job: [one for one in colocations if (OF_JOB in one.family) is is_job] for is_job in (True, False)}
    return sum(one.runs for one in of_family[False]).bit_length() + len(of_family[True])


def solo_step_s(records: Iterable[SoloRecord], name: str, product: str) -> float | None:
    """Return the step time alone of an earlier run (see `solo_name`) on a product; None if none was measured."""
    return next((one.step_s for one in records if (one.sample, one.product) == (name, product)), None)
