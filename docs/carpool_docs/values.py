"""What the chart's `settings` are, read from its values.yaml, and what their order of waiting jobs means for a site."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from carpool_core.lengths import RUNGS, SHORTEST_S, STEP, UNKNOWN_S, told

from carpool_docs.markdown import code, table

FILE = Path(__file__).parents[2] / "helm" / "carpool" / "values.yaml"
BLOCK = "settings"
_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<comment>.*)|(?P<key>\w+):(?: (?P<default>.*))?)")
_INDENT = 2

_INTRODUCTION = f"""Whoever installs the chart sets these, with `--set {BLOCK}.queueOrder=LongestFirst` or in a file of
values; the chart hands each to the process that it is for."""

_ORDER = f"""With `settings.queueOrder: LongestFirst` the chart makes {RUNGS} PriorityClasses, `FULLNAME-length-00` to
`-{RUNGS - 1:02}` (FULLNAME is `RELEASE-carpool`, or `RELEASE` where that contains `carpool`), of the values 1 to
{RUNGS}. The first is for jobs that are predicted to take less than {told(SHORTEST_S)} alone; the second begins there,
and each further one {STEP:g} times as high. A job that does not say `spec.training.steps`, or of which nothing could
be predicted, counts as {told(UNKNOWN_S)}. The operator writes the class into a job's pods when it creates them, and
kube-scheduler tries those of the higher class first. What that means for a site:

- PriorityClasses are objects of the whole cluster: whoever installs the chart needs the right to create them. Users
  need none to have their pods in one.
- None of them evicts anybody (`preemptionPolicy: Never`), nor is one the cluster's default. Pods of a class of yours
  with a higher value, and with preemption, can evict jobs as they can any pod of a lower one; pods without a class (0)
  cannot.
- A template that names `priorityClassName`, `priority` or `preemptionPolicy` of its own keeps it, and stands before or
  behind all others by that. The cluster's default class does not reach pods of jobs then.
- The kubelet of a node that runs out of memory or disk goes by priority, too: jobs that are predicted to be short go
  before long ones, and pods without a class before both.
- While longer jobs keep coming, short ones wait: it is for clusters that drain batches.
- Pods keep the class that they were created with. After going back to `Arrival`, or uninstalling the chart, the classes
  are gone, and pods that wait or run keep their priority.

What it gains and costs was simulated ([experiments](../experiments.md#goals)); why it goes by priorities
stands in [decisions](../decisions.md#waiting-jobs-come-in-order-of-arrival-or-the-longest-first)."""


class Value(NamedTuple):
    """One of the chart's values."""

    path: str
    default: str
    """As it stands there; empty for a group of others."""
    meaning: str


def values(text: str) -> Iterator[Value]:
    """Yield the values of the chart's `settings` with the comments above them, in the order in which they stand.

    Args:
        text: What values.yaml holds.

    Raises:
        ValueError: There are none, or a line of them is neither a comment nor a value.
    """
    block = re.search(rf"^{BLOCK}:\n((?: .*\n)*)", text, re.MULTILINE)
    if block is None:
        raise ValueError(f"{FILE.name}: expected the block {BLOCK}, found none")
    names: list[str] = [BLOCK]
    comment: list[str] = []
    for line in block[1].splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{FILE.name}: expected a comment or `key: value` under {BLOCK}, found {line!r}")
        if found["key"] is None:
            comment.append(found["comment"])
            continue
        names = [*names[: len(found["indent"]) // _INDENT], found["key"]]
        if comment or found["default"]:
            yield Value(".".join(names), found["default"] or "", " ".join(comment))
        comment = []


def section() -> list[str]:
    """Write the section about them."""
    rows = [(code(one.path), code(one.default), one.meaning) for one in values(FILE.read_text(encoding="utf-8"))]
    return [
        f"## The chart's {code(BLOCK)}",
        _INTRODUCTION,
        table(("Value", "Default", "Meaning"), rows),
        "### The order of waiting jobs",
        _ORDER,
    ]
