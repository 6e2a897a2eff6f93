"""Three tenants and more, whom nobody measured: the composition against the exact solution of a Markov chain."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.cost_models.slowdown import Turns, held, shipped

TENANTS = (2, 3, 4, 5, 6)
DRAWS = 200
SEED = 0

Numbers = NDArray[np.float64]


def section() -> list[str]:
    """Compare, and write the card's section."""
    draw = np.random.default_rng(SEED)
    return [
        "## Three and more tenants",
        "",
        "Nobody measured three at hand. The composition was checked against the exact solution of the Markov chain in",
        "which tenants alternate between host and one shared GPU (k = 1, exponential times, "
        f"{DRAWS} draws of busy shares 0.05 to 1 each):",
        "",
        "| tenants | mean error | largest error | mean slowdown | most SMs held, with the shipped k |",
        "|---|---|---|---|---|",
        *(_row(draw.uniform(0.05, 1.0, (DRAWS, tenants))) for tenants in TENANTS),
        "",
        "The last column should not exceed 1: more SMs than there are nobody holds. Beyond four tenants the recursion",
        "is cut off and tells too little; the scheduler counts on it only for slowdowns that jobs accept.",
        "",
    ]


def _row(busy: Numbers) -> str:
    off = np.abs(Turns(busy, busy).slowdowns() - (exact := np.array([exact_slowdowns(row) for row in busy])))
    holding = held(busy, shipped().holding)
    most = (holding / Turns(busy, holding).slowdowns()).sum(axis=1).max()
    return f"| {busy.shape[1]} | {off.mean():.4f} | {off.max():.4f} | {exact.mean():.2f} | {most:.2f} |"


def exact_slowdowns(busy: Sequence[float] | Numbers) -> Numbers:
    """Solve the Markov chain of tenants that alternate between host and one shared GPU.

    Args:
        busy: Busy shares alone, 0..1, shape (tenants,); a step alone takes 1, both parts exponential times.

    Returns:
        Slowdowns, shape (tenants,).
    """
    tenants = len(busy)
    states = list(itertools.product((0, 1), repeat=tenants))
    place = {state: number for number, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    for state, row in place.items():
        at_gpu = sum(state)
        for who in range(tenants):
            to = place[(*state[:who], 1 - state[who], *state[who + 1 :])]
            rates[row, to] = 1 / (busy[who] * at_gpu) if state[who] else 1 / max(1e-9, 1 - busy[who])
        rates[row, row] = -rates[row].sum()
    system = np.vstack([rates.T, np.ones(len(states))])
    shares = np.linalg.lstsq(system, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
    served = [
        sum(shares[row] / sum(state) for state, row in place.items() if state[who]) / busy[who]
        for who in range(tenants)
    ]
    return 1 / np.array(served)
