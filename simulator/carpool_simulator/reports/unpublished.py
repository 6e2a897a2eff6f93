"""What of RAD-RM's goals and promises hangs on what its authors did not publish."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from carpool_research.experiments.radrm import BEHIND_MPS, OPEN_CASES, PUBLISHED_TIME

from carpool_simulator.reports import energies, otherwise, paired
from carpool_simulator.sweep import DEFAULT, Line

Must = Callable[[str, str], float]


def section(others: Mapping[str, Sequence[Line]], must: Must) -> list[str]:
    """Say how near RAD-RM's own strategies come to what was published, and what Carpool does where they do most.

    Args:
        others: Lines of `otherwise.strategies` by experiment.
        must: Returns what is asked for of an experiment and a figure, in percent.
    """
    cases = otherwise.by_case(others.get("radrm-90", ()))
    if not cases:
        return []
    off = {
        case: fmean(abs(_time(of, one).mean - told) for one, told in PUBLISHED_TIME.items())
        for case, of in cases.items()
        if case in (otherwise.ASSUMED, *OPEN_CASES)
    }
    nearest = min(off, key=off.__getitem__)
    assumed = cases[otherwise.ASSUMED]
    return [
        "RAD-RM's goals hang on how busy its tasks keep the SMs and on what they lose to each other behind MPS, which "
        "is not published. As it is assumed its own strategies come to other trace times than were published: "
        + ", ".join(
            f"{one} {paired.percent(_time(assumed, one))} of trace time ({told:g}%)"
            for one, told in PUBLISHED_TIME.items()
        )
        + f". {_where_nearest(nearest, others, must)} ([{otherwise.TITLE.lower()}]({otherwise.place()})).",
        "",
    ]


def _where_nearest(case: str, others: Mapping[str, Sequence[Line]], must: Must) -> str:
    if case == otherwise.ASSUMED:
        return "Nothing that was tried comes nearer to that"
    power, told, is_missed = otherwise.fits(others).get(case), [], False
    for name in (name for name in others if name.startswith("radrm")):
        known = otherwise.by_case(others[name])[case]
        took, asked = _time(known, DEFAULT), must(name, "makespan_min")
        changes, is_missed = [f"{paired.percent(took)} (must {asked:g}%)"], is_missed or took.mean > asked
        if name == energies.PUBLISHED_OF and power is not None:
            first, ours = (energies.drawing(one, power) for one in (next(iter(known.values())), known[DEFAULT]))
            energy, asked = paired.change(ours, first, "energy_mj"), must(name, "energy_mj")
            changes.append(f"{paired.percent(energy)} of energy (must {asked:g}%; by the power that is fitted there)")
            is_missed = is_missed or energy.mean > asked
        told.append(f"{' and '.join(changes)} on {name}")
    return (
        f"They come nearest to that, of what was tried, with {case}; there Carpool's default comes to "
        f"{', and to '.join(told)}{', which is not what the table above says' if is_missed else ''}"
    )


def _time(of: Mapping[str, Line], name: str) -> paired.Difference:
    """Return the change of trace time against whole GPUs, which stand ahead."""
    return paired.change(of[name], next(iter(of.values())), "makespan_min")


def slowed(others: Mapping[str, Sequence[Line]]) -> list[str]:
    """Say how many the default slows beyond what they accept where MPS is as Gavel found it; nothing without cases."""
    told = [
        f"{cases[BEHIND_MPS][DEFAULT].mean('slowed_percent'):.0f}% on {name}"
        for name, lines in others.items()
        if BEHIND_MPS in (cases := otherwise.by_case(lines))
    ]
    if not told:
        return []
    return [
        "How jobs slow each other down behind MPS is the weakest of all that is known here: where they lose what "
        f"Gavel's pairs lost on older GPUs it is {' and '.join(told)} "
        f"([{otherwise.TITLE.lower()}]({otherwise.place()})). No pair of Carpool's own was measured yet."
    ]
