"""Three tenants and more, whom nobody measured: the composition against the exact solution of a Markov chain."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carpool_predictor.evaluation.slowdown.lucid import Pairs
from carpool_predictor.models.slowdown import Turns, shipped

TENANTS = (2, 3, 4, 5, 6)
DRAWS = 200
SEED = 0

Numbers = NDArray[np.float64]


def section(pairs: Pairs) -> list[str]:
    """Compare, and write the card's section; of the measured pairs it tells how busy they are."""
    draw = np.random.default_rng(SEED)
    return [
        "## Three and more tenants",
        "",
        "Nobody measured three at hand. With k = 1 the composition was checked against the exact solution of the",
        f"Markov chain in which tenants alternate between host and one shared GPU (exponential times, {DRAWS} draws",
        "of busy shares 0.05 to 1 each). With the shipped k nothing checks it beyond two. What can be told is how",
        "much of a GPU comes out to be held and to be busy: what each tenant holds, or is busy for, alone over its",
        "slowdown, added up.",
        "",
        "| tenants | mean slowdown, k = 1 | mean error | largest error | most held, shipped k | busiest, shipped k |",
        "|---|---|---|---|---|---|",
        *(_row(draw.uniform(0.05, 1.0, (DRAWS, tenants))) for tenants in TENANTS),
        "",
        "More SMs than there are nobody holds. Busy for more than the whole time no GPU can be. By what each was busy",
        f"alone, over its measured slowdown, {100 * _busier_than_whole(pairs):.0f}% of Lucid's pairs are: busy shares,",
        "as NVML tells them, do not add up. How far they do not of three and more nobody measured: there the shipped k",
        "may tell too little.",
        "Beyond four tenants the recursion is cut off and tells too little in any case. The scheduler counts on all",
        "this only for slowdowns that jobs accept.",
        "",
    ]


def _row(busy: Numbers) -> str:
    exact = np.array([exact_slowdowns(row) for row in busy])
    off = np.abs(Turns(busy, 1.0).slowdowns() - exact)
    k = shipped().holding
    told = Turns(busy, k).slowdowns()
    most, busiest = ((of / told).sum(axis=1).max() for of in (busy**k, busy))
    errors = f"{exact.mean():.2f} | {off.mean():.4f} | {off.max():.4f}"
    return f"| {busy.shape[1]} | {errors} | {most:.2f} | {busiest:.2f} |"


def _busier_than_whole(pairs: Pairs) -> float:
    both = (pairs.busy[:, 0] / pairs.slowdown).reshape(-1, 2).sum(axis=1)
    return float((both > 1.0).mean())


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
