"""Diagnosis: refusals, explanations of single GPUs, and reasons of placements, from the messages of the checks."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from carpool_core.resources.node import MAX_REASON_LENGTH, GpuNode, Reservation
from carpool_core.values import GpuUuid, SharingMode, pluralize
from carpool_predictor.models.slowdown import shipped

from carpool_extender.cache.cluster import shortened
from carpool_extender.cache.gpu_table import (
    MODES,
    NO_MODE,
    Rows,
    TenantUsage,
    counted_tenants,
    reserved_usage,
    usage_of,
)
from carpool_extender.cache.pod_request import mode_reason, tenant_profile, unbounded_reason
from carpool_extender.framework.filters import (
    CHECKS,
    HEALTH,
    LIMITS,
    MEMORY,
    MODE,
    NODE,
    PASSED,
    SLOTS,
    SLOWDOWN,
    SUITABILITY,
    TENANCY,
    Check,
    Evaluation,
    MemberSlowdown,
    other_failures,
)
from carpool_extender.framework.scores import Policy

PREFIX = "NoGpuFits: "
"""Begin of every summary: the reason in the job's condition Placed."""
MAX_NEIGHBOURS = 5
"""Jobs that the reason of a placement names."""
MAX_CO_TENANTS = 3
"""Co-tenants whose slowdowns are listed."""
MAX_PRODUCTS = 4
"""Products whose freest GPU a summary names."""
MAX_GROUPS = 6
"""Groups of GPUs that a summary names."""
MAX_SUMMARY, MAX_PART = 860, 300
"""Characters of a summary and of each part. An event holds 1,024, and kube-scheduler adds its own text."""


def expected_slowdown(evaluation: Evaluation, rows: Sequence[int], limit: float | None = None) -> str:
    """Return the expected slowdown of the pod and its upper quantile.

    The pod would get the GPUs of `rows` together. `limit` is the slowdown that it accepts, to name it too.
    """
    found = float(evaluation.results.slowdown[list(rows)].max())
    text = f"expected slowdown {found:.2f}" + ("" if limit is None else f" of {limit:.2f}")
    is_shared = evaluation.snapshot.gpus.count[list(rows)].any()
    upper = max(evaluation.upper_slowdown(row) for row in rows) if is_shared else found
    basis = next(filter(None, (evaluation.basis(row) for row in rows)), "") if is_shared else ""
    text += "" if upper <= found else f" ({shipped().level:.0%} chance of less than {upper:.2f})"
    return f"{text}, {basis}" if basis else text


def co_tenants(evaluation: Evaluation, row: int) -> str:
    """Return the slowdowns of the tenants of a GPU that the pod fits on; of many, the closest to its limit."""
    if not evaluation.snapshot.gpus.count[row]:
        return ""
    _, *others = evaluation.members(row)
    nearest = sorted(others, key=lambda one: one.limit - one.slowdown)[: 1 if len(others) > MAX_CO_TENANTS else None]
    parts = [_member(evaluation, row, one) for one in sorted(nearest)]
    if len(parts) < len(others):
        parts.append(f"{len(others) - 1} others further from their limits")
    return f"; beside {', '.join(parts)}"


def _member(evaluation: Evaluation, row: int, one: MemberSlowdown) -> str:
    expected = "" if one.slowdown == one.expected else f" (expected {one.expected:.2f})"
    return f"{evaluation.snapshot.gpus.tenants[row][one.tenant]} {one.slowdown:.2f} of {one.limit:.2f}{expected}"


def explain_gpu(evaluation: Evaluation, row: int) -> str:
    """Return the outcome for one GPU, with its name and product."""
    return f"{evaluation.snapshot.place(row)} ({evaluation.snapshot.product(row)}): {outcome(evaluation, row)}"


def outcome(evaluation: Evaluation, row: int) -> str:
    """Return the first check that fails on a GPU with its numbers, or how the pod fits."""
    failed = int(evaluation.results.failed[row])
    if failed >= 0:
        return CHECKS[failed].message(evaluation, row)
    left = int(evaluation.left_mib(np.array([row]))[0])
    mode, slowdown = MODES[int(evaluation.results.mode[row])], expected_slowdown(evaluation, [row])
    return f"fits by {mode}, leaves {left:,} MiB, {slowdown}{co_tenants(evaluation, row)}"


def all_failures(evaluation: Evaluation, row: int) -> str:
    """Return every check that fails on a GPU; if the pod fits, the room that each limit leaves."""
    if int(evaluation.results.failed[row]) < 0:
        room = headroom(evaluation, row)
        return "; ".join([outcome(evaluation, row), *([", ".join(room)] if room else [])])
    others = [check.message(evaluation, row) for check in other_failures(evaluation, row)]
    return "; besides, ".join([outcome(evaluation, row), *others])


