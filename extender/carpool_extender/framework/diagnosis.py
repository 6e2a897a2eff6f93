"""Refusals as sentences: which check, what was found, by how much it misses."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from carpool_core.values import GpuUuid, RequestedMode, SharingMode
from carpool_predictor.models.slowdown import shipped
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MIXED, MODES, NO_MODE, NO_TENANT, Bools, GpuTable, Rows
from carpool_extender.cache.health import shortened
from carpool_extender.cache.mig import whole
from carpool_extender.framework.filters import SLACK, Check, Closest, Evaluation, failures, shortfall
from carpool_extender.framework.sharing_mode import EXCLUSIVE, MIG, unbounded

DIGITS = 2
"""Behind the point, of numbers in sentences."""


def kinds(evaluation: Evaluation, check: Check, rows: Rows) -> Sequence[Bools]:
    """Split GPUs that failed the same check by what a sentence would say of them; masks over `rows`."""
    if not rows.size:
        return []
    columns = evaluation.snapshot.gpus
    keys: NDArray[np.integer] = np.zeros(rows.size, np.int64)
    if check is Check.SLOWDOWN:
        keys = evaluation.results.incoming_is_closest[rows].astype(np.int64)
    elif check is Check.HEALTH:
        keys = np.array([evaluation.snapshot.unavailable[row].kind for row in rows.tolist()])
    elif check is Check.TENANCY:  # another namespace's, or another user's of the same one
        keys = columns.tenant_namespace[rows] == evaluation.snapshot.namespaces.get(
            evaluation.pod_request.demand.namespace, NO_TENANT
        )
    elif check is Check.MODE:
        keys = columns.mode[rows]
    elif check is Check.SUITABLE:
        keys = columns.device_class[rows]
    return [keys == key for key in np.flatnonzero(np.bincount(keys))]


def standing(evaluation: Evaluation, check: Check, rows: Rows, closest: int) -> str:
    """Say how the GPU that came closest stands for all that failed the same check.

    Returns:
        What to put before the sentence about it: nothing where it holds for each, "at best" where what it tells is a
        number that is worse of the others, "for example" where others have something else.
    """
    if rows.size == 1:
        return ""
    columns = evaluation.snapshot.gpus
    if check is Check.HEALTH:
        said = evaluation.snapshot.unavailable[closest].reason
        return _EXAMPLE if any(evaluation.snapshot.unavailable[row].reason != said for row in rows.tolist()) else ""
    if check is Check.TENANCY:
        return _EXAMPLE if _differ(columns.tenant_namespace[rows]) else ""
    if check is Check.SLOTS:
        if _differ(columns.mig_slices[rows]) or _differ(columns.mig_gb[rows]):
            return _EXAMPLE
        return _BEST if _differ(columns.count[rows]) else ""
    if check is Check.CONDITION:
        sm = evaluation.pod_request.class_table(evaluation.snapshot.classes).sm[columns.device_class[rows]]
        told = shortfall(evaluation.limits, columns.take(rows), sm)
        if not any(map(_differ, told)):
            return ""
        return _BEST if len(told) == 1 else _EXAMPLE
    return _BEST if check is Check.SLOWDOWN and _suffer_apart(evaluation, rows) else ""


_BEST, _EXAMPLE = "at best ", "for example "


def _differ(numbers: NDArray[Any]) -> bool:
    return bool(np.ptp(np.round(numbers, DIGITS)))


def _suffer_apart(evaluation: Evaluation, rows: Rows) -> bool:
    if _differ(evaluation.margins(Check.SLOWDOWN, rows)):
        return True
    if evaluation.results.incoming_is_closest[rows[0]]:
        return False
    columns = evaluation.snapshot.gpus
    first = _jobs(columns, int(rows[0]))
    return any(_jobs(columns, row) != first for row in rows.tolist())


def _jobs(columns: GpuTable, row: int) -> list[str]:
    return [str(tenant) for tenant in columns.tenants[row]]


MOST_DIGITS = 6
"""Digits behind the point of a slowdown, where fewer would show it as equal to its limit."""
MOST_NAMED = 3
"""Neighbours of which each is told what would become of it."""


def expected_slowdown(evaluation: Evaluation, rows: Sequence[int], limit: float | None = None) -> str:
    """Say how much slower a newcomer is to be expected on some GPUs, and what it will hardly exceed.

    Args:
        evaluation: Of the newcomer.
        rows: GPUs that it fits on, all of which it would have.
        limit: What it accepts, where that is to be said.
    """
    found = float(evaluation.results.slowdown[list(rows)].max())
    told = f"expected slowdown {found:.2f}" + ("" if limit is None else f" of {limit:.2f}")
    upper = max(evaluation.upper(row) for row in rows) if evaluation.snapshot.gpus.count[list(rows)].any() else found
    return told if upper <= found else f"{told}, {shipped().level:.0%} below {upper:.2f}"


def neighbours(evaluation: Evaluation, row: int) -> str:
    """Say what would become of the tenants of a GPU that the newcomer fits on; empty where there are none.

    Of many it names who is closest to its limit.
    """
    if not evaluation.snapshot.gpus.count[row]:
        return ""
    _, *others = evaluation.met(row)
    nearest = sorted(others, key=lambda one: one.limit - one.slowdown)[: 1 if len(others) > MOST_NAMED else None]
    told = [_beside(evaluation, row, one) for one in sorted(nearest)]
    if len(told) < len(others):
        told.append(f"{len(others) - 1} others further from their limits")
    return f"; beside {', '.join(told)}"


def _beside(evaluation: Evaluation, row: int, one: Closest) -> str:
    surely = "" if one.slowdown == one.expected else f" (expected {one.expected:.2f})"
    return f"{evaluation.snapshot.gpus.tenants[row][one.tenant]} {one.slowdown:.2f} of {one.limit:.2f}{surely}"


def too_slow(evaluation: Evaluation, row: int) -> str:
    """Say who would be slowed beyond what it accepts."""
    closest = evaluation.closest(row)
    found, limit = _told_apart(closest.slowdown, closest.limit)
    surely = "" if closest.slowdown == closest.expected else f", expected {closest.expected:.2f}"
    verb = "could" if surely else "would"
    if closest.tenant < 0:
        return f"{verb} run {found} times as long there{surely}, accepts {limit}"
    tenant = evaluation.snapshot.gpus.tenants[row][closest.tenant]
    return f"{verb} slow {tenant} to {found} of {limit}{surely}"


def beyond(margin: float) -> str:
    """Write by how much a slowdown exceeds its limit."""
    return _told_apart(margin, 0.0)[0]


def _told_apart(found: float, limit: float) -> tuple[str, str]:
    """Write two numbers with as many digits, two at least, as show that they differ."""
    digits = next((n for n in range(2, MOST_DIGITS) if f"{found:.{n}f}" != f"{limit:.{n}f}"), MOST_DIGITS)
    return f"{found:.{digits}f}", f"{limit:.{digits}f}"


PREFIX = "NoGpuFits: "
"""Begins every summary: the reason that the job's condition Placed takes over."""
MOST_PRODUCTS = 4
"""Products whose freest GPU a summary names."""
WRONG_PRODUCT = "wrong product"
MOST_GROUPS = 6
"""Groups of GPUs that a summary names."""
LONGEST_SUMMARY, LONGEST_PART = 860, 300
"""Characters of a summary, and of each of its parts. An event takes 1,024, and kube-scheduler's own words are in it,
too: of how many nodes it speaks, what else it found, and that nobody will be evicted."""


