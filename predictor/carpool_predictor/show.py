"""How a prediction looks: a table for people, JSON with units in its names for programs."""

from typing import Any

from carpool_core.resources.prediction import Interval, Prediction, ProductPrediction
from rich.table import Table

_WIDTH_OF_INTERVALS = 130
"""Columns of a terminal in which the intervals fit beside the medians."""


def as_table(title: str, prediction: Prediction, *, width: int) -> Table:
    """Draw one line for each GPU product; on a narrow terminal only the medians, intervals are in the JSON."""

    def span(interval: Interval, scale: float = 1.0, digits: int = 0) -> str:
        median, lower, upper = (f"{x * scale:,.{digits}f}" for x in (interval.median, interval.lower, interval.upper))
        return f"{median} [dim]({lower} - {upper})[/dim]" if width >= _WIDTH_OF_INTERVALS else median

    table = Table(title=title, caption=f"{prediction.reason}: {prediction.message}", title_justify="left")
    for name in ("GPU", "MiB", "at most", "class GiB", "util %", "SM %", "DRAM %", "step ms"):
        table.add_column(name, justify="left" if name == "GPU" else "right", overflow="fold")
    for product in prediction.products:
        memory, activity = product.memory, product.activity
        table.add_row(
            product.product,
            f"{memory.median_mib:,}",
            f"{memory.upper_mib:,}",
            f"{memory.class_lower_mib // 1024} - {memory.class_upper_mib // 1024}",
            span(activity.gpu_util_percent),
            span(activity.sm_active_ratio, 100),
            span(activity.dram_active_ratio, 100),
            span(product.step_time_seconds, 1000, 1),
        )
    return table


def as_json(name: str, prediction: Prediction) -> dict[str, Any]:
    """Return plain values, units in the names."""
    return {
        "id": name,
        "status": "ok" if prediction.outcome == "Predicted" else "abstained",
        "reason": prediction.reason,
        "message": prediction.message,
        "model_version": prediction.model_version,
        "products": [_product(product) for product in prediction.products],
    }


def _product(product: ProductPrediction) -> dict[str, Any]:
    memory, activity = product.memory, product.activity
    return {
        "gpu": product.product,
        "memory": {
            "median_mib": memory.median_mib,
            "upper_mib": memory.upper_mib,
            "coverage": memory.coverage,
            "class": {"lower_mib": memory.class_lower_mib, "upper_mib": memory.class_upper_mib},
        },
        "activity": {
            "gpu_util_percent": _interval(activity.gpu_util_percent),
            "sm_active_ratio": _interval(activity.sm_active_ratio),
            "dram_active_ratio": _interval(activity.dram_active_ratio),
        },
        "step_time_s": _interval(product.step_time_seconds),
    }


def _interval(interval: Interval) -> dict[str, float]:
    return {"median": interval.median, "lower": interval.lower, "upper": interval.upper}
