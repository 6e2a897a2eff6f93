"""Builds models whose weights are fake: they have shapes and no memory.

Building inside the fake mode fails wherever a constructor asks a tensor for a number (`.item()`, as many do for their
drop-path schedule). So the constructor runs on real tensors, and each parameter and buffer turns fake at the moment
when it is registered: never more than one tensor of a model is real, and `torch.empty` leaves even that untouched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as registration
from torch.utils.weak import WeakIdKeyDictionary

_INITIALISERS = tuple(
    name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_") and callable(vars(nn.init)[name])
)


def fake_mode() -> FakeTensorMode:
    """Return a fake mode that takes the small real tensors which modules keep as plain attributes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


TensorMode = FakeTensorMode | torch.device
"""What tensors are made under: fake ones that say they are on the CPU, or bare ones on the device `meta`.

Both cost the same memory and give the same counts; meta tensors take a third of the time, and fail with the few models
that mix them with real ones.
"""


def meta_mode() -> torch.device:
    """Return the device of tensors without data, which stands for a mode in a `with` statement."""
    return torch.device("meta")


def _leave(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


@contextmanager
def fake_weights(mode: TensorMode, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make every parameter and buffer registered inside the block fake, and initialisers do nothing.

    Args:
        mode: What the weights will belong to.
        dtype: Type of floating-point weights; their own when None.
    """
    twins = WeakIdKeyDictionary()

    def twin(tensor: Tensor, wrap: Callable[[Tensor], Tensor]) -> Tensor:
        # One twin for each tensor, so that tied weights stay tied.
        if tensor not in twins:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            with mode:
                made = wrap(torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted))
            twins[tensor] = twins[made] = made  # a module may register again what another one has
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
