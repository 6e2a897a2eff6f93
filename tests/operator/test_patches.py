"""The merge patch does what it says, also for fields that go."""

from typing import Any

from carpool_core.testing import patches
from carpool_operator.patches import merge_patch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), _VALUES, max_size=4)


# Drawing nested objects is slow on a busy machine; the code under test is not.
_PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@_PATIENT
@given(_OBJECTS, _OBJECTS)
def test_patch_turns_old_into_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert patches.merge(old, merge_patch(old, new)) == new


@_PATIENT
@given(_OBJECTS)
def test_nothing_to_do_is_an_empty_patch(same: dict[str, Any]) -> None:
    assert merge_patch(same, same) == {}
