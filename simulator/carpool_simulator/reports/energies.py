"""Says how RAD-RM's energies compare with those that were published, and what other power of GPUs would change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from carpool_core.products import find_product
from carpool_research.experiments import hotcloud, radrm

from carpool_simulator.power import MEAN, Power, Spent, fitted, power_of, spent
from carpool_simulator.sweep import DEFAULT, ORACLE, Figures, Line

ASSUMED = tuple(Power(50, 50, full_w) for full_w in (200, 275, 319, 400))
"""An A100's usual idle power, whether it has a job or not, with several limits; the largest is the product's own."""
PUBLISHED_OF = "radrm-60"
"""The experiment of which energies were published."""
LIMITS_W = (275, 319)
"""Limits of a DGX Station A100's GPUs, none of which is published: as was assumed before; as its datasheet allows."""


def table(known: Sequence[Line]) -> list[str]:
    """Show energies with the constants that are used and with others; power takes part in nothing that is decided.

    Args:
        known: The lines of RAD-RM's 60 tasks, the one that others are compared with first.
    """
    runs = {line.strategy.name: _spent(line, radrm.GPUS, radrm.POWER) for line in known}
    published = {**radrm.PUBLISHED_MJ, **radrm.STREAMS_MJ}
    if not published.keys() <= runs.keys():
        return []
    now = fitted(runs, radrm.PUBLISHED_MJ)
    asleep_w = find_product(radrm.PRODUCT).idle_power_w
    powers = {
        f"{radrm.POWER} (used)": radrm.POWER,
        f"{fitted(runs, published)} (fitted with streams, too)": fitted(runs, published),
        **{f"{MEAN.of(limit, asleep_w)} (Zeus' shares of {limit} W)": MEAN.of(limit, asleep_w) for limit in LIMITS_W},
        **{str(power): power for power in ASSUMED},
    }
    shown = [*published, *(name for name in (DEFAULT, "Carpool, slowdown ≤ 2", ORACLE) if name in runs)]
    first = known[0].strategy.name
    return [
        "Energy by what each GPU draws, idle and with all SMs active; changes are against the first line. A fit to the "
        f"results above of the energies that were published of {', '.join(radrm.PUBLISHED_MJ)} gives {now}.",
        "",
        f"| strategy | published | {' | '.join(powers)} |",
        f"|---|---|{'---|' * len(powers)}",
        *(
            f"| {name} | {_change(published.get(name), published[first])} | "
            + " | ".join(_change(_mj(runs[name], p), _mj(runs[first], p)) for p in powers.values())
            + " |"
            for name in shown
        ),
        "",
    ]


def refitted(known: Mapping[str, Line]) -> Power:
    """Fit what GPUs draw to these runs.

    Args:
        known: The lines of RAD-RM's 60 tasks by strategy, all of those among them of which energies were published.
    """
    runs = {name: _spent(line, radrm.GPUS, radrm.POWER) for name, line in known.items()}
    return fitted(runs, radrm.PUBLISHED_MJ)


def drawing(line: Line, power: Power) -> Line:
    """Return a line of RAD-RM's with the energies that it had taken, had its GPUs drawn this; power decides nothing."""
    runs = [replace(run, energy_mj=_mj(_of_run(run, radrm.GPUS, radrm.POWER), power)) for run in line.runs]
    return replace(line, runs=runs)


def of_hotcloud(known: Sequence[Line]) -> list[str]:
    """Say what HotCloud's energies would be if a GPU with a job drew no more without activity than asleep.

    Args:
        known: The lines of HotCloud, the one that others are compared with first.
    """
    ours = next((line for line in known if line.strategy.name == DEFAULT), None)
    if ours is None:
        return []
    product = find_product(hotcloud.PRODUCT)
    measured = power_of(product)
    told = Power(product.idle_power_w, product.idle_power_w, product.power_limit_w)
    first_mj, mj = (_mj(_spent(line, hotcloud.GPUS, measured), told) for line in (known[0], ours))
    return [
        f"Energy above is by what Zeus measured of an A40, which has the same chip, as shares of the limit: {measured}."
        f" By the idle power and the limit of the product alone, {told}, {known[0].strategy.name} would take "
        f"{_change(first_mj, first_mj)}, and Carpool {_change(mj, first_mj)}.",
        "",
    ]


def _spent(line: Line, gpus: int, power: Power) -> Spent:
    each = [_of_run(run, gpus, power) for run in line.runs]
    return Spent(*(fmean(values) for values in zip(*each, strict=True)))


def _of_run(run: Figures, gpus: int, power: Power) -> Spent:
    return spent(run.energy_mj, 60 * run.makespan_min * gpus, 60 * run.makespan_min * run.gpus_in_use, power)


def _mj(took: Spent, power: Power) -> float:
    return took.energy_j(power) / 1e6


def _change(mj: float | None, first_mj: float) -> str:
    if mj is None:
        return ""
    return f"{mj:.2f} MJ" if mj == first_mj else f"{mj:.2f} MJ ({100 * (mj / first_mj - 1):+.1f}%)"
