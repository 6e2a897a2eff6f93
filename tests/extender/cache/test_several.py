"""Several things under a key are what a set of them would be."""

from carpool_extender.cache.cluster import MultiMap
from hypothesis import given
from hypothesis import strategies as st

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)))


@given(steps)
def test_it_holds_what_sets_would_hold(steps):
    found, sets = MultiMap(), {key: set() for key in range(3)}
    for adds, key, thing in steps:
        (found.add if adds else found.discard)(key, thing)
        (sets[key].add if adds else sets[key].discard)(thing)
        assert {key: sorted(found.of(key)) for key in sets} == {key: sorted(of) for key, of in sets.items()}
