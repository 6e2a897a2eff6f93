"""The probe's changes to PyTorch and its companions. Each is made right after the module was imported.

The hooks import nothing: PyTorch is half imported when most of them are applied.
"""

import functools
import sys
from typing import Any, Callable

from carpool_probe.recorder import CHECKPOINT, DATA, recorder

torch: Any = None
"""PyTorch, as soon as it is being imported."""


def apply(name: str, module: Any) -> None:
    """Apply the hooks of a module that has just been imported."""
    global torch
    torch = sys.modules.get("torch")
    _HOOKS[name](module)


def _wrap(owner: Any, name: str, index: int) -> None:
    """Replace a function of a module or class by one that counts its time."""
    function, timed = getattr(owner, name), recorder.timed

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return timed(function, index, args, kwargs)

    setattr(owner, name, wrapper)


def _optimizers(module: Any) -> None:
    """Count the steps of all optimizers by PyTorch's global hook."""

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not _merges:
            recorder.count_step(id(optimizer))

    module.register_optimizer_step_post_hook(count)


def _grad_scaler(module: Any) -> None:
    """Count the steps that a GradScaler skips because of infinite gradients: then no optimizer steps."""
    scaler = module.GradScaler
    step = scaler.__dict__.get("step")
    if step is None:  # the old name of a class in another module
        return

    @functools.wraps(step)
    def wrapper(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recorder.optimizer_steps
        found = step(self, optimizer, *args, **kwargs)
        if recorder.optimizer_steps == before and isinstance(optimizer, torch.optim.Optimizer):
            recorder.count_step(id(optimizer), is_skipped=True)
        return found

    scaler.step = wrapper


def _tensors(module: Any) -> None:
    """Count the time in which the training waits for copies of tensors from the host to a device."""
    tensor = module.Tensor

    def wrap(name: str) -> None:
        copy = getattr(tensor, name)

        @functools.wraps(copy)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_cpu or torch.compiler.is_compiling():
                return copy(self, *args, **kwargs)
            return recorder.timed_copy(copy, self, args, kwargs)

        setattr(tensor, name, wrapper)

    wrap("to")
    wrap("cuda")


_merges: "list[int]" = []
"""Not empty while several steps of an optimizer are one step of the training."""


def _deepspeed(module: Any) -> None:
    """Count each step of a DeepSpeed engine once: ZeRO lets its optimizer step for each group of parameters."""
    engine = module.DeepSpeedEngine
    step = engine._take_model_step

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _merges.append(1)
        try:
            return step(self, *args, **kwargs)
        finally:
            _merges.pop()
            recorder.count_step(id(self))

    engine._take_model_step = wrapper


_HOOKS: "dict[str, Callable[[Any], Any]]" = {
    "torch": _tensors,
    "torch.optim.optimizer": _optimizers,
    "torch.amp.grad_scaler": _grad_scaler,
    "torch.cuda.amp.grad_scaler": _grad_scaler,
    "torch.utils.data.dataloader": lambda module: _wrap(module._BaseDataLoaderIter, "__next__", DATA),
    "torch.serialization": lambda module: _wrap(module, "save", CHECKPOINT),
    "torch.distributed.checkpoint.state_dict_saver": lambda module: _wrap(module, "save", CHECKPOINT),
    "safetensors.torch": lambda module: _wrap(module, "save_file", CHECKPOINT),
    "deepspeed.runtime.engine": _deepspeed,
}
