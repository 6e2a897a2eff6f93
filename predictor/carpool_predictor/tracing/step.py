"""One training step on fake tensors: forward, loss, backward, optimizer."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch uses)
from carpool_core.resources.features import TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from carpool_predictor.features import TraceError
from carpool_predictor.tracing import operators
from carpool_predictor.tracing.autocast import MetaAutocast, NoProductMissed
from carpool_predictor.tracing.operators import (
    PRIM_DEVICE,
    Costs,
    CudaRules,
    ForeachMode,
    OperatorCache,
    bytes_moved,
    kernel_count,
    like,
    tensors_in,
)

_GRANULE = 512
"""CUDA's caching allocator rounds each block up to 512 bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


class Kind(IntEnum):
    """Purpose of a live storage."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    INPUT = 4
    ACTIVATION = 5
    TEMPORARY = 6


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most live memory."""

    total_bytes: int
    by_kind: tuple[int, ...]
    """Bytes of each `Kind`, indexed by it."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations and temporaries, which grow with the batch."""
        return self.by_kind[Kind.ACTIVATION] + self.by_kind[Kind.TEMPORARY]


class LiveStorages:
    """Counts live storages by weak references, so that releases by Python and autograd are seen."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], int, Kind, int]] = {}
        self._numbers = count()
        self._by_kind = [0] * len(Kind)
        self._total = 0
        self.peak = Peak(0, tuple(self._by_kind))
        self.events: list[tuple[int, int]] = []
        """(number, bytes) of each allocation and (number, -1) of each release, for `allocator`."""

    @property
    def total_bytes(self) -> int:
        """Bytes alive now."""
        return self._total

    @property
    def now(self) -> Peak:
        """What is alive now."""
        return Peak(self._total, tuple(self._by_kind))

    def adopt(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count the tensors' storages unless they are counted already, and note the peak."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            size = -(-storage.nbytes() // _GRANULE) * _GRANULE
            number = next(self._numbers)
            self._live[key] = (weakref.ref(storage, partial(self._release, key)), size, kind, number)
            self.events.append((number, size))
            self._by_kind[kind] += size
            self._total += size
        if self._total > self.peak.total_bytes:
            self.peak = self.now

    def reclassify(self, tensor: Tensor, kind: Kind) -> None:
        """Count a live storage as another kind, such as a gradient once it has accumulated."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            reference, size, before, number = self._live[key]
            self._by_kind[before] -= size
            self._by_kind[kind] += size
            self._live[key] = (reference, size, kind, number)

    def _release(self, key: int, _: Any) -> None:
        _, size, kind, number = self._live.pop(key)
        self.events.append((number, -1))
        self._by_kind[kind] -= size
        self._total -= size


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    """Intercepts every operator of a step below autograd and autocast, and counts it."""

    def __init__(self, operators: OperatorCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = LiveStorages()
        self.kind = Kind.ACTIVATION
        """Kind of the storages that operators allocate now; the step changes it at the backward pass."""
        self.flops = 0.0
        self.bytes_moved = 0.0
        self.kernels = 0
        self._costs = Costs()
        self._operators = operators or OperatorCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count it."""
        kwargs = kwargs or {}
        if operators.is_answered(func) and args[0][0].is_meta:
            out = operators.answer(func, args)
        else:
            out = self._operators.call(func, args, kwargs)
        if func is PRIM_DEVICE:
            return out
        works, formula = self._costs.of(func)
        if works:
            self.kernels += kernel_count(func, args)
            self.bytes_moved += bytes_moved(args, kwargs, out)
        if formula is not None:
            self.flops += formula(args, kwargs, out)
        self.storages.adopt(tensors_in(*out) if isinstance(out, (list, tuple)) else tensors_in(out), self.kind)
        if works:
            self.observe(func, args, out)
        return out

    def begin(self, phase: str) -> None:
        """Called at the beginning of each phase; for subclasses."""

    def observe(self, func: Any, args: Any, out: Any) -> None:
        """Called after an operator that launches work was counted; for subclasses."""


_INITIALISERS = tuple(
    name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_") and callable(vars(nn.init)[name])
)


def fake_mode() -> FakeTensorMode:
    """Return a fake mode that accepts real tensors, which modules keep as plain attributes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


TensorMode = FakeTensorMode | torch.device
"""Mode under which tensors without data are created: fake tensors on the CPU, or the device `meta`.

Both give the same counts. Meta tensors take a third of the time, and fail in models that mix them with real tensors.
"""


def meta_mode() -> torch.device:
    """Return the device `meta`, which works as a mode in a `with` statement."""
    return torch.device("meta")


def _leave(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


@contextmanager
def fake_weights(mode: TensorMode, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make every parameter and buffer registered inside the block fake, and initialisers do nothing.

    Args:
        mode: Mode of the weights.
        dtype: Type of floating-point weights; unchanged if None.
    """
    twins = WeakIdKeyDictionary()

    def twin(tensor: Tensor, wrap: Callable[[Tensor], Tensor]) -> Tensor:
        # One twin for each tensor, so that tied weights stay tied.
        if tensor not in twins:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            with mode:
                made = wrap(torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted))
            twins[tensor] = twins[made] = made  # modules may share tensors
        found: Tensor = twins[tensor]
        return found

    def parameter(_: nn.Module, __: str, value: Any) -> Any:
        if type(value) is not nn.Parameter:
            return None
        return twin(value, lambda t: nn.Parameter(t, requires_grad=value.requires_grad))

    def buffer(_: nn.Module, __: str, value: Any) -> Any:
        return twin(value, lambda t: t) if type(value) is Tensor else None

    with ExitStack() as stack:
        for name in _INITIALISERS:
            stack.enter_context(patch.object(nn.init, name, _leave))
        stack.callback(registration.register_module_parameter_registration_hook(parameter).remove)
        stack.callback(registration.register_module_buffer_registration_hook(buffer).remove)
        yield


def checkpoint_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on.

    A model with `set_grad_checkpointing`, as timm's, does it itself. In other models each composite child of an
    outermost `nn.Sequential` or `nn.ModuleList` with at least two of them is recomputed in the backward pass.

    Raises:
        TraceError: The model has no blocks to recompute.
    """
    switch = getattr(model, "set_grad_checkpointing", None)
    if callable(switch):
        try:
            switch(True)
        except (AssertionError, NotImplementedError, AttributeError, TypeError) as e:
            raise TraceError("CheckpointingUnsupported", f"the model refuses activation checkpointing: {e}") from e
        return
    blocks = list(_blocks(model))
    if not blocks:
        raise TraceError(
            "CheckpointingUnsupported",
            "activationCheckpointing needs blocks to recompute (composite children of nn.Sequential or nn.ModuleList), "
            "and this model has none; set training.activationCheckpointing to false",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        composite = [block for block in child.children() if any(True for _ in block.children())]
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(composite) > 1:
            yield from composite
        else:
            yield from _blocks(child)


AUTOCAST = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}
"""Precisions whose step runs under autocast, with the type of its matrix products."""

Phase = Literal["state", "forward", "backward", "update"]

_OPTIMIZERS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.SGD_MOMENTUM: torch.optim.SGD,
    Optimizer.ADAM: torch.optim.Adam,
    Optimizer.ADAMW: torch.optim.AdamW,
    Optimizer.ADAGRAD: torch.optim.Adagrad,
    Optimizer.RMSPROP: torch.optim.RMSprop,
}


def weight_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type of weights, or None to keep theirs: FP32 in mixed precision, BF16 in `bf16-true`."""
    return torch.bfloat16 if precision is Precision.BF16 else None


def losses(output: Any) -> Iterator[Tensor]:
    """Yield a loss for each floating-point tensor of a model's output, however it is nested.

    (batch, classes), (batch, tokens, classes) and (batch, classes, height, width) get a cross-entropy, which takes the
    memory of the logits' softmax; anything else its mean.
    """
    if isinstance(output, Tensor):
        if not output.is_floating_point() or not output.requires_grad:
            return
        logits = output.flatten(0, 1) if output.dim() == 3 else output
        if logits.dim() in (2, 4):
            shape = (logits.shape[0], *logits.shape[2:])
            yield F.cross_entropy(logits, torch.zeros(shape, dtype=torch.long))
        else:
            yield output.mean()
    elif isinstance(output, dict):
        for item in output.values():
            yield from losses(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from losses(item)


@dataclass(frozen=True)
class FakeTraining:
    """A model with fake weights and its optimizer with fake state."""

    model: nn.Module
    mode: TensorMode
    optimizer: torch.optim.Optimizer
    precision: Precision
    input_shape: tuple[int, ...]
    """Shape of one sample."""
    tokens: bool = False
    """Whether a sample is whole numbers."""

    def state(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer's state on the GPU, without step counts."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step" and isinstance(value, Tensor))

    def inputs(self, batch_size: int) -> Tensor:
        """Return a batch of fake samples, shape (batch, *input shape)."""
        dtype = torch.long if self.tokens else weight_dtype(self.precision) or torch.float32
        with self.mode:
            return torch.empty((batch_size, *self.input_shape), dtype=dtype)

    def step(self, inputs: Tensor, on_phase: Callable[[Phase], None] = lambda _: None) -> None:
        """Run one step inside the fake mode; `on_phase` is called at the beginning of backward and update."""
        dtype = AUTOCAST.get(self.precision)
        with ExitStack() as stack:
            stack.enter_context(CudaRules(autocast=dtype is not None))
            if dtype is not None:
                if isinstance(self.mode, torch.device):
                    stack.enter_context(MetaAutocast(dtype))
                    stack.enter_context(NoProductMissed())  # type: ignore[no-untyped-call]  # PyTorch's own
                else:
                    stack.enter_context(torch.autocast("cpu", dtype=dtype))
            loss = sum(losses(self.model(inputs)), start=torch.zeros(()))
        if not loss.requires_grad:
            raise TraceError("TraceFailed", "the model's output holds no floating-point tensor that needs gradients")
        on_phase("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        on_phase("update")
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepare(
    model: nn.Module, mode: TensorMode, training: Training, input_shape: tuple[int, ...], *, tokens: bool = False
) -> FakeTraining:
    """Put a fake model into training mode, with checkpointing and optimizer state as in the middle of a run."""
    model.train()
    if training.activation_checkpointing:
        checkpoint_activations(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError("TraceFailed", "the model has no trainable parameters, so there is nothing to train")
    optimizer = _optimizer(model, mode, training.optimizer)
    return FakeTraining(model, mode, optimizer, training.precision, input_shape, tokens)


def with_optimizer(training: FakeTraining, optimizer: Optimizer) -> FakeTraining:
    """Return the same model with another optimizer."""
    return replace(training, optimizer=_optimizer(training.model, training.mode, optimizer))


def _optimizer(model: nn.Module, mode: TensorMode, kind: Optimizer) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    # PyTorch's CUDA optimizers update all tensors at once, and hold all temporaries at once.
    options: dict[str, Any] = {"lr": 1e-3, "foreach": True}
    if kind is Optimizer.SGD_MOMENTUM:
        options["momentum"] = 0.9
    with mode, ForeachMode():  # type: ignore[no-untyped-call]  # PyTorch's own
        optimizer = _OPTIMIZERS[kind](parameters, **options)
        if isinstance(mode, torch.device):
            _count_on_the_host(optimizer)
        for parameter in parameters:
            parameter.grad = like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _count_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Replace Adagrad's step counts by real tensors; on meta weights they have no data."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros((), device="cpu")


def trace_step(
    training: FakeTraining, batch_size: int, tracker: StepTracker | None = None
) -> tuple[TracedStep, StepTracker]:
    """Trace one step at a batch size, with a given tracker or a plain one."""
    tracker = tracker or StepTracker()
    inputs = training.inputs(batch_size)
    storages = tracker.storages
    storages.adopt(training.model.parameters(), Kind.PARAMETER)
    storages.adopt(training.model.buffers(), Kind.BUFFER)
    tracker.begin("state")
    storages.adopt(training.state(), Kind.OPTIMIZER)
    tracker.begin("forward")
    storages.adopt([inputs], Kind.INPUT)

    def gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.reclassify(parameter.grad, Kind.GRADIENT)

    def begin(phase: Phase) -> None:
        tracker.kind = Kind.TEMPORARY
        tracker.begin(phase)

    with ExitStack() as stack:
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(gradient).remove)  # type: ignore[no-untyped-call]
        with training.mode, tracker:
            training.step(inputs, begin)
    peak = storages.peak
    return (
        TracedStep(
            batch_size=batch_size,
            peak_bytes=peak.total_bytes,
            activation_bytes=peak.activation_bytes,
            flops=float(tracker.flops),
            bytes_moved=float(tracker.bytes_moved),
            kernels=tracker.kernels,
        ),
        tracker,
    )
