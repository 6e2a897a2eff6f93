"""What each policy counts as the cost of a GPU: functions of what the checks found, over many GPUs at once."""

import numpy as np
from carpool_core.products import UnknownProductError, find_product
from numpy.typing import NDArray

from carpool_extender.placement.checks import Verdict
from carpool_extender.state.view import Rows

Cost = NDArray[np.float64]

UNKNOWN_POWER_W = (300.0, 40.0)
"""Limit and idle power counted for a product that is not in the table."""
AWAKE_SHARE, FULL_SHARE = 0.21, 0.83
"""What a GPU with a job draws in parts of its power limit: with no SM active, because its clocks rise with the first
context, and with all of them. Means of what Zeus (You et al., NSDI '23) measured of a P100, an RTX 6000 and a V100; its
A40 is kept from decisions, because simulated GPUs draw by it."""


def nothing(verdict: Verdict, rows: Rows) -> Cost:
    """No GPU costs more than another."""
    return np.zeros(rows.size)


def added_slowdown(verdict: Verdict, rows: Rows) -> Cost:
    """Progress that is lost, in slowdowns: the newcomer's, and what its neighbours have on top.

    A tenant slowed by s loses 1 - 1/s of its progress, for s near 1 about s - 1; counted so, those who lose most weigh
    more. With 1 - 1/s in its place, which was tried once, makespans in the simulator differed by less than 1%.
    """
    return verdict.found.added.take(rows)


def taken_memory(verdict: Verdict, rows: Rows) -> Cost:
    """Free memory before the newcomer comes, in MiB, negated."""
    return -verdict.view.columns.free_mib[rows].astype(np.float64)


def left_memory(verdict: Verdict, rows: Rows) -> Cost:
    """Memory that would be left over, in MiB."""
    return verdict.left_mib(rows).astype(np.float64)


def left_memory_negated(verdict: Verdict, rows: Rows) -> Cost:
    """Memory that would be left over, in MiB, negated."""
    return -left_memory(verdict, rows)


def position(verdict: Verdict, rows: Rows) -> Cost:
    """The order in which nodes became known; on a node, the GPUs' indices."""
    return rows.astype(np.float64)


def turn(verdict: Verdict, rows: Rows) -> Cost:
    """How many GPUs come between the one with the newest reservation and each.

    The turn is read from the reservations, so that nothing has to be remembered and every replica agrees.
    """
    columns = verdict.view.columns
    newest = np.where(columns.alive, columns.reserved_at, 0.0)  # a node that is gone has left its rows as they were
    total = max(1, newest.size)
    last = int(np.argmax(newest)) if newest.size and newest.max() > 0 else -1
    return ((rows - last - 1) % total).astype(np.float64)


def activity(verdict: Verdict, rows: Rows) -> Cost:
    """SM activity of the tenants that are there, all together."""
    return verdict.view.columns.sm_active[rows]


def activity_negated(verdict: Verdict, rows: Rows) -> Cost:
    """SM activity of the tenants that are there, all together, negated."""
    return -activity(verdict, rows)


def energy(verdict: Verdict, rows: Rows) -> Cost:
    """Watts on top for as long as the newcomer runs, weighted by how much longer everybody runs.

    A GPU with a job draws awake + (full - awake) · SM activity, and less while it sleeps, which waking it costs; a
    slowdown makes the newcomer, and whoever it slows, draw their part for longer.
    """
    classes = verdict.view.classes
    table = np.array([_powers(kind.product) for kind in classes]).reshape(-1, 2)
    of = verdict.view.columns.device_class[rows]
    limit, idle = table[of, 0], table[of, 1]
    awake, full = AWAKE_SHARE * limit, FULL_SHARE * limit
    facts = verdict.applicant.columns(classes)
    is_awake = verdict.view.columns.count[rows] > 0
    own = (full - awake) * facts.sm[of] * verdict.found.newcomer[rows]
    others = verdict.found.added[rows] - (verdict.found.newcomer[rows] - 1.0)
    result: Cost = own + others * (awake + full) / 2 + np.where(is_awake, 0.0, np.maximum(0.0, awake - idle))
    return result


def _powers(product: str) -> tuple[float, float]:
    try:
        found = find_product(product)
    except UnknownProductError:
        return UNKNOWN_POWER_W
    return found.power_limit_w, found.idle_power_w
