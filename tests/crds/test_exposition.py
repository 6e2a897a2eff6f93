"""Our writing of Prometheus' text format is the library's, character for character."""

import math

from carpool_core import exposition
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

HOSTILE = 'quo"te, back\\slash, new\nline, ünïcode, {a="b"}'


class Families(Collector):
    """Families as a collector makes them."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self):
        return self._families


def registry_of(*families: Metric) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Families(*families))
    return registry


def test_every_kind_of_metric() -> None:
    registry = CollectorRegistry()
    Gauge("carpool_b", HOSTILE, ["z", "a"], registry=registry).labels(z=HOSTILE, a="").set(1e-9)
    Gauge("carpool_plain", "no labels", registry=registry).set(1e21)
    Gauge("carpool_empty", "no series", ["a"], registry=registry)
    counter = Counter("carpool_c", "with _created beside it", ["a"], registry=registry)
    counter.labels("x").inc(3)
    Histogram("carpool_h_seconds", "buckets", ["a"], registry=registry).labels("x").observe(0.3)
    Summary("carpool_s_seconds", "sum and count", registry=registry).observe(2)
    Info("carpool_i", "labels only", registry=registry).info({"version": HOSTILE})
    Enum("carpool_e", "states", states=["on", "off"], registry=registry).state("off")
    stamped = GaugeMetricFamily("carpool_t", "with a time", labels=["a"])
    stamped.add_metric(["x"], 1, timestamp=12.5)
    unknown = UnknownMetricFamily("DCGM_U", "of another program", labels=["gpu"])
    unknown.add_metric(["0"], 7)
    registry.register(Families(stamped, unknown))
    assert exposition.text(registry) == generate_latest(registry)


values = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**53), 2**53)


@given(st.lists(st.tuples(st.text(), st.text(), values), max_size=5))
def test_whatever_labels_and_values(series) -> None:
    families = [GaugeMetricFamily(f"carpool_{at}", "twice the same labels", labels=["b", "a"]) for at in range(2)]
    for family in families:
        for b, a, value in series:
            family.add_metric([b, a], value)
    registry = registry_of(*families)
    assert exposition.text(registry) == generate_latest(registry)
    assert not series or not math.isnan(series[0][2]) or b"NaN" in exposition.text(registry)
