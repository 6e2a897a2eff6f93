"""What the report says of the control plane's throughput."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from carpool_e2e.bench.circumstances import RAISED
from carpool_e2e.bench.load import GPUS, NODE_COUNT, Throughput
from carpool_e2e.bench.rounds import CALM, least_disturbed

ROUNDS, MOST_ROUNDS = 3, 5
"""With those that are played again because too much was stolen."""
_JOBS_A_SECOND, _AIM = 40.0, 80.0
_SELDOM = 0.01
"""Requests a job below which a kind of request is not listed."""


_WHY = (
    "A pod, its Binding and kube-scheduler's event are what any scheduler costs. Carpool adds the job itself; its",
    "status, once, with the prediction and the place, which has two seconds and waits while other jobs need their",
    "pods; the reservation (`PATCH gpunodes`, one write for all pods that wait for a node at that moment); the",
    "agents' reports on them, and their signs of life 25 s after they last wrote (`gpunodes/status`); and from each",
    "process a hundred normal events, then two a second. The benchmark itself plays users, agents and kubelets: it",
    "creates the jobs, reports, and renews the nodes' leases, and its own processor time stands in the table.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A round: both were measured one after the other."""

    ours: Throughput
    """Carpool's jobs."""
    theirs: Throughput
    """As many pods of whole GPUs, by kube-scheduler alone."""

    @property
    def stolen(self) -> float:
        """The larger of the shares that were stolen from the two: what disturbs one of them makes them unlike."""
        return max(self.ours.stolen, self.theirs.stolen)


def throughput_section(turns: Sequence[Turn]) -> list[str]:
    """Write the section about the control plane.

    Args:
        turns: All that were played.
    """
    counted = least_disturbed(turns, ROUNDS)
    ours, theirs = [turn.ours for turn in counted], [turn.theirs for turn in counted]
    found, stock = _typical(ours), _typical(theirs)
    verdict = "kept" if found.jobs_a_second >= _JOBS_A_SECOND else "missed"
    return [
        "## Throughput of the control plane",
        "",
        f"{found.jobs:,} jobs at once onto {NODE_COUNT} nodes × {GPUS} GPUs without kubelets, from the first created",
        "to the last pod bound; agents are played by the benchmark, which reports each reservation as prepared.",
        "Everything, etcd and API server included, shares this machine. Beside it what such a control plane can do at",
        "all: as many plain pods that ask for a whole GPU each, and kube-scheduler alone.",
        "",
        f"Both take turns for {len(counted)} rounds, each with a control plane of its own. Told is the round of the",
        "median rate, of each by itself, with the least and the largest in brackets. `stolen` is the share of the",
        "processor time asked for on this machine that its hypervisor gave to other machines. A round in which either",
        f"lost more than {CALM:.0%} is played again, up to {MOST_ROUNDS} in all, and those count in which the least",
        f"was stolen; left out: {len(turns) - len(counted)}.",
        f"The machine's load averages before the first was created: {found.load:.1f} and {stock.load:.1f}.",
        *_raised("Carpool's", found.preferred),
        *_raised("kube-scheduler's", stock.preferred),
        "",
        "| | Carpool | kube-scheduler alone | asked for | |",
        "|---|---|---|---|---|",
        f"| jobs a second | {_rates(ours)} | {_rates(theirs)} | ≥ {_JOBS_A_SECOND:g}, aimed at {_AIM:g} | {verdict} |",
        f"| jobs a second until every job's status told its place, too | {found.told_a_second:.1f} | | | |",
        f"| stolen | {_stolen(ours)} | {_stolen(theirs)} | | |",
        "",
        "Processor time and requests are counted until then.",
        "",
        "| processor ms a job | Carpool | kube-scheduler alone |",
        "|---|---|---|",
        *(_row(name, _ms(found, [name]), _ms(stock, [name])) for name in found.processor_s),
        _row("all of them", _ms(found, found.processor_s), _ms(stock, stock.processor_s)),
        "",
        "| requests to the API server a job | Carpool | kube-scheduler alone |",
        "|---|---|---|",
        *(_row(name, _each(found, [name]), _each(stock, [name])) for name in _often(found, stock)),
        _row("all of them", _each(found, found.requests), _each(stock, stock.requests)),
        "",
        *_WHY,
        "",
    ]


def _typical(rounds: Sequence[Throughput]) -> Throughput:
    """Return the round of the median rate, of two in the middle the slower one."""
    return sorted(rounds, key=lambda one: one.jobs_a_second)[(len(rounds) - 1) // 2]


def _rates(rounds: Sequence[Throughput]) -> str:
    found = [one.jobs_a_second for one in rounds]
    return f"{_typical(rounds).jobs_a_second:.1f} ({min(found):.1f} to {max(found):.1f})"


def _stolen(rounds: Sequence[Throughput]) -> str:
    found = [one.stolen for one in rounds]
    return f"{_typical(rounds).stolen:.1%} ({min(found):.1%} to {max(found):.1%})"


def _raised(whose: str, processes: Sequence[str]) -> list[str]:
    if not processes:
        return []
    return [f"In {whose} run these ran with raised priority ({RAISED}): {', '.join(processes)}."]


def _often(*measured: Throughput) -> list[str]:
    names = {name for one in measured for name in one.requests if _each(one, [name]) >= _SELDOM}
    return sorted(names, key=lambda name: (-measured[0].requests[name], name))


def _ms(one: Throughput, names: Iterable[str]) -> float:
    return 1000 * sum(one.processor_s.get(name, 0.0) for name in names) / one.jobs


def _each(one: Throughput, names: Iterable[str]) -> float:
    return sum(one.requests[name] for name in names) / one.jobs


def _row(name: str, ours: float, theirs: float) -> str:
    return f"| {name} | {_figure(ours)} | {_figure(theirs)} |"


def _figure(value: float) -> str:
    return f"{value:.2f}" if 0 < value < 10 else f"{value:.1f}" if value else ""
