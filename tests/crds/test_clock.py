"""Times as Kubernetes writes them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from carpool_core.clock import parse_rfc3339, rfc3339
from hypothesis import given
from hypothesis import strategies as st

OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=OFFSETS)


@given(MOMENTS)
def test_what_is_written_is_read(moment: datetime) -> None:
    assert parse_rfc3339(rfc3339(moment)) == moment
    assert parse_rfc3339(moment.isoformat()) == moment


def test_the_form_of_kubernetes() -> None:
    assert parse_rfc3339("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "soon", "2026-01-31", "2026-01-31T12:00:00", "2026-02-30T12:00:00Z"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # fromisoformat has sentences of its own
        parse_rfc3339(text)
