"""What the report says of the extender's speed."""

from collections.abc import Callable, Sequence
from functools import partial

from carpool_e2e.bench.placement import (
    DECISIONS,
    GPUS,
    MOST_ROUNDS,
    NEW_EVERY,
    SHAPES,
    TENANTS_PER_NODE,
    WAITING,
    WAITING_KINDS,
    Round,
    Size,
    a_second,
    naive_ms,
    percentile,
    processor_ms,
    waited_ms,
)
from carpool_e2e.bench.placement_profile import LIFE, STEPS, Profile
from carpool_e2e.bench.rounds import CALM

_P99_MS, _A_SECOND, _MIB = 15.0, 150.0, 400.0
_AIM_P99_MS, _AIM_A_SECOND = 8.0, 300.0
_COLUMNS = (
    "nodes",
    "tenants",
    "p50 ms",
    "p99 ms",
    "p99 ms, known shape",
    "p50 ms, new shape",
    "refusal p50 ms",
    "decisions/s",
    "processor ms",
    "processor p99 ms",
    "stolen",
    "MiB",
    "naive ms",
)
_ELSEWHERE = (
    "For scale, measured elsewhere and not in this run: on two such cores, with 5,000 nodes of 8 GPUs, HAMi's extender",
    "(Go, August 2026) answers a filter in 250 ms (p99 696 ms, 469 MB of memory; 87 ms at 500 nodes), gpushare's in",
    "1,111 ms.",
)
_HEAD = ("| | found | asked for | |", "|---|---|---|---|")
_P50, _P99 = partial(waited_ms, share=0.5), partial(waited_ms, share=0.99)


def placement_section(sizes: Sequence[Size], profile: Profile) -> list[str]:
    """Write the section about filter and prioritize; the last size is the one that targets speak of.

    Args:
        sizes: What was measured, by rising size.
        profile: Of the last size: where the time goes.
    """
    largest, smallest = sizes[-1], sizes[0]
    p99, rate = largest.typical(_P99), largest.typical(a_second)
    grown, more = largest.typical(_P50) / smallest.typical(_P50), largest.nodes / smallest.nodes
    return [
        "## Placement",
        "",
        "Filter and prioritize over HTTP with mutual TLS, one pod after the other, as kube-scheduler asks:",
        f"{GPUS} GPUs and {TENANTS_PER_NODE} tenants a node, all nodes offered in another order each time, one GpuNode",
        f"changed after each pod, and signs of life from all agents. Jobs are of {SHAPES} shapes, one in {NEW_EVERY}",
        "of a shape nobody had before. Each extender is a process of its own; an API server on paper lists the nodes,",
        "and every tenant's job and pod. As shipped filter names one node (`--candidates`): prioritize scores one.",
        "",
        f"The sizes take turns for {len(largest.rounds)} rounds of {DECISIONS} decisions, so that a bad moment of the",
        "machine meets each of them. A figure is the median over the rounds, with the least and the largest in",
        "brackets. Processor times are the extender's own, with all that it hears of between two decisions; they leave",
        "out what it waits for a processor. `stolen` is the share of the processor time asked for on this machine that",
        f"its hypervisor gave to other machines. A round with more than {CALM:.0%} of that is played again, up to",
        f"{MOST_ROUNDS} in all, and those count of which the least was stolen: {_left_out(sizes)} left out.",
        "The naive loop goes over nodes, GPUs and tenants in Python for each request, once in each round; its time",
        "is without HTTP.",
        largest.circumstances,
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(_row(size) for size in sizes),
        "",
        *_HEAD,
        _line(
            "filter and prioritize, p99",
            f"{p99:.1f} ms",
            f"≤ {_P99_MS:g} ms, aimed at {_AIM_P99_MS:g} ms",
            is_kept=p99 <= _P99_MS,
        ),
        _line(
            "decisions a second",
            f"{rate:.0f}",
            f"≥ {_A_SECOND:g}, aimed at {_AIM_A_SECOND:g}",
            is_kept=rate >= _A_SECOND,
        ),
        _line("memory", f"{largest.resident_mib:.0f} MiB", f"≤ {_MIB:g} MiB", is_kept=largest.resident_mib <= _MIB),
        _line(f"median with {more:.0f} times the nodes", f"{grown:.1f} times", f"≤ {more:.0f}", is_kept=grown <= more),
        "",
        *_behind(largest),
        *_ELSEWHERE,
        "",
        *_where_time_goes(largest, profile),
    ]


