"""A training job for the profiler: `python -m carpool_predictor.profiler.worker`. Imports PyTorch and needs a GPU.

Protocol, one JSON object per line. In: a `Task`, then any number of `{"seconds": 1.0}`. Out: `Ready` after warm-up, a
`Window` after each run; `OutOfMemory` or `Failed` ends the process. PyTorch is imported before the task is read, so
that a process in reserve starts quickly.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import torch
from carpool_core.resources.job import CatalogModel
from carpool_core.values import MIB, Optimizer, Precision
from torch import Tensor, nn

from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.profiler.machine import Failed, OutOfMemory, Ready, Reply, Window, Workload

WARM_UP_STEPS = 5
WARM_UP_S = 0.5

_OPTIMIZERS: dict[Optimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    Optimizer.SGD: (torch.optim.SGD, {}),
    Optimizer.SGD_MOMENTUM: (torch.optim.SGD, {"momentum": 0.9}),
    Optimizer.ADAM: (torch.optim.Adam, {}),
    Optimizer.ADAMW: (torch.optim.AdamW, {}),
    Optimizer.ADAGRAD: (torch.optim.Adagrad, {}),
    Optimizer.RMSPROP: (torch.optim.RMSprop, {}),
}
_AUTOCAST = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, and environment variables that must be set before CUDA starts."""

    workload: Workload
    environment: dict[str, str] = {}


class Run(msgspec.Struct, frozen=True):
    """A request to train for some seconds."""

    seconds: float


def _losses(output: Any) -> Iterator[Tensor]:
    """Yield a loss for each floating-point tensor of a model's output, as the tracer does."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.float().mean()
    elif isinstance(output, dict):
        for value in output.values():
            yield from _losses(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _losses(value)


class Training:
    """A model on the GPU."""

    def __init__(self, workload: Workload) -> None:
        recipe = recipe_of(CatalogModel(name=workload.model))
        dtype = torch.bfloat16 if workload.precision is Precision.BF16 else torch.float32
        self._model: nn.Module = recipe.build().to(device="cuda", dtype=dtype).train()
        kind, options = _OPTIMIZERS[workload.optimizer]
        self._optimizer = kind(self._model.parameters(), lr=1e-3, **options)  # type: ignore[call-arg]
        self._autocast = _AUTOCAST.get(workload.precision)
        self._scaler = torch.amp.GradScaler("cuda", enabled=workload.precision is Precision.FP16_MIXED)
        self._inputs = torch.randn(workload.batch_size, *recipe.input_shape, device="cuda", dtype=dtype)

    def step(self) -> None:
        """Run forward, backward and update; the GPU may still be busy when it returns."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._autocast is not None:
            context = torch.autocast("cuda", dtype=self._autocast)
        with context:
            loss = sum(_losses(self._model(self._inputs)), start=torch.zeros((), device="cuda"))
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def warm_up(self) -> None:
        """Run steps until libraries have chosen their algorithms and clocks have risen."""
        end = time.monotonic() + WARM_UP_S
        steps = 0
        while steps < WARM_UP_STEPS or time.monotonic() < end:
            self.step()
            torch.cuda.synchronize()
            steps += 1

    def run(self, seconds: float) -> Window:
        """Train for some seconds; the CPU runs one step ahead of the GPU."""
        begin = time.monotonic()
        marks = [self._mark()]
        while time.monotonic() < begin + seconds:
            self.step()
            marks.append(self._mark())
            marks[-2].synchronize()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
        return Window(
            steps=len(times),
            step_time_s=median(times),
            peak_allocated_mib=torch.cuda.max_memory_allocated() / MIB,
            peak_reserved_mib=torch.cuda.max_memory_reserved() / MIB,
        )

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def replies(lines: Iterator[bytes]) -> Iterator[Reply]:
    """Answer requests until the input ends or one fails."""
    try:
        task = msgspec.json.decode(next(lines), type=Task)
        os.environ.update(task.environment)
        training = Training(task.workload)
        training.warm_up()
        yield Ready()
        for line in lines:
            yield training.run(msgspec.json.decode(line, type=Run).seconds)
    except torch.OutOfMemoryError:
        yield OutOfMemory()
    except Exception as e:
        # Any error of the model or the driver is recorded in the row.
        yield Failed(f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300] if str(e).strip() else 'no message'}")


def main() -> None:
    """Serve the parent on stdin and stdout; the output of models goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for reply in replies(iter(sys.stdin.buffer.readline, b"")):
        out.write(msgspec.json.encode(reply) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
