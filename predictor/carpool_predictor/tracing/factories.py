"""A function of the user's own that returns a model, found in a Python file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from carpool_predictor.catalog.recipes import Recipe
from carpool_predictor.features.abstention import TraceError
from carpool_predictor.tracing.explaining import explained
from carpool_predictor.tracing.requests import FactoryModel


def factory_recipe(factory: FactoryModel) -> Recipe:
    """Load the factory's file; the function runs later, when weights are fake.

    Raises:
        TraceError: There is no such function, it needs arguments, or its file cannot be imported.
    """
    path = Path(factory.path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise TraceError("FactoryFailed", f"expected a Python file, found {factory.path!r}")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    explained(f"{factory.path} failed on import", lambda: loader.exec_module(module), path)
    function = getattr(module, factory.function, None)
    if not callable(function):
        raise TraceError("FactoryFailed", f"{factory.path} has no function {factory.function!r}")
    if isinstance(function, nn.Module):
        raise TraceError(
            "FactoryFailed",
            f"expected a function that returns the model, found {factory.function} in {factory.path}, which is a model "
            "already; name a function that builds it",
        )
    _check_arguments(function, factory.function)

    def build() -> nn.Module:
        model = function()
        if not isinstance(model, nn.Module):
            raise TraceError(
                "FactoryFailed",
                f"{factory.function} in {factory.path} returned {type(model).__name__}; expected an nn.Module",
            )
        return model

    return Recipe(f"{path.stem}:{factory.function}", build, tuple(factory.input), file=path)


def _check_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # written in C; calling it will tell
    try:
        signature.bind()
    except TypeError as e:
        raise TraceError(
            "FactoryFailed",
            f"expected a function without arguments, found {name}{signature}; give its arguments defaults, or name a "
            "function that calls it with them",
        ) from e
