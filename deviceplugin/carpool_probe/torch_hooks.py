"""The probe's changes to PyTorch and its companions. Each is made right after the module was imported.

The hooks import nothing: PyTorch is half imported when some of them are applied.
"""

import functools
import sys
from typing import Any, Callable

from carpool_probe.recorder import recorder


def apply(name: str, module: Any) -> None:
    """Apply the hooks of a module that has just been imported."""
    _HOOKS[name](module)


def _checkpoints(module: Any, name: str = "save") -> None:
    """Count the time of a function that writes checkpoints."""
    function = getattr(module, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return recorder.save(function, args, kwargs)

    setattr(module, name, wrapper)


def _data_loader(module: Any) -> None:
    """Count the time in which the training waits for its data loader."""
    iterator = module._BaseDataLoaderIter
    iterator.__next__ = recorder.timing_batches(iterator.__next__)


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
        if recorder.optimizer_steps == before and hasattr(optimizer, "register_step_post_hook"):
            recorder.count_step(id(optimizer), is_skipped=True)
        return found

    scaler.step = wrapper


def _torch(torch: Any) -> None:
    """Count the steps of all optimizers, and the time in which the training waits for copies of the host's tensors.

    Code that torch.compile traces must not count: it would break the graph.
    """
    is_traced = getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)  # the former is shorter
    optimizers = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim has no attribute for this module
    optimizers.register_optimizer_step_post_hook(recorder.step_hook(is_traced))

    def wrap(name: str) -> None:
        copy = getattr(torch.Tensor, name)

        @functools.wraps(copy)
        def wrapper(*args: Any, **kwargs: Any) -> Any:  # the tensor among the others: it costs half as much to pass on
            if is_traced() or not recorder.copy_weight or not args[0].is_cpu:
                return copy(*args, **kwargs)
            return recorder.copy(copy, args, kwargs)

        setattr(torch.Tensor, name, wrapper)

    wrap("to")
    wrap("cuda")


def _deepspeed(module: Any) -> None:
    """Count each step of a DeepSpeed engine once: ZeRO lets its optimizer step for each group of parameters."""
    engine = module.DeepSpeedEngine
    step = engine._take_model_step

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.is_merging = True
        try:
            return step(self, *args, **kwargs)
        finally:
            recorder.is_merging = False
            recorder.count_step(id(self))

    engine._take_model_step = wrapper


_HOOKS: "dict[str, Callable[[Any], Any]]" = {
    "torch": _torch,
    "torch.amp.grad_scaler": _grad_scaler,
    "torch.cuda.amp.grad_scaler": _grad_scaler,
    "torch.utils.data.dataloader": _data_loader,
    "torch.serialization": _checkpoints,
    "torch.distributed.checkpoint.state_dict_saver": _checkpoints,
    "safetensors.torch": lambda module: _checkpoints(module, "save_file"),
    "deepspeed.runtime.engine": _deepspeed,
}
