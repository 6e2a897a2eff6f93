"""Parts of the activity model's card: real networks on another GPU, how far it reaches, what to doubt."""

from collections.abc import Sequence

import numpy as np
from carpool_core.products import find_product
from carpool_core.resources.job import CatalogModel, Training
from carpool_core.values import Optimizer

from carpool_predictor.catalog import store
from carpool_predictor.evaluation.activity.real import PRODUCT, RealRow
from carpool_predictor.evaluation.activity.rows import PRODUCT as MEASURED
from carpool_predictor.evaluation.suites import Figure
from carpool_predictor.features import cost_at
from carpool_predictor.models.activity import activity_on

_BATCHES = (16, 64)


def real_figures(rows: Sequence[RealRow]) -> tuple[Figure, ...]:
    """Return mean absolute errors of GPU utilization on real networks, in points."""
    return (
        Figure("GPU utilization, real CNNs on another GPU: mean absolute error, points", round(_error(rows), 2)),
        Figure("GPU utilization, real CNNs on another GPU: that of the roofline", round(_roofline_error(rows), 2)),
        Figure("GPU utilization, real CNNs on another GPU: inside the interval, %", round(_coverage(rows), 1)),
    )


def _error(rows: Sequence[RealRow]) -> float:
    return float(np.mean([abs(row.predicted - row.measured) for row in rows]))


def _roofline_error(rows: Sequence[RealRow]) -> float:
    return float(np.mean([abs(row.roofline - row.measured) for row in rows]))


def _coverage(rows: Sequence[RealRow]) -> float:
    return 100 * float(np.mean([row.lower <= row.measured <= row.upper for row in rows]))


def reach() -> float:
    """Return the share of stored models, at two batch sizes, whose activity is learned and not the roofline's."""
    product = find_product(MEASURED)
    inside = []
    for name in store.shipped().names():
        for batch_size in _BATCHES:
            training = Training(batch_size=batch_size, optimizer=Optimizer.ADAM)
            features = store.shipped().features(CatalogModel(name=name), training)
            if features is not None:
                inside.append(activity_on(features, cost_at(features, batch_size), training, product).inside)
    return float(np.mean(inside))


def reality(rows: Sequence[RealRow]) -> list[str]:
    """Write the section on real networks."""
    return [
        "## Real networks, another GPU",
        "",
        f"S-Lab's Lucid measured three convolutional networks alone on a {PRODUCT.removeprefix('NVIDIA ')}, data",
        "loading included. Its licence lets it judge, not teach: nothing was fitted or chosen by it.",
        "GPU utilization, %:",
        "",
        "| network | batch | precision | measured | predicted | interval | roofline |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r.model} | {r.batch_size} | {r.precision} | {r.measured:.0f} | {r.predicted:.0f} "
            f"| {r.lower:.0f} to {r.upper:.0f} | {r.roofline:.0f} |"
            for r in rows
        ),
        "",
        f"Mean absolute error **{_error(rows):.1f}** points; the roofline's {_roofline_error(rows):.1f}. The 90%",
        f"interval holds {_coverage(rows):.0f}% of them: it was learned on one GPU, one host and a loader that",
        "cannot fall behind. A host that takes longer to launch and to load leaves a GPU idle that this model thinks",
        "busy; from a job's first measurement on, what was measured counts.",
        "",
        "## How far it reaches",
        "",
        f"{reach():.1%} of the feature store's models at batch sizes 16 and 64 lie inside what was learned. No feature",
        "grows with a model's depth: the synthetic networks are shallower than real ones.",
        "",
    ]


def doubts() -> list[str]:
    """Write what to doubt."""
    return [
        "## What to doubt",
        "",
        "- Networks are synthetic; no transformer and no model with attention is among them.",
        "- Small networks wait for their data loader (MLPs: none; CNNs: two workers that draw random images). The",
        "  loader is not an input, so what the model says of small networks holds for loaders like these.",
        "- The data leave out seconds without any activity, so that they tell of training, not of start-up.",
        "- One GPU product was measured. DRAM activity was not: it is the roofline's.",
        "",
    ]
