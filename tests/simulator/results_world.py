"""Results of experiments that are small enough to reckon by hand."""

from carpool_simulator.progress import Provenance
from carpool_simulator.sweep import FIGURES, Figures, Line

THEN = Provenance(when="2026-01-31 12:00", version="1.0, commit abc")


def line_of(strategy, *runs, **every):
    """One run for each mapping of figures; what none names is 1."""
    return Line(strategy, [Figures(**(dict.fromkeys(FIGURES, 1.0) | every | run)) for run in runs or [{}]])


def minutes(*values):
    return [{"makespan_min": value} for value in values]
