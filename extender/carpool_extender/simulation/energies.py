"""Says how RAD-RM's energies compare with those that were published, and what other power of its GPUs would change."""

from collections.abc import Sequence

from carpool_extender.simulation import radrm
from carpool_extender.simulation.contest import DEFAULT, ORACLE, Line
from carpool_extender.simulation.power import Power, Spent, fitted, spent

ASSUMED = (Power(50, 200), Power(50, 275), Power(50, 319), Power(50, 400))
"""An A100's usual idle power with several limits; the largest is the product's own."""


def table(known: Sequence[Line]) -> list[str]:
    """Show energies with the constants that are used and with others; power takes part in nothing that is decided.

    Args:
        known: The lines of RAD-RM's 60 tasks, the one that others are compared with first.
    """
    runs = {line.strategy.name: _spent(line) for line in known}
    published = {**radrm.PUBLISHED_MJ, **radrm.STREAMS_MJ}
    if not published.keys() <= runs.keys():
        return []
    now = fitted(runs, radrm.PUBLISHED_MJ)
    powers = {
        f"{radrm.POWER} (used)": radrm.POWER,
        f"{fitted(runs, published)} (fitted with streams, too)": fitted(runs, published),
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
            + " | ".join(_change(runs[name].energy_mj(p), runs[first].energy_mj(p)) for p in powers.values())
            + " |"
            for name in shown
        ),
        "",
    ]


def _spent(line: Line) -> Spent:
    return spent(line.mean("energy_mj"), line.mean("makespan_min"), radrm.GPUS, radrm.POWER)


def _change(mj: float | None, first_mj: float) -> str:
    if mj is None:
        return ""
    return f"{mj:.2f} MJ" if mj == first_mj else f"{mj:.2f} MJ ({100 * (mj / first_mj - 1):+.1f}%)"
