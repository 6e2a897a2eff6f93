"""One training step on fake tensors: forward, loss, backward, optimizer."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch uses)
from carpool_core.resources.features import TracedStep
from carpool_core.resources.job import Training
from carpool_core.values import CrossEntropy, Optimizer, Precision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as registration
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from carpool_predictor.features import Sample, TraceError
from carpool_predictor.optimizers import TABLE, OptimizerMemory
from carpool_predictor.parallel import WHOLE, Shares
from carpool_predictor.tracing.adapters import quantized_weights
from carpool_predictor.tracing.allocator import reserved_by_lengths
from carpool_predictor.tracing.autocast import MetaAutocast, NoProductMissed
from carpool_predictor.tracing.operators import CudaRules, ForeachMode, OperatorCache, like
from carpool_predictor.tracing.saved import KeptTensors
from carpool_predictor.tracing.sharding import sharded
from carpool_predictor.tracing.tracker import Kind, StepTracker

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


def _replace_data(parameter: Tensor, converted: Tensor) -> None:
    """Convert a parameter in `Module.to`; PyTorch's `swap_tensors` refuses fake tensors, to which it has references."""
    if parameter.dtype is not converted.dtype:
        parameter.data = converted.data


@contextmanager
def fake_weights(mode: TensorMode, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make every parameter and buffer registered inside the block fake, and initialisers do nothing.

    Floating-point weights get the type `dtype`; without it they keep theirs.
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
        stack.enter_context(patch.object(torch.utils, "swap_tensors", _replace_data))
        stack.callback(registration.register_module_parameter_registration_hook(parameter).remove)
        stack.callback(registration.register_module_buffer_registration_hook(buffer).remove)
        yield


def checkpoint_activations(model: nn.Module, rules: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Switch activation checkpointing on, with the rules under which blocks are recomputed.

    A model with `set_grad_checkpointing`, as timm's, does it itself. In other models each composite child of an
    outermost `nn.Sequential` or `nn.ModuleList` with at least two of them is recomputed in the backward pass.

    Raises:
        TraceError: The model has no blocks to recompute.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), rules()

    switch = getattr(model, "set_grad_checkpointing", None)
    if callable(switch):
        own = {"context_fn": contexts} if "context_fn" in inspect.signature(switch).parameters else {}
        if not own:
            model.forward = _with_rules(model.forward, contexts)
        try:
            switch(True, **own)
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
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _with_rules(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    """Return a forward pass whose calls of PyTorch's `checkpoint`, which timm makes without rules, have them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.utils.checkpoint, "checkpoint", partial(checkpoint, context_fn=contexts)):
            return forward(*args, **kwargs)

    return run


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        composite = [block for block in child.children() if any(True for _ in block.children())]
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(composite) > 1:
            yield from composite
        else:
            yield from _blocks(child)


AUTOCAST = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}
"""Precisions whose step runs under autocast, with the type of its matrix products."""


class TableOptimizer(torch.optim.Optimizer):
    """Allocates the state and the temporaries of an optimizer of `optimizers.TABLE`, one tensor after the other."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, memory: OptimizerMemory) -> None:
        super().__init__(parameters, {"lr": lr})
        self._memory = memory

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each weight in one kernel."""
        held: list[Tensor] = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                shape, itemsize = weight.shape, weight.element_size()
                if weight not in self.state:
                    self.state[weight]["state"] = _buffer(weight, self._memory.state(shape, itemsize))
                temporaries = _buffer(weight, self._memory.temporaries(shape, itemsize))
                weight.add_(weight.grad, alpha=-group["lr"])
                del temporaries
                held[:] = [_buffer(weight, self._memory.held(shape, itemsize))]


def _buffer(weight: Tensor, size: int) -> Tensor:
    return weight.new_empty(size, dtype=torch.uint8)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, and AdamW for the other weights, which Muon refuses or its authors exclude."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, others: Collection[Tensor]) -> None:
        super().__init__(parameters, {"lr": lr})
        every = [weight for group in self.param_groups for weight in group["params"]]
        excluded = WeakIdKeyDictionary(dict.fromkeys(others, True))
        hidden = [weight for weight in every if weight.dim() == 2 and weight not in excluded]
        rest = [weight for weight in every if weight.dim() != 2 or weight in excluded]
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            self._parts.append(torch.optim.Muon(hidden, lr=lr))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, foreach=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights."""
        for part in self._parts:
            part.step()
            self.state.update(part.state)


OPTIMIZERS: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: partial(torch.optim.SGD, foreach=True),
    Optimizer.SGD_MOMENTUM: partial(torch.optim.SGD, momentum=0.9, foreach=True),
    Optimizer.ADAM: partial(torch.optim.Adam, foreach=True),
    Optimizer.ADAMW: partial(torch.optim.AdamW, foreach=True),
    Optimizer.ADAGRAD: partial(torch.optim.Adagrad, foreach=True),
    Optimizer.RMSPROP: partial(torch.optim.RMSprop, foreach=True),
    Optimizer.ADAM_FUSED: partial(torch.optim.Adam, fused=True),
    Optimizer.ADAMW_FUSED: partial(torch.optim.AdamW, fused=True),
    Optimizer.ADAMW_FOR_LOOP: partial(torch.optim.AdamW, foreach=False),
}
"""PyTorch's optimizers; they take parameters and options such as the learning rate."""


def weight_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type of weights, or None to keep theirs: FP32 in mixed precision, BF16 in `bf16-true`."""
    return torch.bfloat16 if precision is Precision.BF16 else None


def losses(output: Any, *, is_cast: bool = False, compiled: bool = False) -> Iterator[Tensor]:
    """Yield a loss for each floating-point tensor of a model's output, however it is nested.

    (batch, classes), (batch, tokens, classes) and (batch, classes, height, width) get a cross-entropy, which takes the
    memory of the logits' softmax; anything else its mean. `is_cast` is whether logits of tokens are cast to FP32
    before, as the losses of transformers do; autocast does it itself. A compiled loss keeps the logits alone.
    """
    if isinstance(output, Tensor):
        if not output.is_floating_point() or not output.requires_grad:
            return
        logits = output
        if output.dim() == 3:
            logits = (output.float() if is_cast else output).flatten(0, 1)
        if logits.dim() not in (2, 4):
            yield output.mean()
        elif compiled:
            yield _CompiledLoss.apply(logits)
        else:
            shape = (logits.shape[0], *logits.shape[2:])
            yield F.cross_entropy(logits, torch.zeros(shape, dtype=torch.long, device=logits.device))
    elif isinstance(output, (dict, list, tuple)):
        for item in output.values() if isinstance(output, dict) else output:
            yield from losses(item, is_cast=is_cast, compiled=compiled)


class _CompiledLoss(torch.autograd.Function):
    """A cross-entropy whose softmax exists in registers only."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return torch.empty_like(logits)


_CHUNKS = 8
"""Chunks of a chunked loss, as in torchtune, and of the tokens of which a fused loss has logits at once."""


class _FusedLoss(torch.autograd.Function):
    """The head's product and its loss: logits exist a chunk at a time, and are computed again for the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        for chunk in hidden.flatten(0, -2).chunk(_CHUNKS):
            chunk @ weight.to(hidden.dtype).t()
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        lowered, of_hidden, of_weight = weight.to(hidden.dtype), torch.empty_like(hidden), None
        for chunk in hidden.flatten(0, -2).chunk(_CHUNKS):
            logits = chunk @ lowered.t()
            of_chunk = logits @ lowered
            if ctx.needs_input_grad[1]:
                product = logits.t() @ chunk
                of_weight = product if of_weight is None else of_weight.add_(product)
            del logits, of_chunk
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


def put_loss_into_head(model: nn.Module, training: Training) -> None:
    """Make a model's last linear layer return a chunked or fused loss in place of logits.

    Raises:
        TraceError: The model has no linear layer.
    """
    heads = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not heads:
        raise TraceError(
            "CrossEntropyInvalid",
            f"crossEntropy: {training.cross_entropy} needs a linear layer as the head, and this model has none; set "
            "training.crossEntropy to full",
        )
    head = heads[-1]

    def chunked(hidden: Tensor) -> Tensor:
        chunks = (F.linear(chunk, head.weight, head.bias) for chunk in hidden.flatten(0, -2).chunk(_CHUNKS))
        every = (losses(logits if training.compile else logits.float(), compiled=training.compile) for logits in chunks)
        return sum((loss for found in every for loss in found), start=hidden.new_zeros(()))

    def fused(hidden: Tensor) -> Tensor:
        loss: Tensor = _FusedLoss.apply(hidden, head.weight)
        return loss

    head.forward = chunked if training.cross_entropy is CrossEntropy.CHUNKED else fused  # type: ignore[assignment, method-assign]


@contextmanager
def cuda_rules(precision: Precision, mode: TensorMode, *, recomputes: bool = False) -> Iterator[None]:
    """Run a model inside the block as on CUDA; `recomputes` is for the backward pass, which enters autocast itself."""
    dtype = AUTOCAST.get(precision)
    with ExitStack() as stack:
        stack.enter_context(CudaRules(autocast=dtype is not None))
        if dtype is not None and isinstance(mode, torch.device):
            stack.enter_context(MetaAutocast(dtype, keeps_casts=not recomputes))
            stack.enter_context(NoProductMissed())  # type: ignore[no-untyped-call]  # PyTorch's own
        elif dtype is not None and not recomputes:
            stack.enter_context(torch.autocast("cpu", dtype=dtype))
        yield


@dataclass(frozen=True)
class FakeTraining:
    """A model with fake weights and its optimizer with fake state."""

    model: nn.Module
    mode: TensorMode
    optimizer: torch.optim.Optimizer
    training: Training
    """In the precision of the model's arithmetic."""
    samples: tuple[Sample, ...]
    shares: Shares = WHOLE
    """What this GPU stores of the model."""

    def state(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer's state on the GPU, without step counts."""
        for state in self.optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step" and isinstance(value, Tensor))

    def inputs(self, batch_size: int) -> list[Tensor]:
        """Return a batch of fake samples for each input, shape (batch, *shape of the sample)."""
        plain = weight_dtype(self.training.precision) or torch.float32
        with self.mode:
            return [torch.empty((batch_size, *s.shape), dtype=torch.long if s.tokens else plain) for s in self.samples]

    def _kept(self, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the rules for what autograd keeps of the forward pass."""
        compiled, offloaded = self.training.compile, self.training.activation_offloading
        if not (compiled or offloaded):
            return nullcontext()
        permanent = [*self.model.parameters(), *self.model.buffers(), *inputs]
        return KeptTensors(permanent, compiled=compiled, offloaded=offloaded)

    def step(
        self,
        inputs: Sequence[Tensor],
        on_backward: Callable[[], None] = lambda: None,
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the last pass of a step and its update, inside the fake mode.

        `on_backward` is called at the beginning of the backward pass, and `on_update` at the end of it.
        """
        training = self.training
        is_cast = training.precision is Precision.BF16 and training.cross_entropy is CrossEntropy.FULL
        with cuda_rules(training.precision, self.mode), self._kept(inputs):
            output = self.model(*inputs)
            loss = sum(losses(output, is_cast=is_cast, compiled=training.compile), start=torch.zeros(()))
        if not is_cast:
            output = None  # loops with 16-bit weights hold it, or copies of it, during the backward pass
        if not loss.requires_grad:
            raise TraceError("TraceFailed", "the model's output holds no floating-point tensor that needs gradients")
        on_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        output = None
        on_update()
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepare(
    model: nn.Module, mode: TensorMode, training: Training, *samples: Sample, shares: Shares = WHOLE
) -> FakeTraining:
    """Put a fake model into training mode, with checkpointing and optimizer state as in the middle of a run."""
    model.train()
    if training.cross_entropy in (CrossEntropy.CHUNKED, CrossEntropy.FUSED):
        put_loss_into_head(model, training)
    if training.activation_checkpointing:
        checkpoint_activations(model, partial(cuda_rules, training.precision, mode, recomputes=True))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError("TraceFailed", "the model has no trainable parameters, so there is nothing to train")
    optimizer = _optimizer(model, mode, training.optimizer)
    return FakeTraining(model, mode, optimizer, training, samples, shares)


def _optimizer(model: nn.Module, mode: TensorMode, kind: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer after its first step, which creates its state."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    make: Callable[..., torch.optim.Optimizer]
    if kind is Optimizer.MUON:
        make = partial(MuonWithAdamW, others=_embeddings_and_head(model))
    else:
        make = OPTIMIZERS.get(kind) or partial(TableOptimizer, memory=TABLE[kind])
    # PyTorch checks that the device has fused kernels when it creates the state; `meta` has their output shapes only.
    adam = import_module("torch.optim.adam")
    with mode, ForeachMode(), patch.object(adam, "_device_dtype_check_for_fused", _leave):  # type: ignore[no-untyped-call]  # PyTorch's own
        optimizer = make(parameters, lr=1e-3)
        if isinstance(mode, torch.device):
            _count_on_the_host(optimizer)
        for parameter in parameters:
            parameter.grad = like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _embeddings_and_head(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings and of the last linear layer."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    embeddings = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    return [*(layer.weight for layer in embeddings), *(layer.weight for layer in linear[-1:])]


def _count_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Replace Adagrad's step counts by real tensors; on meta weights they have no data."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros((), device="cpu")


def trace_step(
    training: FakeTraining, batch_size: int, operators: OperatorCache | None = None
) -> tuple[TracedStep, StepTracker]:
    """Trace one step at a batch size; return it, and the tracker with its storages."""
    tracker = StepTracker(operators)
    inputs = training.inputs(batch_size)
    storages = tracker.storages
    tracker.is_compiled, tracker.work_share = training.training.compile, training.shares.work

    def gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            storages.reclassify(parameter.grad, Kind.GRADIENT)

    def begin_backward() -> None:
        tracker.kind = Kind.TEMPORARY

    def begin_update() -> None:
        storages.update = len(storages.events)
        tracker.repeat(training.training.gradient_accumulation)
        tracker.work_share, tracker.is_compiled = training.shares.optimizer, False
        divide_update()

    blocks = _blocks(training.model)
    with sharded(training.shares, training.model, blocks, storages) as divide_update, ExitStack() as stack:
        storages.adopt(training.model.parameters(), Kind.PARAMETER)
        storages.adopt(quantized_weights(training.model), Kind.QUANTIZED)
        storages.adopt(training.model.buffers(), Kind.BUFFER)
        storages.adopt_state(training.state())
        storages.adopt(inputs, Kind.INPUT)
        if training.training.gradient_accumulation > 1:
            # The gradients of the earlier passes are alive, and this pass adds its own.
            with training.mode:
                for parameter in training.model.parameters():
                    parameter.grad = like(parameter) if parameter.requires_grad else None
            storages.adopt((p.grad for p in training.model.parameters() if p.grad is not None), Kind.GRADIENT)
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(gradient).remove)  # type: ignore[no-untyped-call]
        with training.mode, tracker:
            training.step(inputs, begin_backward, begin_update)
    return tracker.traced(batch_size), tracker


def trace_varying(
    training: FakeTraining, batch_size: int, operators: OperatorCache | None = None
) -> tuple[TracedStep, StepTracker]:
    """Trace one step like `trace_step`; its reserved memory is that of steps of many lengths up to the samples' own.

    Raises:
        TraceError: No sample has tokens, or a shorter one makes other tensors.
    """
    halved = tuple(Sample((s.shape[0] // 2,), tokens=True) if s.tokens else s for s in training.samples)
    if halved == training.samples or min(s.shape[0] for s in halved) < 1:
        raise TraceError(
            "VaryingLengthsUnsupported",
            "varyingLengths needs samples of two tokens or more; set training.varyingLengths to false",
        )
    step, tracker = trace_step(training, batch_size, operators)
    _, shorter = trace_step(replace(training, samples=halved), batch_size, operators)
    whole, half = tracker.storages, shorter.storages
    if whole.allocations != half.allocations:
        raise TraceError(
            "VaryingLengthsUnsupported",
            f"expected as many tensors at half the length, found {half.allocations:,} instead of "
            f"{whole.allocations:,}; set training.varyingLengths to false",
        )
    reserved = reserved_by_lengths(whole.events, half.events, whole.state, whole.update)
    return msgspec.structs.replace(step, reserved_bytes=max(step.reserved_bytes, reserved)), tracker
