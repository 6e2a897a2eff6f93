"""Slowdowns learned from pairs of jobs that shared a GPU: corrections of the shipped model by partial pooling. Pure.

A record is the logarithm r of a measured slowdown over the shipped model's median for the same pair. It depends on the
utilization of both jobs alone, which contains batch size and precision::

    r = c0 + c1 * own utilization + c2 * the co-tenant's

Each level shrinks its coefficients towards those of the level above it (ridge regression, with k rows' worth of
trust in the level above). The levels are the shipped model (0), all pairs on a product in a mode, and the runs of one
pair of families there. The interval of one more run keeps, on the logarithmic scale, of the shipped one's width::

    width = sqrt((k / (n + k) + k) / (1 + k))          after n runs of the pair; 1 before the first

The first part is the doubt about the pair's mean and falls, the second the difference between runs and stays. Runs of
the same two jobs, by their digests, move c0 alone, and their width is 0: equal runs differ by `RUN_FACTOR` at most.

Steps are reported by the training itself. So a record counts only in the tenancy domain of the job that reported it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from carpool_core.resources.node import TenantProfile
from carpool_core.resources.prediction import ANY_FAMILY, OF_JOB, LearnedColocation, Prediction, family_of
from carpool_core.values import SharingMode
from msgspec import Meta

MAX_PAIRS, MAX_SOLO = 1024, 256
"""Records kept."""
MAX_PUBLISHED = 48
"""Families and jobs in the prediction of a job for one product and mode, the most measured first."""
PAIR_RUNS = 0.5
"""k of a pair's runs: the shipped model errs by 0.15 on unseen pairs, and runs of a pair differ by about 0.1 (assumed).
Both k were fixed before the replay of measured pairs."""
MODE_ROWS = 8.0
"""k of the rows of a product in a mode: pairs differ more from each other than their mean from the shipped model."""
JOB_RUNS = 0.1
"""k of the runs of the same two jobs, which differ far less than two jobs of a family (assumed)."""
RUN_FACTOR = math.exp(1.28 * 0.05 * math.sqrt(2.0))
"""Upper end (90%) of one more run of the same two jobs over a measured one, if logarithms spread by 0.05: those of
equal jobs beside each other do by 0.046 (Gavel) and 0.034 (Lucid)."""
MAX_RATIO = math.log(4.0)
"""Measured over predicted slowdown beyond this is clipped, in logarithms."""

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
    """Name of the job: digest of model and training."""
    namespace: _NAME
    domain: _NAME
    product: _NAME
    simulated: bool
    step_s: Annotated[float, Meta(gt=0, le=1e6)]


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
ZERO: Coefficients = (0.0, 0.0, 0.0)
"""The shipped model, uncorrected."""


class Correction(NamedTuple):
    """Correction of a predicted slowdown."""

    coefficients: Coefficients
    width: float
    """Share of the prediction's interval that remains, 0..1."""


def shrunk(records: Sequence[PairRecord], k: float, above: Coefficients) -> Coefficients:
    """Return the coefficients that fit the records, shrunk towards those of the level above (k > 0).

    Solves (XᵀX + kI) d = Xᵀr, whose matrix is positive definite, by Cramer's rule: predicting imports no NumPy.
    """
    gram = [[k if row == column else 0.0 for column in range(3)] for row in range(3)]
    moments = [0.0, 0.0, 0.0]
    for one in records:
        x = (1.0, one.util, one.other_util)
        residual = one.log_ratio - sum(c * value for c, value in zip(above, x, strict=True))
        for row in range(3):
            moments[row] += x[row] * residual
            for column in range(3):
                gram[row][column] += x[row] * x[column]
    whole = _determinant(gram)
    c0, c1, c2 = (
        above[i]
        + _determinant([[*row[:i], moment, *row[i + 1 :]] for row, moment in zip(gram, moments, strict=True)]) / whole
        for i in range(3)
    )
    return c0, c1, c2


