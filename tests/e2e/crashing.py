"""Runs a Carpool process that ends as by `kill -9` at a chosen call, once.

    python tests/e2e/crashing.py --at carpool_core.kube.client:KubeClient.create --when after --matching Pod \
        --not-matching "'is_dry_run': True" --once FILE -- operator

The process is the real one; only the one method is wrapped. FILE is created just before the end, so that the process,
started again by the same command, lives.
"""

import argparse
import functools
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", required=True, help="MODULE:CLASS.METHOD, an asynchronous method")
    parser.add_argument("--when", choices=("before", "after"), default="before")
    parser.add_argument("--matching", default="", help="only when the call's arguments contain this")
    parser.add_argument("--not-matching", default="", help="only when they do not contain this")
    parser.add_argument("--once", type=Path, required=True, help="file that is created at the end")
    parser.add_argument("command", nargs="+", help="arguments of `carpool`")
    return parser.parse_args(argv)


def sabotage(target: str, *, when: str, matching: str, not_matching: str, once: Path) -> None:
    """Wrap a method so that the process ends at its next matching call.

    Args:
        target: `MODULE:CLASS.METHOD`.
        when: `before` the call, or `after` it has succeeded.
        matching: Text that the call's arguments must contain; any call when empty.
        not_matching: Text that they must not contain; none when empty.
        once: File that marks that it happened.
    """
    module, path = target.split(":")
    class_name, method_name = path.split(".")
    owner = getattr(importlib.import_module(module), class_name)
    method: Callable[..., Awaitable[Any]] = getattr(owner, method_name)
    if not inspect.iscoroutinefunction(method):
        raise TypeError(f"expected an asynchronous method, found {target}")

    @functools.wraps(method)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = f"{args} {kwargs}"
        is_other = matching not in call or (not_matching != "" and not_matching in call)
        is_meant = not is_other and not _happened(once)
        if is_meant and when == "before":
            end(once)
        result = await method(*args, **kwargs)
        if is_meant:
            end(once)
        return result

    setattr(owner, method_name, wrapped)


def _happened(once: Path) -> bool:
    return once.exists()


def end(once: Path) -> None:
    """End this process as `kill -9` does: nothing is flushed or closed."""
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Sabotage, then be `carpool`."""
    args = _arguments(sys.argv[1:])
    sabotage(args.at, when=args.when, matching=args.matching, not_matching=args.not_matching, once=args.once)
    sys.argv = ["carpool", *args.command]
    importlib.import_module("carpool_core.cli").main()


if __name__ == "__main__":
    main()