def headroom(evaluation: Evaluation, row: int) -> list[str]:
    """Return how far a GPU that the pod fits on is from the limits that the site sets."""
    return [part for check in CHECKS for part in check.headroom(evaluation, row)]


def summary(evaluation: Evaluation, rows: Rows, nodes_without_gpus: int = 0) -> str:
    """Return one sentence about why none of some nodes fits, with numbers; begins with `PREFIX`.

    `rows` are the GPUs of these nodes, of which `nodes_without_gpus` report none.
    """
    if not rows.size:
        return f"{PREFIX}no node offered reports GPUs; is the node agent running there?"
    groups = _groups(evaluation, rows)
    named = [f"{_amount(evaluation, rows, part)}: {message}" for message, part in groups[:MAX_GROUPS]]
    first = [*_incomplete_sets(evaluation, rows), *_memory(evaluation, rows)]
    last = [f"{pluralize(nodes_without_gpus, 'node')}: no GPUs reported"] if nodes_without_gpus else []

    def naming(number: int) -> str:
        parts = [shortened(part, MAX_PART) for part in [*first, *named[:number], *last]]
        if left := groups[number:]:
            gpus = pluralize(sum(part.size for _, part in left), "GPU")
            parts.append(f"and {pluralize(len(left), 'more reason')} for {gpus}")
        return PREFIX + "; ".join(parts)

    number = len(named)
    while number and len(naming(number)) > MAX_SUMMARY:
        number -= 1
    return naming(number)


def _incomplete_sets(evaluation: Evaluation, rows: Rows) -> list[str]:
    """Return how many GPUs the best node has for a worker of several, if some fit but never enough."""
    wanted = evaluation.pod_request.demand.gpus
    fitting = rows[evaluation.ok[rows]]
    if wanted == 1 or not fitting.size:
        return []
    most = int(np.unique(evaluation.node_and_mode(fitting), return_counts=True)[1].max())
    return [f"needs {wanted} GPUs on one node in one mode, the best node has {most}"]


def _memory(evaluation: Evaluation, rows: Rows) -> list[str]:
    """Return the memory needed, and for each product the GPU that lacks the least; empty if no GPU lacks memory."""
    if evaluation.pod_request.demand.is_unknown:
        return []
    gpus, classes = evaluation.snapshot.gpus, evaluation.snapshot.classes
    products = sorted({kind.product for kind in classes})
    number = np.array([products.index(kind.product) for kind in classes])[gpus.device_class[rows]]
    failed = evaluation.results.failed[rows]
    too_small = evaluation.too_small(rows)
    lacks = (failed == MEMORY.number) | too_small
    short = list[tuple[int, int, str]]()
    for which in np.flatnonzero(np.bincount(number[lacks], minlength=1)).tolist():
        product, mine = products[which], number == which
        lacking = rows[mine & lacks]
        row = lacking[[np.argmax(evaluation.left_mib(lacking))]]
        others = rows[mine & (failed != NODE.number) & ((failed != SUITABILITY.number) | too_small)]
        rank = "freest" if gpus.free_mib[row[0]] >= gpus.free_mib[others].max() else "another"
        is_too_small = evaluation.too_small(row)[0]  # an empty one does not suffice either
        has_mib = int((gpus.usable_mib if is_too_small else gpus.free_mib)[row[0]])
        text = f"{rank} {product} has {has_mib:,} MiB {'total' if is_too_small else 'free'}"
        short.append((has_mib, int(evaluation.need_mib(row)[0]), text))
    if not short:
        return []
    short.sort(key=lambda one: -one[0])
    low, high = min(need for _, need, _ in short), max(need for _, need, _ in short)
    parts = [text if low == high else f"{text}, needs {need:,}" for _, need, text in short[:MAX_PRODUCTS]]
    if len(short) > MAX_PRODUCTS:
        parts.append(f"{pluralize(len(short) - MAX_PRODUCTS, 'product')} with less")
    return [f"needs {low:,} MiB" if low == high else f"needs {low:,} to {high:,} MiB", ", ".join(parts)]


_IN_GROUPS: Sequence[Check] = (SLOWDOWN, MODE, TENANCY, SLOTS, LIMITS, HEALTH, NODE, SUITABILITY)
"""Checks whose failures are grouped; failures of memory are summarised by product."""


