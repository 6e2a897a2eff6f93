"""Starts the probe where PYTHONPATH names this file's directory, then runs the image's own `sitecustomize`."""

import os
import sys

_directory = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _directory]
sys.path.append(os.path.join(os.path.dirname(_directory), "python"))

from importlib.machinery import PathFinder  # noqa: E402

import carpool_probe.start  # noqa: E402, F401

_own = PathFinder.find_spec("sitecustomize")
if _own is not None and _own.loader is not None:
    __file__ = _own.origin or __file__
    exec(_own.loader.get_code("sitecustomize"), globals())  # type: ignore[attr-defined]  # noqa: S102
