"""One training step on fake tensors: forward, loss, backward, optimizer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own name for it)
from carpool_core.resources.features import TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import Optimizer, Precision
from torch import Tensor, nn

from carpool_predictor.features.abstention import TraceError
from carpool_predictor.tracing.autocast import MetaAutocast, NoProductMissed
from carpool_predictor.tracing.checkpointing import checkpoint_activations
from carpool_predictor.tracing.fake import TensorMode
from carpool_predictor.tracing.multitensor import Answered, like
from carpool_predictor.tracing.rules import CudaRules
from carpool_predictor.tracing.trackers import Kind, StepTracker

AUTOCAST = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}
"""Precisions whose step runs under autocast, and in which type its matrix products are."""

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
    """Return the type of weights: mixed precision keeps them in FP32, `bf16-true` does not. None leaves them alone."""
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
    """A model with fake weights, its optimizer with fake state, and how to run a step of them."""

    model: nn.Module
    mode: TensorMode
    optimizer: torch.optim.Optimizer
    precision: Precision
    input_shape: tuple[int, ...]
    """Shape of one sample."""
    tokens: bool = False
    """Whether a sample is whole numbers."""

    def state(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer's state that lie on the GPU: not the count of its steps."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step" and isinstance(value, Tensor))

    def inputs(self, batch_size: int) -> Tensor:
        """Return a batch of fake samples, shape (batch, *input shape)."""
        dtype = torch.long if self.tokens else weight_dtype(self.precision) or torch.float32
        with self.mode:
            return torch.empty((batch_size, *self.input_shape), dtype=dtype)

    def step(self, inputs: Tensor, on_phase: Callable[[Phase], None] = lambda _: None) -> None:
        """Run one step; `on_phase` is called as backward and update begin. Run it inside the fake mode."""
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
    # On CUDA PyTorch's optimizers work on all tensors at once, and so hold their temporaries at once.
    options: dict[str, Any] = {"lr": 1e-3, "foreach": True}
    if kind is Optimizer.SGD_MOMENTUM:
        options["momentum"] = 0.9
    with mode, Answered():  # type: ignore[no-untyped-call]  # PyTorch's own
        optimizer = _OPTIMIZERS[kind](parameters, **options)
        if isinstance(mode, torch.device):
            _count_on_the_host(optimizer)
        for parameter in parameters:
            parameter.grad = like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _count_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Give Adagrad counts of steps that can be read: where weights have no data, those that it makes have none."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros((), device="cpu")


def trace_step(
    training: FakeTraining, batch_size: int, tracker: StepTracker | None = None
) -> tuple[TracedStep, StepTracker]:
    """Trace one step at a batch size, with a tracker of one's own where more is asked than the plain one counts."""
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
