"""The order of waiting jobs: PriorityClasses that agree with the operator's ladder of lengths."""

import re
from typing import Any

import pytest
from carpool_core.lengths import RUNGS, rung

pytestmark = pytest.mark.e2e

LONGEST_FIRST = {"queueOrder": "LongestFirst"}


def test_order_of_arrival_needs_nothing(chart: Any) -> None:
    assert chart.all("PriorityClass") == []
    assert "CARPOOL_LENGTH_CLASSES" not in chart.environment("operator")


def test_the_operator_finds_a_class_for_each_rung_and_longer_ones_rank_higher(render: Any) -> None:
    chart = render(settings=LONGEST_FIRST)
    prefix = chart.environment("operator")["CARPOOL_LENGTH_CLASSES"]
    values = {one["metadata"]["name"]: one["value"] for one in chart.all("PriorityClass")}
    assert [values[f"{prefix}{number:02}"] for number in range(RUNGS)] == [*range(1, RUNGS + 1)]
    assert len(values) == RUNGS


def test_a_class_evicts_nobody_and_is_for_nobody_else(render: Any) -> None:
    for one in render(settings=LONGEST_FIRST).all("PriorityClass"):
        assert (one["preemptionPolicy"], one["globalDefault"]) == ("Never", False)
        assert "namespace" not in one["metadata"]


def test_a_class_says_of_which_lengths_it_is(render: Any) -> None:
    chart = render(settings=LONGEST_FIRST)
    told = [one["description"] for one in sorted(chart.all("PriorityClass"), key=lambda one: one["value"])]
    seconds = [int(re.findall(r"(\d+) s", text)[0]) for text in told]
    assert "less than" in told[0]
    assert rung(seconds[0] - 1) == 0
    assert all(
        text.split(str(number))[1].startswith(" s or more") for text, number in zip(told[1:], seconds[1:], strict=True)
    )
    assert [rung(number + 1) for number in seconds[1:]] == [*range(1, RUNGS)]
    assert [rung(number - 1) for number in seconds[1:]] == [*range(RUNGS - 1)]


def test_classes_of_two_releases_have_different_names(render: Any) -> None:
    charts = [render(release, settings=LONGEST_FIRST) for release in ("one", "two")]
    first, second = ({one["metadata"]["name"] for one in chart.all("PriorityClass")} for chart in charts)
    assert first.isdisjoint(second)
    prefixes = [chart.environment("operator")["CARPOOL_LENGTH_CLASSES"] for chart in charts]
    assert prefixes == ["one-carpool-length-", "two-carpool-length-"]
