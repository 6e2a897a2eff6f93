"""Starts the probe with the interpreter: imported by a .pth file or `sitecustomize`, before the user's code.

It imports nothing that Python has not imported already, because every Python process of the container pays for it.
"""

import os
import sys
import time

USER_BASE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "user")
"""The user base whose .pth files import this module."""
STARTED_NS = time.monotonic_ns()
"""Start of this process, on the clock of the file."""


def restore_user_site() -> None:
    """Add the user site directory that PYTHONUSERBASE hid, at its usual place, and remove the variable.

    Without the variable, this process finds and installs packages of the user as if the probe was absent.
    """
    if os.environ.get("PYTHONUSERBASE") != USER_BASE:
        return
    import site

    del os.environ["PYTHONUSERBASE"]
    site.USER_BASE = site.USER_SITE = None
    user_site = site.getusersitepackages()
    if os.path.isdir(user_site):
        site.addsitedir(user_site)


class Finder:
    """Finds no module itself: the other finders find the modules of MODULES, and it hooks their loading."""

    def __init__(self, names: "frozenset[str]") -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return the module's specification with a hook after its execution; None for all other modules."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, Finder) else finder.find_spec(name, path, target)  # type: ignore[arg-type]
            if spec is not None:
                _hook_loader(spec.loader, name)
                return spec
        return None


def _hook_loader(loader: object, name: str) -> None:
    """Let a loader apply the hooks once it has executed the module. It stays the same object, for tools that use it."""
    execute = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: object) -> None:
        del loader.exec_module  # type: ignore[attr-defined]  # uncovers the method of its class
        execute(module)
        try:
            from carpool_probe import torch_hooks

            os.environ.setdefault("PYTHONUSERBASE", USER_BASE)  # for child processes, such as those of torchrun
            torch_hooks.apply(name, module)
        except Exception:  # noqa: S110  # the training goes on without the numbers
            pass

    loader.exec_module = exec_module  # type: ignore[attr-defined]


MODULES = frozenset(
    (
        "torch",
        "torch.amp.grad_scaler",
        "torch.cuda.amp.grad_scaler",
        "torch.utils.data.dataloader",
        "torch.serialization",
        "torch.distributed.checkpoint.state_dict_saver",
        "safetensors.torch",
        "deepspeed.runtime.engine",
    )
)
"""Modules that `torch_hooks.apply` changes after they were imported."""


def start() -> None:
    """Install the import hook, once, in containers that have a file for the counters."""
    restore_user_site()
    if os.environ.get("CARPOOL_PROBE_FILE") and not any(isinstance(one, Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, Finder(MODULES))  # type: ignore[arg-type]


start()