def _groups(evaluation: Evaluation, rows: Rows) -> list[tuple[str, Rows]]:
    """Return the other messages, each with its GPUs, the most frequent first and unsuitable GPUs last."""
    failed, found = evaluation.results.failed[rows], dict[str, list[Rows]]()
    for check in _IN_GROUPS:
        mine = rows[failed == check.number]
        mine = mine[~evaluation.too_small(mine)]
        if not mine.size:
            continue
        keys = check.group_keys(evaluation, mine)
        for key in np.unique(keys):
            part = mine[keys == key]
            closest = int(part[np.argmax(check.margin(evaluation, part))])
            found.setdefault(check.group_message(evaluation, part, closest), []).append(part)
    groups = [(message, np.concatenate(parts)) for message, parts in found.items()]
    is_unsuitable = evaluation.results.failed == SUITABILITY.number
    return sorted(groups, key=lambda item: (is_unsuitable[item[1][0]], -item[1].size))


def _amount(evaluation: Evaluation, rows: Rows, part: Rows) -> str:
    """Return a number of nodes if the group consists of whole idle nodes, and a number of GPUs otherwise."""
    node = evaluation.snapshot.gpus.node
    in_part = np.bincount(node[part])
    nodes = np.flatnonzero(in_part)
    idle = evaluation.snapshot.gpus.mode[part] == NO_MODE
    if idle.all() and (in_part[nodes] == np.bincount(node[rows])[nodes]).all():
        return pluralize(len(nodes), "node")
    return pluralize(len(part), "GPU")


def mode_on(evaluation: Evaluation, rows: Sequence[int]) -> SharingMode:
    """Return the mode in which a pod would have some GPUs, the same on all of them."""
    mode = MODES[int(evaluation.results.mode[rows[0]])]
    if mode is None:
        raise AssertionError(f"{evaluation.snapshot.place(rows[0])} was chosen although no mode is possible there")
    return mode


def placement_reason(evaluation: Evaluation, rows: Sequence[int], policy: Policy) -> str:
    """Return why a pod gets some GPUs of one node, with the numbers of the decision."""
    snapshot, gpus, demand = evaluation.snapshot, evaluation.snapshot.gpus, evaluation.pod_request.demand
    mode, required = mode_on(evaluation, rows), evaluation.requirements(rows[0])
    indices = ", ".join(str(int(gpus.gpu_index[row])) for row in rows)
    node = snapshot.node_names[int(gpus.node[rows[0]])]
    neighbours = sorted({str(tenant) for row in rows for tenant in gpus.tenants[row]})
    more = [f"and {len(neighbours) - MAX_NEIGHBOURS} more"] if len(neighbours) > MAX_NEIGHBOURS else []
    beside = f"beside {', '.join([*neighbours[:MAX_NEIGHBOURS], *more])}" if neighbours else "alone"
    left = int(evaluation.left_mib(np.array(rows)).min())
    profile, unbounded = tenant_profile(required, mode), None
    if profile.memory_mib is None:
        unbounded = unbounded_reason(demand, snapshot.product(rows[0]), until_measured=profile.provisional)
    exclusive = evaluation.limits.exclusive
    because = mode_reason(mode, demand, is_first=not neighbours, exclusive=exclusive, unbounded=unbounded)
    parts = [
        f"{policy.name}: {mode} on GPU {indices} of {node} {beside}",
        f"{left:,} of {int(gpus.usable_mib[rows[0]]):,} MiB left",
        expected_slowdown(evaluation, rows, demand.max_slowdown),
        f"{mode} {because}",
    ]
    if unbounded and unbounded not in because:
        parts.append(unbounded)
    if mode is SharingMode.TIME_SLICING and required.needs_more_unenforced:
        parts.append(f"its first run counts with {profile.memory_mib:,} MiB, because time-slicing enforces no limit")
    return shortened("; ".join([*parts, *_passed_over(evaluation)]), MAX_REASON_LENGTH)


def _passed_over(evaluation: Evaluation) -> list[str]:
    """Return the GPU that was closest among those that had the memory and failed the slowdown check."""
    refused = np.flatnonzero(evaluation.results.failed == SLOWDOWN.number)
    if not refused.size:
        return []
    closest = int(refused[np.argmax(evaluation.results.slowdown_margin[refused])])
    which = "" if refused.size == 1 else "the closest was "
    gpus = pluralize(refused.size, "GPU")
    return [f"passed over {gpus} that had the memory: {which}{explain_gpu(evaluation, closest)}"]


_DEPENDS_ON_TENANTS = frozenset((PASSED, MEMORY.number, LIMITS.number, SLOWDOWN.number))
"""Outcomes of checks that count the use of the present tenants."""


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """Explanation of one GPU."""

    node: str
    index: int
    uuid: GpuUuid
    product: str
    fits: bool
    text: str
    depends_on_tenants: bool = False
    """Whether the use of the present tenants decided."""

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.node} ({self.product}): {self.text}"


