"""What the report says of the extender's speed."""

from collections.abc import Sequence

from carpool_e2e.bench.placement import GPUS, NEW_EVERY, SHAPES, TENANTS_PER_NODE, Size, percentile

_P99_MS, _A_SECOND, _MIB = 15.0, 150.0, 400.0
_AIM_P99_MS, _AIM_A_SECOND = 8.0, 300.0
_COLUMNS = (
    "nodes",
    "tenants",
    "p50 ms",
    "p99 ms",
    "p99 ms, known shape",
    "p99 ms, new shape",
    "refusal p50 ms",
    "decisions/s",
    "processor ms",
    "MiB",
    "naive ms",
)
_HEAD = ("| | found | asked for | |", "|---|---|---|---|")


def placement_section(sizes: Sequence[Size]) -> list[str]:
    """Write the section about filter and prioritize; the last size is the one that targets speak of."""
    largest, smallest = sizes[-1], sizes[0]
    p99, rate = _ms(_totals(largest), 0.99), _a_second(largest)
    grown, more = _ms(_totals(largest), 0.5) / _ms(_totals(smallest), 0.5), largest.nodes / smallest.nodes
    return [
        "## Placement",
        "",
        "Filter and prioritize over HTTP with mutual TLS, one pod after the other, as kube-scheduler asks:",
        f"{GPUS} GPUs and {TENANTS_PER_NODE} tenants a node, all nodes offered in another order each time, one GpuNode",
        f"changed after each pod. Jobs are of {SHAPES} shapes, one in {NEW_EVERY} of a shape nobody had before. The",
        "extender is a process of its own; an API server on paper lists the nodes, and every tenant's job and pod. The",
        "naive loop goes over nodes, GPUs and tenants in Python for each request; its time is without HTTP.",
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
    ]


def _row(size: Size) -> str:
    known = [d.total_s for d in size.decisions if not d.is_new]
    new = [d.total_s for d in size.decisions if d.is_new]
    figures = (
        f"{_ms(_totals(size), 0.5):.1f}",
        f"{_ms(_totals(size), 0.99):.1f}",
        f"{_ms(known, 0.99):.1f}",
        f"{_ms(new, 0.99):.1f}",
        f"{_ms(size.refusal_s, 0.5):.1f}",
        f"{_a_second(size):.0f}",
        f"{1000 * size.processor_s / len(size.decisions):.1f}",
        f"{size.resident_mib:.0f}",
        f"{1000 * size.naive_s:.0f}",
    )
    return f"| {size.nodes:,} | {size.tenants:,} | {' | '.join(figures)} |"


def _totals(size: Size) -> list[float]:
    return [decision.total_s for decision in size.decisions]


def _a_second(size: Size) -> float:
    return len(size.decisions) / sum(_totals(size))


def _ms(seconds: Sequence[float], share: float) -> float:
    return 1000 * percentile(list(seconds), share)


def _line(what: str, found: str, target: str, *, is_kept: bool) -> str:
    return f"| {what} | {found} | {target} | {'kept' if is_kept else 'missed'} |"
