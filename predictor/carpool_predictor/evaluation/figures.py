"""Writes the figures of the model cards. The same numbers give the same bytes."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure without date or random identifiers."""
    with mpl.rc_context({"svg.hashsalt": "carpool", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
