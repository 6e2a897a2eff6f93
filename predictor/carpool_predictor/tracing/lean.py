"""Imports PyTorch and the libraries of models without what a trace never runs, which is most of them.

`import timm` alone imports 90 families of models, torchvision with its data sets, and through them PyTorch's compiler
and SymPy: two thirds of the time from the command to the answer. For the process that traces one model and ends:

- Packages that are optional to all who import them here are *left out*, as where nobody installed them.
- Libraries of models are *opened*: the one module that defines the model is imported, not the others.
- Modules are *postponed* whose few names that are asked for have plain answers: where nothing is compiled, nothing need
  be kept from the compiler; where every size is a number, whether a symbol is known to be true is whether it is true.

What raises so, or finds something missing, is traced again with everything imported (`trace`), so that no measure here
costs an answer.
"""

import gc
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack
from urllib.parse import urlparse

from carpool_predictor.tracing.postponed import Postponing, open_package, postpone, run

_KERNELS = ("cuda.bindings", "pynvml", "triton")
"""What PyTorch uses on GPUs only."""
_OF_LIBRARIES = {
    "timm": ("huggingface_hub",),
    "transformers": ("jinja2", "scipy", "tokenizers"),
}
"""What libraries use to download weights, for texts as people write them, and for losses that nobody computes here."""
_TORCHVISION = ("torchvision", "torchvision.models", "torchvision.ops")
_OPENED = {
    "timm": (*_TORCHVISION, "timm", "timm.data", "timm.models"),
    "torchvision": _TORCHVISION,
    "transformers": (*_TORCHVISION, "transformers", "transformers.models"),
}
"""Parents before their children."""


def _undecorated(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Decorate nothing, with or without arguments."""
    return _undecorated if function is None else function


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


def _all(*conditions: bool) -> bool:
    return all(conditions)


def _any(*conditions: bool) -> bool:
    return any(conditions)


def _equal(one: Any, other: Any) -> bool:
    return tuple(one) == tuple(other) if isinstance(one, (tuple, list)) else bool(one == other)


class _Nobody:
    """A class that nothing is an instance of."""


class _NoError(Exception):
    """An error that nobody raises."""


_POSTPONED: dict[str, Mapping[str, Any]] = {
    "sympy": {"Basic": _Nobody},
    "torch.fx.experimental.symbolic_shapes": {
        "expect_true": bool, "free_unbacked_symbols": _nothing, "guard_int": int, "guard_or_false": bool,
        "guard_or_true": bool, "guard_size_oblivious": bool, "guarding_hint_or_throw": int,
        "has_free_unbacked_symbols": _no, "has_guarding_hint": _yes, "is_nested_int": _no,
        "statically_known_true": bool, "sym_and": _all, "sym_eq": _equal, "sym_or": _any,
    },
    "torch._dynamo": {
        "allow_in_graph": _undecorated, "assume_constant_result": _undecorated, "disable": _undecorated,
        "graph_break": _nothing,
    },
}  # fmt: skip
_HTTPX = {
    **dict.fromkeys(("AsyncClient", "Client", "Request", "Response"), _Nobody),
    **dict.fromkeys(("HTTPError", "NetworkError", "RemoteProtocolError", "TimeoutException"), _NoError),
}
"""What `transformers` would download with, by either of its names."""
_POSTPONED_OF_TRANSFORMERS: dict[str, Mapping[str, Any]] = {
    "httpx": _HTTPX, "httpx2": _HTTPX,
    "huggingface_hub._snapshot_download": {"snapshot_download": _nothing},
    "huggingface_hub.file_download": {
        "_CACHED_NO_EXIST": None, "REGEX_COMMIT_HASH": None, "hf_hub_download": _nothing, "hf_hub_url": _nothing,
        "try_to_load_from_cache": _nothing,
    },
    "huggingface_hub.hf_api": {"CommitOperationAdd": _Nobody, "HfApi": _Nobody},
    "huggingface_hub.repocard": {"ModelCard": _Nobody, "ModelCardData": _Nobody},
    "transformers.processing_utils": {"Unpack": Unpack},
    "transformers.safetensors_conversion": {"auto_conversion": _nothing},
}  # fmt: skip
"""What `transformers` imports beside, mostly to load weights from afar, which nobody does here."""
_OF_TORCH: Mapping[str, Mapping[str, Any]] = {
    "torch._export": {"wrappers": SimpleNamespace(allow_in_pre_dispatch_graph=_undecorated)},
    "asyncio": {"iscoroutinefunction": inspect.iscoroutinefunction},
    "torch._native": {}, "torch.distributions": {}, "torch.export": {},
    "torch.hub": {}, "torch.masked": {}, "torch.nn.intrinsic": {}, "torch.profiler": {}, "torch.quantization": {},
    "torch.utils.data": {},
}  # fmt: skip
"""What `import torch` imports itself, through its own modules or Python's, and a trace does not use."""
_OF_CATALOG: Mapping[str, Mapping[str, Any]] = {
    "torch.hub": {
        "HASH_REGEX": None, "_get_torch_home": str, "download_url_to_file": _nothing, "get_dir": str,
        "load_state_dict_from_url": _nothing, "tqdm": _Nobody, "urlparse": urlparse,
    },
}  # fmt: skip
"""What models of the catalog would load their weights with; a user's own code may really do so."""
_OF_TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "transformers.utils.auto_docstring": {
        **dict.fromkeys(
            ("ClassAttrs", "ClassDocstring", "ImageProcessorArgs", "ModelArgs", "ModelOutputArgs"), _Nobody
        ),
        **dict.fromkeys(("auto_class_docstring", "auto_docstring"), _undecorated),
        **dict.fromkeys(("get_args_doc_from_source", "parse_docstring", "set_min_indent"), _nothing),
    },
}
"""What writes the documentation of models as they are imported; for those of images it needs all tokenizers."""
_FIRST = {"torch.export": "torch.fx"}
_ALONE = {"torch._dynamo": ("config", "_trace_wrapped_higher_order_op")}
"""Modules that are needed of a postponed package, and need nothing of it."""


