"""What `carpool train` builds: the memory model from measured runs and the feature store."""

from pathlib import Path

import msgspec

from carpool_predictor.catalog import store
from carpool_predictor.evaluation.memory.fit import fit, samples_of, traced_models
from carpool_predictor.evaluation.memory.measurements import FILE, clean, read_rows
from carpool_predictor.models.memory import MemoryModel

SEED = 20260101
VERSION = "2026.11.2"
"""Changes with the numbers: waiting jobs are predicted anew by it, and answers of two models are told apart."""


def memory_model(data: Path) -> MemoryModel:
    """Fit the memory model that is shipped.

    Raises:
        DataError: The measurements cannot be read.
    """
    import sklearn

    rows = read_rows(data / FILE)
    known = store.shipped()
    traced = traced_models({row.model for row in rows})
    good = clean(rows)
    samples = samples_of(good, traced)
    model = fit(samples, seed=SEED, version=VERSION)
    provenance: dict[str, str | float | int] = {
        "data": "itu-rad/GPUMemNet, Related_works/FakeTensor (timm models, A100-SXM4-40GB, FP32)",
        "rows": len(rows),
        "rows_after_cleaning": len(good),
        "rows_fitted": len(samples),
        "models_traced": len({s.model for s in samples}),
        "families": len({s.family for s in samples}),
        "seed": SEED,
        "scikit_learn": sklearn.__version__,
        **known.versions,
        **model.provenance,
    }
    return msgspec.structs.replace(model, provenance=provenance)


def train_memory(data: Path, out: Path) -> Path:
    """Write `memory.json` below `out`; the same data and seed give the same bytes."""
    path = out / "memory.json"
    content = msgspec.json.encode(memory_model(data)) + b"\n"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
