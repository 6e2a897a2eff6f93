"""Slowdowns as sentences: what is to be expected, what will hardly be exceeded, who would be slowed too much."""

from collections.abc import Sequence

from carpool_predictor.cost_models.slowdown import shipped

from carpool_extender.placement.checks import Closest, Verdict

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
