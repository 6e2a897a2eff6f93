"""Refusals as sentences: which check, what was found, by how much it misses."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from carpool_core.values import GpuUuid, RequestedMode, SharingMode
from carpool_predictor.cost_models.slowdown import shipped
from numpy.typing import NDArray

from carpool_extender.cache.gpu_table import MODES, NO_MODE, NOBODY, SEVERAL, Bools, Columns, Rows
from carpool_extender.cache.health import shortened
from carpool_extender.cache.mig import whole
from carpool_extender.framework.filters import SLACK, Check, Closest, Verdict, failures, missed
from carpool_extender.framework.sharing_mode import EXCLUSIVE, MIG, unbounded

DIGITS = 2
"""Behind the point, of numbers in sentences."""


def kinds(verdict: Verdict, check: Check, rows: Rows) -> Sequence[Bools]:
    """Split GPUs that failed the same check by what a sentence would say of them; masks over `rows`."""
    if not rows.size:
        return []
    columns = verdict.view.columns
    keys: NDArray[np.integer] = np.zeros(rows.size, np.int64)
    if check is Check.SLOWDOWN:
        keys = verdict.found.is_newcomer[rows].astype(np.int64)
    elif check is Check.HEALTH:
        keys = np.array([verdict.view.hindered[row].kind for row in rows.tolist()])
    elif check is Check.TENANCY:  # another namespace's, or another user's of the same one
        keys = columns.landlord[rows] == verdict.view.namespaces.get(verdict.applicant.demand.namespace, NOBODY)
    elif check is Check.MODE:
        keys = columns.mode[rows]
    elif check is Check.SUITABLE:
        keys = columns.device_class[rows]
    return [keys == key for key in np.flatnonzero(np.bincount(keys))]


def standing(verdict: Verdict, check: Check, rows: Rows, closest: int) -> str:
    """Say how the GPU that came closest stands for all that failed the same check.

    Returns:
        What to put before the sentence about it: nothing where it holds for each, "at best" where what it tells is a
        number that is worse of the others, "for example" where others have something else.
    """
    if rows.size == 1:
        return ""
    columns = verdict.view.columns
    if check is Check.HEALTH:
        said = verdict.view.hindered[closest].reason
        return _EXAMPLE if any(verdict.view.hindered[row].reason != said for row in rows.tolist()) else ""
    if check is Check.TENANCY:
        return _EXAMPLE if _differ(columns.landlord[rows]) else ""
    if check is Check.SLOTS:
        if _differ(columns.mig_slices[rows]) or _differ(columns.mig_gb[rows]):
            return _EXAMPLE
        return _BEST if _differ(columns.count[rows]) else ""
    if check is Check.CONDITION:
        sm = verdict.applicant.columns(verdict.view.classes).sm[columns.device_class[rows]]
        told = missed(verdict.conditions, columns.take(rows), sm)
        if not any(map(_differ, told)):
            return ""
        return _BEST if len(told) == 1 else _EXAMPLE
    return _BEST if check is Check.SLOWDOWN and _suffer_apart(verdict, rows) else ""


_BEST, _EXAMPLE = "at best ", "for example "


def _differ(numbers: NDArray[Any]) -> bool:
    return bool(np.ptp(np.round(numbers, DIGITS)))


def _suffer_apart(verdict: Verdict, rows: Rows) -> bool:
    if _differ(verdict.margins(Check.SLOWDOWN, rows)):
        return True
    if verdict.found.is_newcomer[rows[0]]:
        return False
    columns = verdict.view.columns
    first = _jobs(columns, int(rows[0]))
    return any(_jobs(columns, row) != first for row in rows.tolist())


def _jobs(columns: Columns, row: int) -> list[str]:
    return [str(tenant) for tenant in columns.tenants[row]]


MOST_DIGITS = 6
"""Digits behind the point of a slowdown, where fewer would show it as equal to its limit."""
MOST_NAMED = 3
"""Neighbours of which each is told what would become of it."""


def expected_slowdown(verdict: Verdict, rows: Sequence[int], limit: float | None = None) -> str:
    """Say how much slower a newcomer is to be expected on some GPUs, and what it will hardly exceed.

    Args:
        verdict: Of the newcomer.
        rows: GPUs that it fits on, all of which it would have.
        limit: What it accepts, where that is to be said.
    """
    found = float(verdict.found.newcomer[list(rows)].max())
    told = f"expected slowdown {found:.2f}" + ("" if limit is None else f" of {limit:.2f}")
    upper = max(verdict.upper(row) for row in rows) if verdict.view.columns.count[list(rows)].any() else found
    return told if upper <= found else f"{told}, {shipped().level:.0%} below {upper:.2f}"


def neighbours(verdict: Verdict, row: int) -> str:
    """Say what would become of the tenants of a GPU that the newcomer fits on; empty where there are none.

    Of many it names who is closest to its limit.
    """
    if not verdict.view.columns.count[row]:
        return ""
    _, *others = verdict.met(row)
    nearest = sorted(others, key=lambda one: one.limit - one.slowdown)[: 1 if len(others) > MOST_NAMED else None]
    told = [_beside(verdict, row, one) for one in sorted(nearest)]
    if len(told) < len(others):
        told.append(f"{len(others) - 1} others further from their limits")
    return f"; beside {', '.join(told)}"


def _beside(verdict: Verdict, row: int, one: Closest) -> str:
    surely = "" if one.slowdown == one.expected else f" (expected {one.expected:.2f})"
    return f"{verdict.view.columns.tenants[row][one.tenant]} {one.slowdown:.2f} of {one.limit:.2f}{surely}"


def too_slow(verdict: Verdict, row: int) -> str:
    """Say who would be slowed beyond what it accepts."""
    closest = verdict.closest(row)
    found, limit = _told_apart(closest.slowdown, closest.limit)
    surely = "" if closest.slowdown == closest.expected else f", expected {closest.expected:.2f}"
    verb = "could" if surely else "would"
    if closest.tenant < 0:
        return f"{verb} run {found} times as long there{surely}, accepts {limit}"
    tenant = verdict.view.columns.tenants[row][closest.tenant]
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


def counted(number: int, noun: str) -> str:
    """Write a number of things: `1 GPU`, `20 nodes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _one(row: int) -> Rows:
    return np.array([row])


def explanation(verdict: Verdict, row: int) -> str:
    """Say in full what became of one GPU: the check, what was found, the margin; or that the job fits there."""
    return f"{verdict.view.place(row)} ({verdict.view.product(row)}): {outcome(verdict, row)}"


def outcome(verdict: Verdict, row: int) -> str:
    """Say the same of the first check that fails, without naming the GPU."""
    failed = int(verdict.found.failed[row])
    if failed < 0:
        left = int(verdict.left_mib(_one(row))[0])
        mode, slowdown = MODES[int(verdict.found.mode[row])], expected_slowdown(verdict, [row])
        return f"fits by {mode}, leaves {left:,} MiB, {slowdown}{neighbours(verdict, row)}"
    return full_reason(verdict, row, Check(failed))


def full_reason(verdict: Verdict, row: int, check: Check) -> str:
    """Say how a check fails on one GPU, and by how much."""
    if check is Check.MEMORY:
        need, free = int(verdict.need_mib(_one(row))[0]), int(verdict.view.columns.free_mib[row])
        return f"needs {need:,} MiB{_by_turns(verdict, row)}, has {free:,} MiB free ({need - free:,} MiB short)"
    reason = _REASONS[check](verdict, row)
    if check is Check.SLOWDOWN:
        closest = verdict.closest(row)
        reason += f" ({beyond(closest.slowdown - closest.limit)} beyond)"
    return reason


def _by_turns(verdict: Verdict, row: int) -> str:
    """Say why more is needed here than elsewhere, where that is so."""
    facts = verdict.applicant.facts(verdict.view.classes[int(verdict.view.columns.device_class[row])])
    is_by_turns = MODES[int(verdict.found.mode[row])] is SharingMode.TIME_SLICING
    return " for a first run by turns" if is_by_turns and facts.is_wider_by_turns else ""


def _unsuitable(verdict: Verdict, row: int) -> str:
    kind = verdict.view.classes[int(verdict.view.columns.device_class[row])]
    return verdict.applicant.facts(kind).reason or "unsuitable"


def _mode(verdict: Verdict, row: int) -> str:
    demand = verdict.applicant.demand
    now = MODES[int(verdict.view.columns.mode[row])]
    if now is None:
        return "its agent can prepare no sharing mode for this job"
    if now is SharingMode.EXCLUSIVE:
        return f"used exclusively by {verdict.view.columns.tenants[row][0]}"
    if verdict.conditions.alone:
        return "in use, and the policy gives every job a GPU of its own"
    if demand.mode is RequestedMode.EXCLUSIVE:
        return "in use, and the job wants a GPU of its own"
    if demand.mode is RequestedMode.AUTO and demand.gpus > 1:
        reached = "MIG instance" if now is SharingMode.MIG else "MPS daemon"
        return f"shared by {now}, and a process of several GPUs reaches only one {reached}"
    kind = verdict.view.classes[int(verdict.view.columns.device_class[row])]
    facts = verdict.applicant.facts(kind)
    if demand.mode is RequestedMode.AUTO and facts.is_known and now is SharingMode.MIG:
        return f"divided by MIG, and no instance holds {facts.profile.memory_mib or 0:,} MiB"
    if demand.mode is RequestedMode.AUTO and not facts.is_known:
        return f"in use, and the job must be alone: {unbounded(demand, kind.product)}"
    return f"shared by {now}, and the job wants {demand.mode}"


def _tenancy(verdict: Verdict, row: int) -> str:
    columns, namespace = verdict.view.columns, verdict.applicant.demand.namespace
    others = sorted({tenant.namespace for tenant in columns.tenants[row]} - {namespace})
    if not others:
        user = int(columns.user[row])
        served = "several users" if user == SEVERAL else f"user {user}"
        return f"its MPS server serves {served}, and the job runs as user {verdict.applicant.user}"
    if MODES[int(verdict.found.mode[row])] is SharingMode.MPS:
        return f"its MPS server belongs to namespace {', '.join(others)}"
    return f"used from namespace {', '.join(others)}, and not all are willing to share across namespaces"


def _slots(verdict: Verdict, row: int) -> str:
    columns = verdict.view.columns
    if int(columns.count[row]) < verdict.slots:
        kind = verdict.view.classes[int(columns.device_class[row])]
        (gb, slices), instance = whole(kind.mig_profiles), verdict.applicant.facts(kind).mig
        taken = f"{int(columns.mig_slices[row])} of {slices} slices and {int(columns.mig_gb[row])} of {gb} GB"
        return f"its MIG instances take {taken}, beside which {instance.name if instance else 'none'} has no room"
    return f"has {counted(int(verdict.view.columns.count[row]), 'tenant')}, the most allowed is {verdict.slots}"


def _condition(verdict: Verdict, row: int) -> str:
    asked, columns, told = verdict.conditions, verdict.view.columns, []
    jobs, free, active = int(columns.count[row]), int(columns.free_mib[row]), columns.sm_active[row]
    if asked.most_sm_active is not None and active > asked.most_sm_active:
        told.append(f"SM activity {active:.2f}, the policy allows {asked.most_sm_active:.2f}")
    if asked.most_joint_sm_active is not None and not told:
        kind = verdict.view.classes[int(columns.device_class[row])]
        joint = active + verdict.applicant.facts(kind).profile.sm_active_ratio
        if jobs and joint > asked.most_joint_sm_active:
            told.append(f"joint SM activity {joint:.2f}, the policy allows {asked.most_joint_sm_active:.2f}")
    if asked.least_free_mib and free < asked.least_free_mib:
        told.append(f"{free:,} MiB free, the policy asks for {asked.least_free_mib:,} MiB")
    if asked.most_jobs is not None and jobs >= asked.most_jobs:
        told.append(f"{counted(jobs, 'tenant')}, the policy allows {asked.most_jobs}")
    return " and ".join(told)


_REASONS: Mapping[Check, Callable[[Verdict, int], str]] = {
    Check.HEALTH: lambda verdict, row: verdict.view.hindered[row].reason,
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


def summary(verdict: Verdict, offer: Offer) -> str:
    """Say in one sentence why none of the nodes in question fits, with numbers; begins with `NoGpuFits: `."""
    rows = offer.rows
    if not rows.size:
        return f"{PREFIX}no node offered reports GPUs; is the node agent running there?"
    groups = _groups(verdict, rows)
    named = [f"{_amount(verdict, rows, part)}: {reason}" for reason, part in groups[:MOST_GROUPS]]
    before = [*_several(verdict, rows), *_memory(verdict, rows)]
    after = [f"{counted(offer.without_gpus, 'node')}: no GPUs reported"] if offer.without_gpus else []

    def naming(number: int) -> str:
        parts = [shortened(part, LONGEST_PART) for part in [*before, *named[:number], *after]]
        if left := groups[number:]:
            gpus = counted(sum(part.size for _, part in left), "GPU")
            parts.append(f"and {counted(len(left), 'more reason')} for {gpus}")
        return PREFIX + "; ".join(parts)

    number = len(named)
    while number and len(naming(number)) > LONGEST_SUMMARY:
        number -= 1
    return naming(number)


def _several(verdict: Verdict, rows: Rows) -> list[str]:
    """What is missing to a worker of several GPUs where some GPUs fit, but never enough in one mode on one node."""
    wanted = verdict.applicant.demand.gpus
    fitting = rows[verdict.ok[rows]]
    if wanted == 1 or not fitting.size:
        return []
    team = verdict.view.columns.node[fitting].astype(np.int64) * len(MODES) + verdict.found.mode[fitting]
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


def _memory(verdict: Verdict, rows: Rows) -> list[str]:
    """What is needed, and for each product the freest of the GPUs that have less."""
    if verdict.applicant.demand.is_unknown:
        return []
    asked = rows[(verdict.found.failed[rows] != Check.SUITABLE) | verdict.too_small(rows)]
    names = [kind.product for kind in verdict.view.classes]
    product = np.unique(names, return_inverse=True)[1][verdict.view.columns.device_class[asked]]
    found = [_shortest(verdict, asked[product == one]) for one in np.flatnonzero(np.bincount(product))]
    short = sorted((one for one in found if one is not None), key=lambda one: -one.has_mib)
    if not short:
        return []
    low, high = min(one.need_mib for one in short), max(one.need_mib for one in short)
    told = [str(one) if low == high else f"{one}, needs {one.need_mib:,}" for one in short[:MOST_PRODUCTS]]
    if len(short) > MOST_PRODUCTS:
        told.append(f"{counted(len(short) - MOST_PRODUCTS, 'product')} with less")
    return [f"needs {low:,} MiB" if low == high else f"needs {low:,} to {high:,} MiB", ", ".join(told)]


def _shortest(verdict: Verdict, rows: Rows) -> _Short | None:
    """The GPU of one product that lacks least memory; None where all have enough."""
    columns = verdict.view.columns
    # Beside an exclusive tenant, or for a job that wants to be alone, memory is not what is missing.
    lacking = rows[(verdict.found.failed[rows] == Check.MEMORY) | verdict.too_small(rows)]
    if not lacking.size:
        return None
    row = int(lacking[np.argmax(verdict.left_mib(lacking))])
    small = bool(verdict.too_small(_one(row))[0])
    return _Short(
        product=verdict.view.product(row),
        has_mib=int(columns.usable_mib[row] if small else columns.free_mib[row]),
        need_mib=int(verdict.need_mib(_one(row))[0]),
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


def _groups(verdict: Verdict, rows: Rows) -> list[tuple[str, Rows]]:
    """The other reasons, each with the GPUs that it keeps out; the commonest first."""
    failed = verdict.found.failed[rows]
    told: dict[str, list[Rows]] = {}
    for check in _TOLD_IN_GROUPS:
        mine = rows[failed == check]
        mine = mine[~verdict.too_small(mine)]
        for key in kinds(verdict, check, mine):
            part = mine[key]
            closest = int(part[np.argmax(verdict.margins(check, part))])
            reason = _reason_of_group(verdict, check, part, closest)
            told.setdefault(reason, []).append(part)
    together = [(reason, np.concatenate(parts)) for reason, parts in told.items()]
    return sorted(together, key=lambda item: -item[1].size)


def _reason_of_group(verdict: Verdict, check: Check, rows: Rows, closest: int) -> str:
    """What to say of several GPUs; the one that came closest is the example."""
    mode = int(verdict.view.columns.mode[closest])
    if check is Check.MODE and mode == EXCLUSIVE and rows.size > 1:
        return "used exclusively"
    if check is Check.SUITABLE:
        reason = _unsuitable(verdict, closest)
        # Of the wrong product there may be many kinds, and all that counts is what is wrong with them.
        return reason.partition(":")[0] if reason.startswith(WRONG_PRODUCT) else reason
    return standing(verdict, check, rows, closest) + _REASONS[check](verdict, closest)


def _amount(verdict: Verdict, rows: Rows, part: Rows) -> str:
    """Count whole nodes where every GPU of each of them is meant, GPUs otherwise."""
    node = verdict.view.columns.node
    of_each = np.bincount(node[part])
    of_part = np.flatnonzero(of_each)
    in_part, in_all = of_each[of_part], np.bincount(node[rows])[of_part]
    idle = verdict.view.columns.mode[part] == NO_MODE
    if idle.all() and (in_part == in_all).all():
        return counted(len(of_part), "node")
    return counted(len(part), "GPU")


_DECIDED = frozenset((Check.SUITABLE, Check.MODE))
"""Where one of these fails, nothing can be said of memory and slowdown: both hang on how the job would be there."""


def in_full(verdict: Verdict, row: int) -> str:
    """Say what became of one GPU: every check that fails there, or that the job fits and what room each leaves."""
    if int(verdict.found.failed[row]) < 0:
        return "; ".join([outcome(verdict, row), *([", ".join(room)] if (room := rooms(verdict, row)) else [])])
    besides = [full_reason(verdict, row, check) for check in failing_besides(verdict, row)]
    return "; besides, ".join([outcome(verdict, row), *besides])


def rooms(verdict: Verdict, row: int) -> list[str]:
    """Say of a GPU that the job fits on how far it is from the limits that the site sets: tenants and preconditions.

    A job that has the GPU to itself is no nearer to any number of tenants than another.
    """
    asked, columns, told = verdict.conditions, verdict.view.columns, []
    mode, jobs = int(verdict.found.mode[row]), int(columns.count[row])
    kind = verdict.view.classes[int(columns.device_class[row])]
    if mode != EXCLUSIVE:
        most = verdict.slots if asked.most_jobs is None else min(verdict.slots, asked.most_jobs)
        told.append(f"tenant {jobs + 1} of at most {most}")
    if mode == MIG and (instance := verdict.applicant.facts(kind).mig) is not None:
        (gb, slices), taken = whole(kind.mig_profiles), (int(columns.mig_gb[row]), int(columns.mig_slices[row]))
        told.append(f"{instance.name} beside {taken[1]} of {slices} slices and {taken[0]} of {gb} GB taken")
    active = float(columns.sm_active[row])
    if asked.most_sm_active is not None:
        told.append(f"SM activity {active:.2f} of at most {asked.most_sm_active:.2f}")
    if asked.most_joint_sm_active is not None and jobs:
        joint = active + verdict.applicant.facts(kind).profile.sm_active_ratio
        told.append(f"joint SM activity {joint:.2f} of at most {asked.most_joint_sm_active:.2f}")
    if asked.least_free_mib:
        told.append(f"{int(columns.free_mib[row]):,} MiB free before it, at least {asked.least_free_mib:,} asked for")
    return told


def failing_besides(verdict: Verdict, row: int) -> list[Check]:
    """Return the checks that fail on a GPU, in their order, but for the first; none where all pass."""
    first = int(verdict.found.failed[row])
    if first < 0:
        return []
    openings, kind = verdict.openings, int(verdict.view.columns.kind[row])
    kept_out = int(openings.kept_out.take(kind))
    found = {
        check
        for check, fails in failures(verdict, verdict.view.columns.take(np.array([row])))
        if fails is not None and bool(fails[0])
    }
    if kept_out == Check.SUITABLE and verdict.conditions.most_joint_sm_active is not None:
        found -= {Check.CONDITION}  # what it would do there is not known
    if kept_out in _DECIDED:
        found = (found | {Check(kept_out)}) - {Check.MEMORY}
    elif verdict.view.columns.count[row]:
        closest = verdict.closest(row)
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
    where = first.node if len(nodes) == 1 else counted(len(nodes), "node")
    return f"{counted(len(group), 'GPU')} of {where} ({first.product}): {first.said}"