def explain_gpus(evaluation: Evaluation, names: Sequence[str]) -> list[GpuAnswer]:
    """Return for each GPU of some nodes whether the pod fits, and if not, which checks fail by how much."""
    snapshot = evaluation.snapshot
    return [
        GpuAnswer(
            node=snapshot.node_names[int(snapshot.gpus.node[row])],
            index=int(snapshot.gpus.gpu_index[row]),
            uuid=snapshot.gpus.uuid[row],
            product=snapshot.product(row),
            fits=bool(evaluation.ok[row]),
            text=all_failures(evaluation, row),
            depends_on_tenants=int(evaluation.results.failed[row]) in _DEPENDS_ON_TENANTS,
        )
        for row in snapshot.rows_of(snapshot.ids(names)).tolist()
    ]


def with_own(answers: Iterable[GpuAnswer], own: frozenset[GpuUuid]) -> list[GpuAnswer]:
    """Mark the GPUs that the job has already; their explanations hold without it."""
    return [replace(one, text=f"it is here; without it: {one.text}") if one.uuid in own else one for one in answers]


def with_measures(answers: Iterable[GpuAnswer], nodes: Iterable[GpuNode]) -> list[GpuAnswer]:
    """Add what was measured in place of predictions, where the tenants' use decided."""
    measured = {uuid: text for node in nodes for uuid, text in measured_differences(node).items()}
    return [
        replace(one, text=f"{one.text}; {measured[one.uuid]}")
        if one.depends_on_tenants and one.uuid in measured
        else one
        for one in answers
    ]


def measured_differences(node: GpuNode) -> Mapping[GpuUuid, str]:
    """Return, by GPU, where a tenant's measurement counts instead of its prediction, or will count later."""
    counted, found = counted_tenants(node), {}
    for uuid in {uuid for one in node.spec.reservations for uuid in one.gpu_uuids}:
        held = [one for one in node.spec.reservations if uuid in one.gpu_uuids]
        usages = usage_of(held, [counted.get((one.pod_uid, uuid)) for one in held])
        changed = [text for one, of in zip(held, usages, strict=True) if (text := _measured(one, of))]
        parts = [f"counts as measured: {', '.join(changed)}"] if changed else []
        if later := [_unmeasured(one) for one in held if one.tenant.provisional and one.tenant.measured_mib is None]:
            parts.append(f"until its measured peak is stable: {', '.join(later)}")
        if parts:
            found[uuid] = "; ".join(parts)
    return found


def _unmeasured(held: Reservation) -> str:
    memory = held.tenant.memory_mib
    return f"{held.pod_namespace}/{held.job_name} counts as {'a whole GPU' if memory is None else f'{memory:,} MiB'}"


def _measured(held: Reservation, usage: TenantUsage) -> str:
    """Return where a tenant counts differently from its prediction; empty if it does not, in whole percents."""
    expected, parts = reserved_usage(held.tenant), []
    counted, bound = usage.memory_mib, held.tenant.memory_mib
    if counted is not None and counted != bound:
        at_most = "whole GPU" if bound is None else f"at most {bound:,} MiB"
        parts.append(f"{counted:,} MiB, {at_most} expected")
    elif held.tenant.measured_mib is not None and counted != held.tenant.measured_mib:
        parts.append(f"more than the {held.tenant.measured_mib:,} MiB measured before")
    for what, now, then in (("SM", usage.sm, expected.sm), ("utilization", usage.util, expected.util)):
        if f"{now:.0%}" != f"{then:.0%}":
            parts.append(f"measured {what} {now:.0%}, predicted {then:.0%}")
    return f"{held.pod_namespace}/{held.job_name} ({'; '.join(parts)})" if parts else ""


def lines(answers: Iterable[GpuAnswer], *, each: bool) -> list[str]:
    """Return one line for each GPU, or for each group of GPUs with equal explanations."""
    if each:
        return [str(one) for one in answers]
    groups: dict[tuple[str, str], list[GpuAnswer]] = {}
    for one in answers:
        groups.setdefault((one.product, one.text), []).append(one)
    return [_line(group) for group in groups.values()]


def _line(group: list[GpuAnswer]) -> str:
    first, nodes = group[0], {one.node for one in group}
    if len(group) == 1:
        return str(first)
    where = first.node if len(nodes) == 1 else pluralize(len(nodes), "node")
    return f"{pluralize(len(group), 'GPU')} of {where} ({first.product}): {first.text}"


def broken(line: str, width: int) -> str:
    """Break a line between words at the width of a terminal, and indent what follows."""
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
