"""A training job of the profiler, in a process of its own. Imports PyTorch and needs a GPU.

The process receives the workload with environment variables, then the seconds of each run. It sends `Ready` after the
warm-up and a `Window` after each run; `Failed` ends the job.
"""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from carpool_core.resources.job import CatalogModel
from carpool_core.values import MIB, Precision
from torch import nn

from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.profiler.machine import Failed, Ready, Reply, Window, Workload
from carpool_predictor.tracing.step import AUTOCAST, OPTIMIZERS, losses, weight_dtype

WARM_UP_STEPS = 5
WARM_UP_S = 0.5
TOKENS = 1000
"""Different token ids of the inputs; every vocabulary has more."""


class Training:
    """A model on the GPU."""

    def __init__(self, workload: Workload) -> None:
        recipe = recipe_of(CatalogModel(name=workload.model))
        dtype = weight_dtype(workload.precision) or torch.float32
        with torch.device("cuda"):  # the processor would take seconds for the weights of a group
            self._model: nn.Module = recipe.build()
        self._model.to(device="cuda", dtype=dtype).train()
        torch.cuda.empty_cache()
        self._optimizer = OPTIMIZERS[workload.optimizer](self._model.parameters(), lr=1e-3)
        self._autocast = AUTOCAST.get(workload.precision)
        self._scaler = torch.amp.GradScaler("cuda", enabled=workload.precision is Precision.FP16_MIXED)
        shape = (workload.batch_size, *recipe.input_shape)
        self._inputs = (
            torch.randint(TOKENS, shape, device="cuda")
            if recipe.tokens
            else torch.randn(shape, device="cuda", dtype=dtype)
        )
        self._is_cast = workload.precision is Precision.BF16

    def step(self) -> None:
        """Run forward, backward and update; the GPU may still be busy when it returns."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._autocast is not None:
            context = torch.autocast("cuda", dtype=self._autocast)
        with context:
            found = losses(self._model(self._inputs), is_cast=self._is_cast)
            loss = sum(found, start=torch.zeros((), device="cuda"))
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


def replies(workload: Workload, runs: Iterator[float]) -> Iterator[Reply]:
    """Train for the seconds of each run, and yield replies until the runs end or one fails."""
    try:
        training = Training(workload)
        training.warm_up()
        yield Ready()
        for seconds in runs:
            yield training.run(seconds)
    except EOFError:
        return  # the profiler ended
    except torch.OutOfMemoryError:
        yield Failed(status="out_of_memory")
    except Exception as e:
        # Any error of the model or the driver is recorded in the row.
        yield Failed(f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:300]}")


def serve(connection: Connection) -> None:
    """Receive a job on a pipe, train it and send replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the profiler ends its workers
    warnings.simplefilter("ignore")
    workload, environment = connection.recv()
    os.environ.update(environment)  # before CUDA starts
    for reply in replies(workload, iter(connection.recv, None)):
        connection.send(reply)
