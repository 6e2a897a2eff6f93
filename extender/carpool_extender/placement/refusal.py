"""Refusals as sentences: which check, what was found, by how much it misses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from carpool_core.values import RequestedMode, SharingMode

from carpool_extender.placement.checks import Check, Verdict
from carpool_extender.placement.kinds import kinds, standing
from carpool_extender.placement.modes import EXCLUSIVE, unbounded
from carpool_extender.placement.pace import beyond, expected_slowdown, neighbours, too_slow
from carpool_extender.state.doubts import shortened
from carpool_extender.state.mig import whole
from carpool_extender.state.view import MODES, NO_MODE, SEVERAL, Rows

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