def _behind(size: Size) -> list[str]:
    """Say what it costs to look after those that wait."""
    if not size.behind:
        return []
    p50, p99 = (1000 * percentile([one.total_s for one in size.behind], share) for share in (0.5, 0.99))
    spent = 1000 * sum(one.processor_s for one in size.behind) / len(size.behind)
    return [
        f"While {WAITING:,} pods of {WAITING_KINDS} demands wait that fit nowhere and come before whoever asks, so",
        "that it is looked whether they would fit, too: "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {spent:.1f} ms of processor each",
        f"({len(size.behind)} decisions at {size.nodes:,} nodes).",
        "",
    ]


def _left_out(sizes: Sequence[Size]) -> str:
    told = [f"{size.left_out} at {size.nodes:,} nodes" for size in sizes if size.left_out]
    return f"{', '.join(told)} were" if told else "none was"


def _where_time_goes(size: Size, profile: Profile) -> list[str]:
    """Break the processor time of a decision down."""
    known, new = (_processor_of(size, is_new=is_new) for is_new in (False, True))
    in_known, in_new = (sum(of[step] for step in STEPS) for of in (profile.known_ms, profile.new_ms))
    return [
        f"Where the extender's processor time goes at {profile.nodes:,} nodes, in ms for a decision (medians). The",
        "steps were replayed in one process, without HTTP; all of it was measured above. The rest is TLS, HTTP, the",
        "event loop, signs of life, and sweeps over what may have ended, and whatever a step takes longer in between.",
        "",
        "| | known shape | new shape |",
        "|---|---|---|",
        *(f"| {step} | {profile.known_ms[step]:.2f} | {profile.new_ms[step]:.2f} |" for step in STEPS),
        f"| the rest | {known - in_known:.2f} | {new - in_new:.2f} |",
        f"| all | {known:.2f} | {new:.2f} |",
        "",
        f"{LIFE[0].upper()}{LIFE[1:]}, takes {profile.known_ms[LIFE]:.2f} ms.",
        "",
    ]


def _processor_of(size: Size, *, is_new: bool) -> float:
    decisions = (decision for one in size.rounds for decision in one.decisions)
    return 1000 * percentile([decision.processor_s for decision in decisions if decision.is_new == is_new], 0.5)


def _row(size: Size) -> str:
    refusals = [took for one in size.rounds for took in one.refusal_s]
    figures = (
        f"{size.typical(_P50):.1f}",
        _with_span(size, _P99, ".1f"),
        f"{size.typical(_known_p99):.1f}",
        f"{size.typical(_new_p50):.1f}",
        f"{1000 * percentile(refusals, 0.5):.1f}",
        _with_span(size, a_second, ".0f"),
        f"{size.typical(processor_ms):.1f}",
        f"{size.typical(_processor_p99):.1f}",
        _with_span(size, _stolen_percent, ".0f", "%"),
        f"{size.resident_mib:.0f}",
        f"{size.typical(naive_ms):.0f}",
    )
    return f"| {size.nodes:,} | {size.tenants:,} | {' | '.join(figures)} |"


def _with_span(size: Size, figure: Callable[[Round], float], form: str, unit: str = "") -> str:
    least, most = size.span(figure)
    return f"{size.typical(figure):{form}}{unit} ({least:{form}} to {most:{form}})"


def _known_p99(one: Round) -> float:
    return 1000 * percentile([d.total_s for d in one.decisions if not d.is_new], 0.99)


def _new_p50(one: Round) -> float:
    return 1000 * percentile([d.total_s for d in one.decisions if d.is_new], 0.5)


def _processor_p99(one: Round) -> float:
    return 1000 * percentile([d.processor_s for d in one.decisions], 0.99)


def _stolen_percent(one: Round) -> float:
    return 100 * one.stolen


def _line(what: str, found: str, target: str, *, is_kept: bool) -> str:
    return f"| {what} | {found} | {target} | {'kept' if is_kept else 'shortfall'} |"