def pluralize(number: int, noun: str) -> str:
    """Write a number of things: `1 GPU`, `20 nodes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _one(row: int) -> Rows:
    return np.array([row])


def explain_gpu(evaluation: Evaluation, row: int) -> str:
    """Say in full what became of one GPU: the check, what was found, the margin; or that the job fits there."""
    return f"{evaluation.snapshot.place(row)} ({evaluation.snapshot.product(row)}): {outcome(evaluation, row)}"


def outcome(evaluation: Evaluation, row: int) -> str:
    """Say the same of the first check that fails, without naming the GPU."""
    failed = int(evaluation.results.failed[row])
    if failed < 0:
        left = int(evaluation.left_mib(_one(row))[0])
        mode, slowdown = MODES[int(evaluation.results.mode[row])], expected_slowdown(evaluation, [row])
        return f"fits by {mode}, leaves {left:,} MiB, {slowdown}{neighbours(evaluation, row)}"
    return full_reason(evaluation, row, Check(failed))


def full_reason(evaluation: Evaluation, row: int, check: Check) -> str:
    """Say how a check fails on one GPU, and by how much."""
    if check is Check.MEMORY:
        need, free = int(evaluation.need_mib(_one(row))[0]), int(evaluation.snapshot.gpus.free_mib[row])
        return f"needs {need:,} MiB{_by_turns(evaluation, row)}, has {free:,} MiB free ({need - free:,} MiB short)"
    reason = _REASONS[check](evaluation, row)
    if check is Check.SLOWDOWN:
        closest = evaluation.closest(row)
        reason += f" ({beyond(closest.slowdown - closest.limit)} beyond)"
    return reason


def _by_turns(evaluation: Evaluation, row: int) -> str:
    """Say why more is needed here than elsewhere, where that is so."""
    facts = evaluation.pod_request.requirements(
        evaluation.snapshot.classes[int(evaluation.snapshot.gpus.device_class[row])]
    )
    is_by_turns = MODES[int(evaluation.results.mode[row])] is SharingMode.TIME_SLICING
    return " for a first run by turns" if is_by_turns and facts.is_wider_by_turns else ""


def _unsuitable(evaluation: Evaluation, row: int) -> str:
    kind = evaluation.snapshot.classes[int(evaluation.snapshot.gpus.device_class[row])]
    return evaluation.pod_request.requirements(kind).reason or "unsuitable"


def _mode(evaluation: Evaluation, row: int) -> str:
    demand = evaluation.pod_request.demand
    now = MODES[int(evaluation.snapshot.gpus.mode[row])]
    if now is None:
        return "its agent can prepare no sharing mode for this job"
    if now is SharingMode.EXCLUSIVE:
        return f"used exclusively by {evaluation.snapshot.gpus.tenants[row][0]}"
    if evaluation.limits.alone:
        return "in use, and the policy gives every job a GPU of its own"
    if demand.mode is RequestedMode.EXCLUSIVE:
        return "in use, and the job wants a GPU of its own"
    if demand.mode is RequestedMode.AUTO and demand.gpus > 1:
        reached = "MIG instance" if now is SharingMode.MIG else "MPS daemon"
        return f"shared by {now}, and a process of several GPUs reaches only one {reached}"
    kind = evaluation.snapshot.classes[int(evaluation.snapshot.gpus.device_class[row])]
    facts = evaluation.pod_request.requirements(kind)
    if demand.mode is RequestedMode.AUTO and facts.is_known and now is SharingMode.MIG:
        return f"divided by MIG, and no instance holds {facts.profile.memory_mib or 0:,} MiB"
    if demand.mode is RequestedMode.AUTO and not facts.is_known:
        return f"in use, and the job must be alone: {unbounded(demand, kind.product)}"
    return f"shared by {now}, and the job wants {demand.mode}"


def _tenancy(evaluation: Evaluation, row: int) -> str:
    columns, namespace = evaluation.snapshot.gpus, evaluation.pod_request.demand.namespace
    others = sorted({tenant.namespace for tenant in columns.tenants[row]} - {namespace})
    if not others:
        user = int(columns.user[row])
        served = "several users" if user == MIXED else f"user {user}"
        return f"its MPS server serves {served}, and the job runs as user {evaluation.pod_request.user}"
    if MODES[int(evaluation.results.mode[row])] is SharingMode.MPS:
        return f"its MPS server belongs to namespace {', '.join(others)}"
    return f"used from namespace {', '.join(others)}, and not all are willing to share across namespaces"


def _slots(evaluation: Evaluation, row: int) -> str:
    columns = evaluation.snapshot.gpus
    if int(columns.count[row]) < evaluation.slots:
        kind = evaluation.snapshot.classes[int(columns.device_class[row])]
        (gb, slices), instance = whole(kind.mig_profiles), evaluation.pod_request.requirements(kind).mig
        taken = f"{int(columns.mig_slices[row])} of {slices} slices and {int(columns.mig_gb[row])} of {gb} GB"
        return f"its MIG instances take {taken}, beside which {instance.name if instance else 'none'} has no room"
    return (
        f"has {pluralize(int(evaluation.snapshot.gpus.count[row]), 'tenant')}, the most allowed is {evaluation.slots}"
    )


def _condition(evaluation: Evaluation, row: int) -> str:
    asked, columns, told = evaluation.limits, evaluation.snapshot.gpus, []
    jobs, free, active = int(columns.count[row]), int(columns.free_mib[row]), columns.sm_active[row]
    if asked.max_sm_active is not None and active > asked.max_sm_active:
        told.append(f"SM activity {active:.2f}, the policy allows {asked.max_sm_active:.2f}")
    if asked.max_joint_sm_active is not None and not told:
        kind = evaluation.snapshot.classes[int(columns.device_class[row])]
        joint = active + evaluation.pod_request.requirements(kind).profile.sm_active_ratio
        if jobs and joint > asked.max_joint_sm_active:
            told.append(f"joint SM activity {joint:.2f}, the policy allows {asked.max_joint_sm_active:.2f}")
    if asked.min_free_mib and free < asked.min_free_mib:
        told.append(f"{free:,} MiB free, the policy asks for {asked.min_free_mib:,} MiB")
    if asked.max_jobs is not None and jobs >= asked.max_jobs:
        told.append(f"{pluralize(jobs, 'tenant')}, the policy allows {asked.max_jobs}")
    return " and ".join(told)


_REASONS: Mapping[Check, Callable[[Evaluation, int], str]] = {
    Check.HEALTH: lambda evaluation, row: evaluation.snapshot.unavailable[row].reason,
    Check.SUITABLE: _unsuitable,
    Check.MODE: _mode,
    Check.TENANCY: _tenancy,
    Check.SLOTS: _slots,
    Check.CONDITION: _condition,
    Check.SLOWDOWN: too_slow,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """Which part of the cluster a summary speaks of."""

    rows: Rows
    """GPUs of the nodes in question."""
    without_gpus: int
    """Nodes in question that report no GPUs."""


def summary(evaluation: Evaluation, offer: Offer) -> str:
    """Say in one sentence why none of the nodes in question fits, with numbers; begins with `NoGpuFits: `."""
    rows = offer.rows
    if not rows.size:
        return f"{PREFIX}no node offered reports GPUs; is the node agent running there?"
    groups = _groups(evaluation, rows)
    named = [f"{_amount(evaluation, rows, part)}: {reason}" for reason, part in groups[:MOST_GROUPS]]
    before = [*_several(evaluation, rows), *_memory(evaluation, rows)]
    after = [f"{pluralize(offer.without_gpus, 'node')}: no GPUs reported"] if offer.without_gpus else []

    def naming(number: int) -> str:
        parts = [shortened(part, LONGEST_PART) for part in [*before, *named[:number], *after]]
        if left := groups[number:]:
            gpus = pluralize(sum(part.size for _, part in left), "GPU")
            parts.append(f"and {pluralize(len(left), 'more reason')} for {gpus}")
        return PREFIX + "; ".join(parts)

    number = len(named)
    while number and len(naming(number)) > LONGEST_SUMMARY:
        number -= 1
    return naming(number)


def _several(evaluation: Evaluation, rows: Rows) -> list[str]:
    """What is missing to a worker of several GPUs where some GPUs fit, but never enough in one mode on one node."""
    wanted = evaluation.pod_request.demand.gpus
    fitting = rows[evaluation.ok[rows]]
    if wanted == 1 or not fitting.size:
        return []
    team = evaluation.snapshot.gpus.node[fitting].astype(np.int64) * len(MODES) + evaluation.results.mode[fitting]
    most = int(np.unique(team, return_counts=True)[1].max())
    return [f"needs {wanted} GPUs on one node in one mode, the best node has {most}"]


@dataclass(frozen=True, slots=True)
class _Short:
    """The GPU of a product that lacks least memory."""

    product: str
    has_mib: int
    need_mib: int
    is_too_small: bool
    """Whether even an empty one would not do."""
    is_freest: bool
    """Whether no GPU of this product has more."""

    def __str__(self) -> str:
        which = "freest" if self.is_freest else "another"
        return f"{which} {self.product} has {self.has_mib:,} MiB {'total' if self.is_too_small else 'free'}"


def _memory(evaluation: Evaluation, rows: Rows) -> list[str]:
    """What is needed, and for each product the freest of the GPUs that have less."""
    if evaluation.pod_request.demand.is_unknown:
        return []
    asked = rows[(evaluation.results.failed[rows] != Check.SUITABLE) | evaluation.too_small(rows)]
    names = [kind.product for kind in evaluation.snapshot.classes]
    product = np.unique(names, return_inverse=True)[1][evaluation.snapshot.gpus.device_class[asked]]
    found = [_shortest(evaluation, asked[product == one]) for one in np.flatnonzero(np.bincount(product))]
    short = sorted((one for one in found if one is not None), key=lambda one: -one.has_mib)
    if not short:
        return []
    low, high = min(one.need_mib for one in short), max(one.need_mib for one in short)
    told = [str(one) if low == high else f"{one}, needs {one.need_mib:,}" for one in short[:MOST_PRODUCTS]]
    if len(short) > MOST_PRODUCTS:
        told.append(f"{pluralize(len(short) - MOST_PRODUCTS, 'product')} with less")
    return [f"needs {low:,} MiB" if low == high else f"needs {low:,} to {high:,} MiB", ", ".join(told)]


def _shortest(evaluation: Evaluation, rows: Rows) -> _Short | None:
    """The GPU of one product that lacks least memory; None where all have enough."""
    columns = evaluation.snapshot.gpus
    # Beside an exclusive tenant, or for a job that wants to be alone, memory is not what is missing.
    lacking = rows[(evaluation.results.failed[rows] == Check.MEMORY) | evaluation.too_small(rows)]
    if not lacking.size:
        return None
    row = int(lacking[np.argmax(evaluation.left_mib(lacking))])
    small = bool(evaluation.too_small(_one(row))[0])
    return _Short(
        product=evaluation.snapshot.product(row),
        has_mib=int(columns.usable_mib[row] if small else columns.free_mib[row]),
        need_mib=int(evaluation.need_mib(_one(row))[0]),
        is_too_small=small,
        is_freest=bool(columns.free_mib[row] >= columns.free_mib[rows].max()),
    )


_TOLD_IN_GROUPS = (
    Check.SLOWDOWN,
    Check.MODE,
    Check.TENANCY,
    Check.SLOTS,
    Check.CONDITION,
    Check.HEALTH,
    Check.SUITABLE,
)


def _groups(evaluation: Evaluation, rows: Rows) -> list[tuple[str, Rows]]:
    """The other reasons, each with the GPUs that it keeps out; the commonest first."""
    failed = evaluation.results.failed[rows]
    told: dict[str, list[Rows]] = {}
    for check in _TOLD_IN_GROUPS:
        mine = rows[failed == check]
        mine = mine[~evaluation.too_small(mine)]
        for key in kinds(evaluation, check, mine):
            part = mine[key]
            closest = int(part[np.argmax(evaluation.margins(check, part))])
            reason = _reason_of_group(evaluation, check, part, closest)
            told.setdefault(reason, []).append(part)
    together = [(reason, np.concatenate(parts)) for reason, parts in told.items()]
    return sorted(together, key=lambda item: -item[1].size)


def _reason_of_group(evaluation: Evaluation, check: Check, rows: Rows, closest: int) -> str:
    """What to say of several GPUs; the one that came closest is the example."""
    mode = int(evaluation.snapshot.gpus.mode[closest])
    if check is Check.MODE and mode == EXCLUSIVE and rows.size > 1:
        return "used exclusively"
    if check is Check.SUITABLE:
        reason = _unsuitable(evaluation, closest)
        # Of the wrong product there may be many kinds, and all that counts is what is wrong with them.
        return reason.partition(":")[0] if reason.startswith(WRONG_PRODUCT) else reason
    return standing(evaluation, check, rows, closest) + _REASONS[check](evaluation, closest)


def _amount(evaluation: Evaluation, rows: Rows, part: Rows) -> str:
    """Count whole nodes where every GPU of each of them is meant, GPUs otherwise."""
    node = evaluation.snapshot.gpus.node
    of_each = np.bincount(node[part])
    of_part = np.flatnonzero(of_each)
    in_part, in_all = of_each[of_part], np.bincount(node[rows])[of_part]
    idle = evaluation.snapshot.gpus.mode[part] == NO_MODE
    if idle.all() and (in_part == in_all).all():
        return pluralize(len(of_part), "node")
    return pluralize(len(part), "GPU")


_DECIDED = frozenset((Check.SUITABLE, Check.MODE))
"""Where one of these fails, nothing can be said of memory and slowdown: both hang on how the job would be there."""


def all_failures(evaluation: Evaluation, row: int) -> str:
    """Say what became of one GPU: every check that fails there, or that the job fits and what room each leaves."""
    if int(evaluation.results.failed[row]) < 0:
        return "; ".join(
            [outcome(evaluation, row), *([", ".join(room)] if (room := headroom(evaluation, row)) else [])]
        )
    besides = [full_reason(evaluation, row, check) for check in other_failures(evaluation, row)]
    return "; besides, ".join([outcome(evaluation, row), *besides])


def headroom(evaluation: Evaluation, row: int) -> list[str]:
    """Say of a GPU that the job fits on how far it is from the limits that the site sets: tenants and preconditions.

    A job that has the GPU to itself is no nearer to any number of tenants than another.
    """
    asked, columns, told = evaluation.limits, evaluation.snapshot.gpus, []
    mode, jobs = int(evaluation.results.mode[row]), int(columns.count[row])
    kind = evaluation.snapshot.classes[int(columns.device_class[row])]
    if mode != EXCLUSIVE:
        most = evaluation.slots if asked.max_jobs is None else min(evaluation.slots, asked.max_jobs)
        told.append(f"tenant {jobs + 1} of at most {most}")
    if mode == MIG and (instance := evaluation.pod_request.requirements(kind).mig) is not None:
        (gb, slices), taken = whole(kind.mig_profiles), (int(columns.mig_gb[row]), int(columns.mig_slices[row]))
        told.append(f"{instance.name} beside {taken[1]} of {slices} slices and {taken[0]} of {gb} GB taken")
    active = float(columns.sm_active[row])
    if asked.max_sm_active is not None:
        told.append(f"SM activity {active:.2f} of at most {asked.max_sm_active:.2f}")
    if asked.max_joint_sm_active is not None and jobs:
        joint = active + evaluation.pod_request.requirements(kind).profile.sm_active_ratio
        told.append(f"joint SM activity {joint:.2f} of at most {asked.max_joint_sm_active:.2f}")
    if asked.min_free_mib:
        told.append(f"{int(columns.free_mib[row]):,} MiB free before it, at least {asked.min_free_mib:,} asked for")
    return told


def other_failures(evaluation: Evaluation, row: int) -> list[Check]:
    """Return the checks that fail on a GPU, in their order, but for the first; none where all pass."""
    first = int(evaluation.results.failed[row])
    if first < 0:
        return []
    openings, kind = evaluation.openings, int(evaluation.snapshot.gpus.kind[row])
    kept_out = int(openings.kept_out.take(kind))
    found = {
        check
        for check, fails in failures(evaluation, evaluation.snapshot.gpus.take(np.array([row])))
        if fails is not None and bool(fails[0])
    }
    if kept_out == Check.SUITABLE and evaluation.limits.max_joint_sm_active is not None:
        found -= {Check.CONDITION}  # what it would do there is not known
    if kept_out in _DECIDED:
        found = (found | {Check(kept_out)}) - {Check.MEMORY}
    elif evaluation.snapshot.gpus.count[row]:
        closest = evaluation.closest(row)
        found |= {Check.SLOWDOWN} if closest.limit - closest.slowdown < -SLACK else set()
    return sorted(found - {Check(first)})


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """One GPU and what is to be said of it."""

    node: str
    index: int
    uuid: GpuUuid
    product: str
    fits: bool
    said: str
    counts_tenants: bool = False
    """Whether what its tenants do had a say in that."""

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.node} ({self.product}): {self.said}"


def with_own(answers: Iterable[GpuAnswer], own: frozenset[GpuUuid]) -> list[GpuAnswer]:
    """Say where a job is already; what is said besides is what would be so without it."""
    return [replace(one, said=f"it is here; without it: {one.said}") if one.uuid in own else one for one in answers]


def with_measures(answers: Iterable[GpuAnswer], measured: Mapping[GpuUuid, str]) -> list[GpuAnswer]:
    """Say of GPUs whose tenants had a say what was measured of these in place of what was predicted."""
    return [
        replace(one, said=f"{one.said}; {measured[one.uuid]}") if one.counts_tenants and one.uuid in measured else one
        for one in answers
    ]


def with_refusals(answers: Iterable[GpuAnswer], refused: Mapping[str, str]) -> list[GpuAnswer]:
    """Say of the GPUs of some nodes, by name, why kube-scheduler would not offer these nodes at all."""
    return [
        replace(one, fits=False, said=f"{why}; {'the GPU itself ' if one.fits else ''}{one.said}")
        if (why := refused.get(one.node)) is not None
        else one
        for one in answers
    ]


def lines(answers: Iterable[GpuAnswer], *, each: bool) -> list[str]:
    """Write the answers down.

    Args:
        answers: Of GPUs, in the order in which they are told.
        each: Whether every GPU has a line of its own.
    """
    if each:
        return [str(one) for one in answers]
    alike: dict[tuple[str, str], list[GpuAnswer]] = {}
    for one in answers:
        alike.setdefault((one.product, one.said), []).append(one)
    return [_line(group) for group in alike.values()]


def broken(line: str, width: int) -> str:
    """Break a line between words where a terminal ends, what follows further in; words of any length stay whole."""
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _line(group: list[GpuAnswer]) -> str:
    first, nodes = group[0], {one.node for one in group}
    if len(group) == 1:
        return str(first)
    where = first.node if len(nodes) == 1 else pluralize(len(nodes), "node")
    return f"{pluralize(len(group), 'GPU')} of {where} ({first.product}): {first.said}"
