"""The chart's settings in docs/reference/settings.md: none is left out, each is explained, defaults are the chart's."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from carpool_docs.settings import BLOCK, CHART_VALUES, Value, values

TEXT = CHART_VALUES.read_text(encoding="utf-8")


def leaves(of: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in of.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}", value


def test_every_setting_of_the_chart_is_documented_with_its_default() -> None:
    documented = {one.path: yaml.safe_load(one.default) for one in values(TEXT) if one.default}
    assert documented == dict(leaves(yaml.safe_load(TEXT)[BLOCK], BLOCK))


@pytest.mark.parametrize("one", [*values(TEXT)], ids=lambda one: one.path)
def test_a_setting_of_the_chart_is_explained(one: Value) -> None:
    assert one.meaning, "write a comment above it"
