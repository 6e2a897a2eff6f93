"""Modules in `sys.modules` that have not run: they run, or only what is needed of them does, when a name is asked for.

A step beyond `importlib.util.LazyLoader`, which runs a module on the first look at it.
"""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast


class Postponed(ModuleType):
    """A module that has not run."""

    def __getattr__(self, name: str) -> Any:
        """Run the module, because nobody could tell what it would bind the name to."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)  # asked for by Python itself
        run(self)
        return getattr(sys.modules[self.__name__], name)  # a module may put another one in its place


class _Path(Sequence[str]):
    """Where the modules of a postponed package lie; looking there runs the package first, as importing one would."""

    def __init__(self, package: Postponed, places: Sequence[str]) -> None:
        self._package = package
        self._places = places

    def __getitem__(self, index: Any) -> Any:
        run(self._package)
        return self._places[index]

    def __len__(self) -> int:
        return len(self._places)


def run(module: ModuleType) -> None:
    """Run a postponed module; from then on it is a module like any other."""
    spec = module.__spec__
    if not isinstance(module, Postponed) or spec is None or spec.loader is None:
        return
    module.__class__ = ModuleType  # type: ignore[assignment]  # which is what it is meant to become
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations
    spec.loader.exec_module(module)


class Opened(Postponed):
    """A package whose `__init__` has not run, so that a module inside can be imported alone."""

    def __getattr__(self, name: str) -> Any:
        """Bind a name as the package's `__init__` would, by the one import that does so; run all of it where none is.

        Raises:
            AttributeError: The package has no such name.
        """
        spec = self.__spec__
        if spec is None or spec.origin is None:
            raise AttributeError(name)
        init = Path(spec.origin)
        constants = _constants(init)
        if name in constants:
            value: Any = constants[name]
        elif (source := _source(name, self.__name__, init)) is not None:
            module, original = source
            value = getattr(importlib.import_module(module), original)
        elif not name.startswith("_") and _spec(f"{self.__name__}.{name}") is not None:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            return super().__getattr__(name)
        setattr(self, name, value)
        return value


def postpone(name: str, given: Mapping[str, Any], alone: Sequence[str] = ()) -> None:
    """Postpone a module, unless it is imported already or missing.

    Args:
        name: The module; what it lies in is imported.
        given: What some of its names are answered with, without running it.
        alone: Modules of a package that are imported nevertheless, because they need nothing of it.
    """
    module = _put(name, Postponed)
    if module is not None:
        vars(module).update(given)
        for own in alone:
            importlib.import_module(f"{name}.{own}")
        if isinstance(module.__spec__, ModuleSpec) and module.__spec__.submodule_search_locations is not None:
            vars(module)["__path__"] = _Path(module, module.__spec__.submodule_search_locations)


class _Later(Loader):
    """Leaves a module in its place, not run."""

    def __init__(self, real: Loader, given: Mapping[str, Any], first: str | None) -> None:
        self._real = real
        self._given = given
        self._first = first

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Postponed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and isinstance(module, Postponed):
            spec.loader = module.__loader__ = self._real
            vars(module).update(self._given)
            if spec.submodule_search_locations is not None:
                vars(module)["__path__"] = _Path(module, spec.submodule_search_locations)
        if self._first is not None:
            importlib.import_module(self._first)


class Postponing(MetaPathFinder):
    """Postpones modules that are not imported yet, whenever they are, as long as the `with` block lasts.

    Unlike `postpone` it does not import what a module lies in, whose own import is what this may be meant to shorten.

    Args:
        given: Modules, and what some of their names are answered with, without running them.
        first: What some of them are the first to import of what is imported anyway, without which nothing else would
            find the order in which these import each other.
    """

    def __init__(self, given: Mapping[str, Mapping[str, Any]], first: Mapping[str, str]) -> None:
        self._given = given
        self._first = first

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the list where it lies; leave all others to those who find them otherwise."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._given else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader, self._given[fullname], self._first.get(fullname))
        return spec

    def __enter__(self) -> None:
        """Begin."""
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        """End; what was postponed stays so."""
        sys.meta_path.remove(self)


def open_package(name: str) -> None:
    """Open a package, unless it is imported already or missing."""
    _put(name, Opened)


def _put(name: str, kind: type[Postponed]) -> Postponed | None:
    spec = None if name in sys.modules else _spec(name)
    if spec is None:
        return None
    module: Any = importlib.util.module_from_spec(spec)
    module.__class__ = kind
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return cast("Postponed", module)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # what it lies in is missing
        return None


_QUOTED = re.compile(r'("""|\'\'\')[\s\S]*?\1')
_TOLD = re.compile(r"^(?:from\s+\S+\s+import\s+(?:\([^)]*\)|(?!\()).*|\w+\s*=\s*['\"\d-].*)$", re.MULTILINE)
"""What is read of an `__init__`: imports of names and plain constants that are not indented."""


@cache
def _body(init: Path) -> Sequence[ast.stmt]:
    """Parse what is read of an `__init__`: those of large libraries have hundreds of lines that are not."""
    text = init.read_text(encoding="utf-8")
    told = "\n".join(found.group() for found in _TOLD.finditer(_QUOTED.sub("''", text)))
    try:
        return ast.parse(told).body
    except SyntaxError:  # some statement is longer than it looks
        return ast.parse(text).body


def _constants(init: Path) -> dict[str, Any]:
    """Return the constants that a package's `__init__` spells out, such as `__version__`."""
    return {
        target.id: node.value.value
        for node in _body(init)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _source(name: str, package: str, init: Path) -> tuple[str, str] | None:
    """Return the module from which a package's `__init__` imports a name, and the name there."""
    starred = []
    for node in _body(init):
        if not isinstance(node, ast.ImportFrom):
            continue
        # The package's own `__init__` is the only file that is read, so that one dot means the package itself.
        own = f"{package}.{node.module}" if node.module else package
        module = own if node.level == 1 else node.module or package
        if module == package:
            continue  # what it imports from itself are its modules
        for alias in node.names:
            if alias.name == "*":
                starred.append(module)
            elif (alias.asname or alias.name) == name:
                return module, alias.name
    return next(((module, name) for module in starred if _binds(module, package, init, name)), None)


def _binds(module: str, package: str, init: Path, name: str) -> bool:
    """Whether a module of the package defines a name, by its text alone."""
    file = init.parent.joinpath(*module.removeprefix(f"{package}.").split(".")).with_suffix(".py")
    defined = rf"^(?:def |class )?{re.escape(name)}\b\s*(?:[:=(]|$)"
    return file.is_file() and re.search(defined, file.read_text(encoding="utf-8"), re.MULTILINE) is not None
