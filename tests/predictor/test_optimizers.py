"""The table of optimizers against the code that runs: PyTorch's own, and the Hugging Face Trainer's Adafactor."""

from collections.abc import Callable

import pytest
import torch
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.optimizers import TABLE, unknown_optimizer
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.operators import outputs_of
from carpool_predictor.tracing.step import OPTIMIZERS
from carpool_predictor.tracing.tracker import Kind, LiveStorages
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = [(768, 256), (512, 512), (4096,), (96, 320)]


class Temporaries(TorchDispatchMode):
    """Follows the storages that an update allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = LiveStorages()

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator, misc]
        # In-place operators return weights and state, which are not temporaries.
        if not func._schema.is_mutable:  # type: ignore[attr-defined]
            self.storages.adopt(outputs_of(out), Kind.TEMPORARY)
        return out


def adafactor(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    transformers = pytest.importorskip("transformers")
    return transformers.optimization.Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)


RUNS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    Optimizer.MUON: torch.optim.Muon,
    Optimizer.ADAFACTOR: adafactor,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RUNS)
def test_the_table_has_the_bytes_of_the_optimizers_own_code(kind: Optimizer, dtype: torch.dtype) -> None:
    shapes = [shape for shape in SHAPES if kind is not Optimizer.MUON or len(shape) == 2]
    weights = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    optimizer = RUNS[kind](weights, lr=1e-3)
    for _ in range(2):  # the second update has its state
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with Temporaries() as tracker:
            optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    state = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor) and t.dim())
    assert TABLE[kind].state_bytes(shapes, dtype.itemsize) == state
    found = tracker.storages.peak.total_bytes
    expected = TABLE[kind].temporary_bytes(shapes, dtype.itemsize)
    assert expected <= found <= 1.02 * expected + 64 * 1024  # scalars round up to 512 bytes


@pytest.mark.parametrize(
    ("kind", "shape", "state"),
    [
        pytest.param(Optimizer.ADAMW_8BIT, (4096, 4096), 2 * (2**24 + 2**24 // 64), id="a byte, a maximum per 256"),
        pytest.param(Optimizer.ADAMW_8BIT, (4095,), 2 * 4095 * 4, id="small tensors have FP32 states"),
        pytest.param(Optimizer.ADAMW_8BIT_PAGED, (4096, 4096), 2 * 2**24 // 64, id="paged states may leave the GPU"),
        pytest.param(Optimizer.ADAMW_8BIT_PAGED, (256, 256), 2 * (2**16 + 2**16 // 64), id="small ones are not paged"),
        pytest.param(Optimizer.LION, (16, 16), 4 * 256, id="one FP32 state"),
    ],
)
def test_states_of_bitsandbytes(kind: Optimizer, shape: tuple[int, ...], state: int) -> None:
    """From `init_state` and `get_state_buffer` of bitsandbytes 0.45, which runs on a GPU only."""
    assert TABLE[kind].state_bytes([shape], 2) == state


@pytest.mark.parametrize("kind", list(Optimizer))
def test_a_step_takes_what_the_table_has(kind: Optimizer) -> None:
    """Of two equal layers the last one is the head, which Muon leaves to AdamW."""
    size = 1024
    recipe = Recipe("layers", lambda: nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(2))), (size,))
    peak = trace_recipe(recipe, Training(optimizer=kind), (1,)).steps[0].peak_bytes
    rows = [kind, Optimizer.ADAMW] if kind is Optimizer.MUON else [kind]
    shapes = [[(size, size)] * (2 // len(rows)) for _ in rows]
    state = sum(TABLE[row].state_bytes(shape) for row, shape in zip(rows, shapes, strict=True))
    temporaries = max(TABLE[row].temporary_bytes(shape) for row, shape in zip(rows, shapes, strict=True))
    assert peak == pytest.approx(4 * size * size * 4 + state + temporaries, rel=0.01)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("adamw_torch_fused", "; the nearest is adamw-fused"),
        ("paged_adamw_8bit", "; the nearest is adamw-8bit-paged"),
        ("adamW", "; the nearest is adamw"),
        ("adafacto", "; the nearest is adafactor"),
        ("zzz", "found 'zzz'"),
    ],
)
def test_an_unknown_optimizer_gets_the_nearest_name(name: str, nearest: str) -> None:
    assert unknown_optimizer(name).endswith(nearest)