def _determinant(rows: Sequence[Sequence[float]]) -> float:
    """Return the determinant of three rows."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def correction(
    records: Sequence[PairRecord], family: str, other: str, of_mode: Coefficients | None = None
) -> Correction:
    """Return the correction for a family or job beside another one, from records of one product and mode.

    `of_mode` are the coefficients of all these records, if they are known.
    """
    of_mode = of_mode or shrunk(records, MODE_ROWS, ZERO)
    families = family_of(family), family_of(other)
    runs = [one for one in records if (family_of(one.family), family_of(one.other)) == families]
    n, k = len(runs), PAIR_RUNS
    found = Correction(shrunk(runs, k, of_mode), math.sqrt((k / (n + k) + k) / (1 + k)))
    return _of_jobs(found, runs, family, other)


def _of_jobs(of_families: Correction, runs: Iterable[PairRecord], job: str, other: str) -> Correction:
    """Return the correction of a pair of families, moved by those of its runs that had the same two jobs."""
    equal = (
        [one for one in runs if (one.family, one.other) == (job, other)] if OF_JOB in job and OF_JOB in other else []
    )
    if not equal:
        return of_families
    c0, c1, c2 = of_families.coefficients
    residuals = (one.log_ratio - c0 - c1 * one.util - c2 * one.other_util for one in equal)
    return Correction((c0 + sum(residuals) / (len(equal) + JOB_RUNS), c1, c2), 0.0)


def correction_factor(coefficients: Sequence[float], own: float, other: float) -> float:
    """Return measured over predicted slowdown for a job of this utilization alone beside another one."""
    c0, c1, c2 = coefficients
    return math.exp(min(max(c0 + c1 * own + c2 * other, -MAX_RATIO), MAX_RATIO))


def learned_colocations(records: Iterable[PairRecord], product: str, name: str) -> list[LearnedColocation]:
    """Return the corrections for a family or job on a product: beside measured jobs, their families, and any other."""
    here = [one for one in records if one.product == product]
    found: list[LearnedColocation] = []
    for mode in sorted({one.mode for one in here}):
        of_mode = [one for one in here if one.mode is mode]
        above = shrunk(of_mode, MODE_ROWS, ZERO)
        beside, runs = defaultdict[str, list[PairRecord]](list), Counter[str]()
        for own, other, one in _runs_of(of_mode, family_of(name)):
            beside[family_of(other)].append(one)
            runs[family_of(other)] += 1
            if own == name and OF_JOB in name and OF_JOB in other:
                runs[other] += 1
        of_families = {
            family: (correction(its, family_of(name), family, above), correction(its, family, family_of(name), above))
            for family, its in [*beside.items(), (ANY_FAMILY, [])]
        }
        for other, count in [*runs.most_common(MAX_PUBLISHED - 1), (ANY_FAMILY, 0)]:
            family = family_of(other)
            mine, its = of_families[family]
            mine, its = _of_jobs(mine, beside[family], name, other), _of_jobs(its, beside[family], other, name)
            found.append(
                LearnedColocation(
                    family=other,
                    mode=mode,
                    runs=count,
                    own=[round(c, 4) for c in mine.coefficients],
                    own_width=round(mine.width, 4),
                    other=[round(c, 4) for c in its.coefficients],
                    other_width=round(its.width, 4),
                )
            )
    return found


def _runs_of(records: Iterable[PairRecord], family: str) -> Iterator[tuple[str, str, PairRecord]]:
    """Yield the runs in which a family took part, each with the family's own job and its co-tenant."""
    for one in records:
        if family_of(one.family) == family:
            yield one.family, one.other, one
        elif family_of(one.other) == family:
            yield one.other, one.family, one


def with_colocations(
    prediction: Prediction, records: Sequence[PairRecord], name: str, comparable: Collection[str] = ()
) -> Prediction:
    """Return a prediction with its job's name and what was learned about it beside co-tenants.

    `comparable` are the products on which its step time alone is known.
    """
    products = [
        msgspec.structs.replace(
            one,
            colocations=learned_colocations(records, one.product, name),
            comparable=one.product in comparable,
        )
        for one in prediction.products
    ]
    return msgspec.structs.replace(prediction, products=products, family=name)


def measured_runs(colocations: Iterable[LearnedColocation]) -> int:
    """Return the bit length of the number of runs, plus the number of jobs: a prediction is renewed when it changes."""
    of_family = {is_job: [one for one in colocations if (OF_JOB in one.family) is is_job] for is_job in (True, False)}
    return sum(one.runs for one in of_family[False]).bit_length() + len(of_family[True])


def solo_step_s(records: Iterable[SoloRecord], job: str, product: str) -> float | None:
    """Return the step time alone of an earlier run of a job on a product; None if none was measured."""
    return next((one.step_s for one in records if (one.sample, one.product) == (job, product)), None)