def prepare(model: str | None, family: str | None) -> None:
    """Import PyTorch, and make ready to import what a model needs.

    Args:
        model: A model of the catalog; None for code of the user's own, for which no library is opened.
        family: Module, within its library, that defines the model, where that is known.

    Raises:
        ModuleNotFoundError: There is no PyTorch.
    """
    gc.disable()  # what is imported is no garbage, and looking for some takes a tenth of the time
    catalog = {} if model is None else {**_OF_CATALOG, **_OF_TRANSFORMERS}
    with Postponing({**_OF_TORCH, **catalog}, _FIRST), _without_text():
        _import(model, family)
    gc.freeze()
    gc.enable()


@contextmanager
def _without_text() -> Iterator[None]:
    """Have Python say file and line of a call without the line's text, for which it looks for its module among all.

    PyTorch asks where each operator is defined that is written in Python, and keeps the line's number.
    """
    asked = inspect.getframeinfo
    inspect.getframeinfo = partial(asked, context=0)
    try:
        yield
    finally:
        inspect.getframeinfo = asked


def _import(model: str | None, family: str | None) -> None:
    left_out = [name for name in _KERNELS if name not in sys.modules]
    _leave_out(left_out)
    import torch.utils.flop_counter

    for name in left_out:
        del sys.modules[name]  # a model of the user's own may need them
    library = None if model is None else model.partition("/")[0]
    if model is not None and library is not None and _is_openable(library, family):
        _leave_out(_OF_LIBRARIES.get(library, ()))
        for package in _OPENED[library]:
            open_package(package)
        torch.distributed.is_available = _no
    for module, given in (_POSTPONED | (_POSTPONED_OF_TRANSFORMERS if library == "transformers" else {})).items():
        postpone(module, given, _ALONE.get(module, ()))
    if library == "transformers" and library in sys.modules:
        importlib.import_module("transformers.utils")  # here, where its own imports are postponed
    if model is not None and family is not None and library in ("timm", "torchvision") and library in sys.modules:
        _import_family(library, family, model)


def _import_family(library: str, family: str, model: str) -> None:
    module = importlib.import_module(f"{library}.models.{family}")
    if not hasattr(module, model.partition("/")[2]):
        # Another module of that name defines it, such as one of torchvision's models of video.
        for package in _OPENED[library]:
            run(sys.modules[package])


def _leave_out(names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None is what the import system takes for missing


def _is_openable(library: str, family: str | None) -> bool:
    """Whether one module is known to define the model."""
    if library not in _OPENED or library in sys.modules:
        return False
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return False
    return library == "transformers" or Path(spec.origin).with_name("models").joinpath(f"{family}.py").is_file()
