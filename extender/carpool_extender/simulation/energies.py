"""Says how RAD-RM's energies compare with those that were published, and what other power of GPUs would change."""

from collections.abc import Sequence

from carpool_core.products import find_product

from carpool_extender.simulation import hotcloud, radrm
from carpool_extender.simulation.contest import DEFAULT, ORACLE, Line
from carpool_extender.simulation.power import Power, Spent, fitted, spent
from carpool_extender.simulation.zeus_power import ZEUS

ASSUMED = (Power(50, 200), Power(50, 275), Power(50, 319), Power(50, 400))
"""An A100's usual idle power with several limits; the largest is the product's own."""
LIMITS_W = (275, 319)
"""Limits of a DGX Station A100's GPUs, none of which is published: as was assumed before; as its datasheet allows."""


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
        **{f"{ZEUS.of(limit)} (Zeus' shares of {limit} W)": ZEUS.of(limit) for limit in LIMITS_W},
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


def of_hotcloud(known: Sequence[Line]) -> list[str]:
    """Say what HotCloud's energies would be if a GPU that has a job drew what Zeus measured; one without one sleeps.

    Args:
        known: The lines of HotCloud, the one that others are compared with first.
    """
    ours = next((line for line in known if line.strategy.name == DEFAULT), None)
    if ours is None:
        return []
    product = find_product(hotcloud.PRODUCT)
    usual, awake = Power(product.idle_power_w, product.power_limit_w), ZEUS.of(product.power_limit_w)
    first_mj, mj = (_awake_mj(line, usual, awake) for line in (known[0], ours))
    return [
        f"Energy above is by the idle power and the limit of the product, {usual}. Where a GPU that has a job draws "
        f"what Zeus measured instead, {ZEUS.awake:.0%} of the limit and {ZEUS.full:.0%} with all SMs active ({awake}), "
        f"{known[0].strategy.name} takes {_change(first_mj, first_mj)}, and Carpool {_change(mj, first_mj)}.",
        "",
    ]


def _awake_mj(line: Line, usual: Power, awake: Power) -> float:
    took = spent(line.mean("energy_mj"), line.mean("makespan_min"), hotcloud.GPUS, usual)
    in_use_s = line.mean("gpus_in_use") * took.gpu_s / hotcloud.GPUS
    return Spent(in_use_s, took.active_s).energy_mj(awake) + usual.idle_w * (took.gpu_s - in_use_s) / 1e6


def _spent(line: Line) -> Spent:
    return spent(line.mean("energy_mj"), line.mean("makespan_min"), radrm.GPUS, radrm.POWER)


def _change(mj: float | None, first_mj: float) -> str:
    if mj is None:
        return ""
    return f"{mj:.2f} MJ" if mj == first_mj else f"{mj:.2f} MJ ({100 * (mj / first_mj - 1):+.1f}%)"
