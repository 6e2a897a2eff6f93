"""Memory of optimizers as they run: bytes of state, and of temporaries during an update. No PyTorch.

The state is alive between steps. Temporaries are alive during `step()` only: of all tensors together if the update
handles them at once (`foreach`), else of one tensor, with what the loop still holds of the tensor before. The tests
compare each row with the optimizer's own code.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from carpool_core.values import Optimizer

Shape = Sequence[int]
Bytes = Callable[[Shape, int], int]
"""Bytes for a tensor, from its shape and the bytes of an element."""

_FP32 = 4
_MATRIX = (4096, 4096)
"""Shape for which bytes per parameter are shown; small tensors differ in some optimizers."""


def _copies(number: int) -> Bytes:
    """Return tensors of the weight's own type and shape."""
    return lambda shape, itemsize: number * math.prod(shape) * itemsize


_NOTHING = _copies(0)
_8BIT_BLOCK = 256
_8BIT_LEAST = 4096
_PAGED_LEAST = 100_000


def _8bit_state(shape: Shape, _: int) -> int:
    """Return two states of one byte with an FP32 maximum per block; small tensors have FP32 states."""
    elements = math.prod(shape)
    if elements < _8BIT_LEAST:
        return 2 * elements * _FP32
    return 2 * (elements + _FP32 * -(-elements // _8BIT_BLOCK))


def _8bit_paged_state(shape: Shape, itemsize: int) -> int:
    """Return the part that must be on the GPU: the maxima of large tensors, whose states are in managed memory."""
    elements = math.prod(shape)
    return 2 * _FP32 * -(-elements // _8BIT_BLOCK) if elements >= _PAGED_LEAST else _8bit_state(shape, itemsize)


def _factored_state(shape: Shape, _: int) -> int:
    """Return FP32 statistics of rows and columns; of vectors, of each element."""
    elements = math.prod(shape)
    return _FP32 * (elements // shape[-1] + elements // shape[-2] if len(shape) > 1 else elements)


def _adafactor_temporaries(shape: Shape, itemsize: int) -> int:
    """Return two FP32 copies, and FP32 copies of 16-bit weights and gradients."""
    return math.prod(shape) * _FP32 * (2 if itemsize == _FP32 else 4)


def _newton_schulz(shape: Shape, itemsize: int) -> int:
    """Return the update, two BF16 copies, and two BF16 matrices of the smaller dimension."""
    if len(shape) != 2:
        return 0
    return math.prod(shape) * (itemsize + 4) + 4 * min(shape) ** 2


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of one optimizer."""

    state: Bytes
    """State on the GPU for one tensor, in bytes."""
    temporaries: Bytes
    """Most temporaries during the update of one tensor, in bytes."""
    at_once: bool
    """Whether the temporaries of all tensors are alive together."""
    source: str
    """Code or document that the row follows."""
    held: Bytes = _NOTHING
    """Temporaries of one tensor that the loop holds until those of the next one replace them, in bytes."""

    def state_bytes(self, shapes: Iterable[Shape], itemsize: int = _FP32) -> int:
        """Return the state of all tensors, in bytes, without step counts."""
        return sum(self.state(shape, itemsize) for shape in shapes)

    def temporary_bytes(self, shapes: Iterable[Shape], itemsize: int = _FP32) -> int:
        """Return the most temporaries of an update of all tensors, in bytes."""
        shapes = list(shapes)
        each = [self.temporaries(shape, itemsize) for shape in shapes]
        held = [0, *(self.held(shape, itemsize) for shape in shapes)]
        return sum(each) if self.at_once else max(map(sum, zip(each, held, strict=False)), default=0)

    def state_per_parameter(self, itemsize: int) -> float:
        """Return the bytes of state per parameter of a large matrix."""
        return self.state(_MATRIX, itemsize) / math.prod(_MATRIX)

    def update_per_parameter(self, itemsize: int) -> float:
        """Return the same with the temporaries, if those of all tensors are alive together."""
        temporaries = self.temporaries(_MATRIX, itemsize) / math.prod(_MATRIX) if self.at_once else 0.0
        return self.state_per_parameter(itemsize) + temporaries


_FUSED_ADAM = OptimizerMemory(_copies(2), _NOTHING, False, "torch/optim/adam.py, _fused_adam: one kernel, in place")
_FOREACH_ADAM = OptimizerMemory(
    _copies(2), _copies(1), True, "torch/optim/adam.py, _multi_tensor_adam: the roots of the second moments"
)

TABLE: Mapping[Optimizer, OptimizerMemory] = MappingProxyType(
    {
        Optimizer.SGD: OptimizerMemory(_NOTHING, _NOTHING, True, "torch/optim/sgd.py, _multi_tensor_sgd"),
        Optimizer.SGD_MOMENTUM: OptimizerMemory(_copies(1), _NOTHING, True, "torch/optim/sgd.py, _multi_tensor_sgd"),
        Optimizer.ADAM: _FOREACH_ADAM,
        Optimizer.ADAMW: _FOREACH_ADAM,
        Optimizer.ADAGRAD: OptimizerMemory(
            _copies(1), _copies(2), True, "torch/optim/adagrad.py, _multi_tensor_adagrad: roots and scaled gradients"
        ),
        Optimizer.RMSPROP: OptimizerMemory(
            _copies(1), _copies(1), True, "torch/optim/rmsprop.py, _multi_tensor_rmsprop: the roots"
        ),
        Optimizer.ADAM_FUSED: _FUSED_ADAM,
        Optimizer.ADAMW_FUSED: _FUSED_ADAM,
        Optimizer.ADAMW_FOR_LOOP: OptimizerMemory(
            _copies(2),
            _copies(2),
            False,
            "torch/optim/adam.py, _single_tensor_adam: a root, and its quotient",
            _copies(1),
        ),
        Optimizer.ADAMW_8BIT: OptimizerMemory(
            _8bit_state,
            _NOTHING,
            False,
            "bitsandbytes/optim/optimizer.py, Optimizer2State.init_state: blocks of 256, FP32 below 4,096 elements; "
            "arXiv 2110.02861, section 2",
        ),
        Optimizer.ADAMW_8BIT_PAGED: OptimizerMemory(
            _8bit_paged_state,
            _NOTHING,
            False,
            "bitsandbytes/optim/optimizer.py, get_state_buffer: from 100,000 elements on in managed memory, which the "
            "driver moves to the host; arXiv 2305.14314, section 3",
        ),
        Optimizer.ADAFACTOR: OptimizerMemory(
            _factored_state,
            _adafactor_temporaries,
            False,
            "transformers/optimization.py, Adafactor without first moment; arXiv 1804.04235, section 4",
            lambda shape, _: _FP32 * math.prod(shape),
        ),
        Optimizer.LION: OptimizerMemory(
            lambda shape, _: _FP32 * math.prod(shape),
            _NOTHING,
            False,
            "bitsandbytes/optim/lion.py, Optimizer1State with 32 bits: one kernel, in place; arXiv 2302.06675",
        ),
        Optimizer.MUON: OptimizerMemory(
            _copies(1),
            _newton_schulz,
            False,
            "torch/optim/_muon.py, _zeropower_via_newtonschulz; hidden matrices only, the other weights as adamw",
        ),
    }
)
"""Memory by optimizer."""

_OTHER_NAMES = {
    "adamw-torch": Optimizer.ADAMW, "adamw-torch-fused": Optimizer.ADAMW_FUSED, "adamw-bnb-8bit": Optimizer.ADAMW_8BIT,
    "adam-8bit": Optimizer.ADAMW_8BIT, "paged-adamw-8bit": Optimizer.ADAMW_8BIT_PAGED, "lion-32bit": Optimizer.LION,
    "momentum": Optimizer.SGD_MOMENTUM, "adamw-foreach": Optimizer.ADAMW,
}  # fmt: skip
"""Names of other tools, as in the Hugging Face Trainer's `optim`, with hyphens."""


def unknown_optimizer(name: str) -> str:
    """Return the message about an unknown optimizer, with the nearest name or names."""
    names = {**{o.value: o for o in Optimizer}, **_OTHER_NAMES}
    wanted = name.strip().lower().replace("_", "-")
    near = [wanted] if wanted in names else difflib.get_close_matches(wanted, names, n=2, cutoff=0.6)
    hint = f"; the nearest is {' or '.join(dict.fromkeys(names[found].value for found in near))}" if near else ""
    return f"expected one of {', '.join(Optimizer)} as the optimizer, found {name!r}{hint}"
