"""Cost of the step probe: a training on the CPU with and without its hooks, in turns, in one process."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

from carpool_probe import recorder, torch_hooks

from carpool_e2e.bench.measure import Figure, Section

WINDOWS, TURNS, STEPS, WARM_UP = 100, 8, 20, 4
"""Ratios; changes of the hooks for each of them; steps between two changes, and how many of them do not count."""
BATCH, WIDTH = 32, 200
"""Size of the training; a step takes about a millisecond of one core."""


def measure(report: Callable[[str], None]) -> Section:
    """Measure in this process; PyTorch is needed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps"
        file.write_bytes(recorder.header().ljust(recorder.SIZE, b"\0"))
        recorder.Recorder.__init__(recorder.recorder, str(file), time.monotonic_ns())
        ratios, step_ms = _ratios()
    cost, error = 100 * (fmean(ratios) - 1), 100 * stdev(ratios) / len(ratios) ** 0.5
    figures = [
        Figure("the step probe's share of a step", cost, "%", 1),
        Figure("its standard error", error, "%"),
        Figure("a step without it", step_ms, "ms"),
    ]
    for figure in figures:
        report(f"{figure.what}: {figure}")
    text = (
        f"CPU time of a small network's training with a data loader and two copies per step; hooks on and off in turns "
        f"of {STEPS} steps; the lower quartile of each, over {len(ratios)} windows."
    )
    return Section("Step probe", text, figures)


def _ratios() -> tuple[list[float], float]:
    """Return the CPU time of a step with the hooks over that without, for each window, and a step's time in ms."""
    import torch

    torch.set_num_threads(1)
    loader: Any = sys.modules["torch.utils.data.dataloader"]
    optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
    spots = [(torch.Tensor, "to"), (loader._BaseDataLoaderIter, "__next__")]
    own = [getattr(owner, name) for owner, name in spots]
    for name, module in (("torch", torch), ("torch.utils.data.dataloader", loader)):
        torch_hooks.apply(name, module)
    hooked = [getattr(owner, name) for owner, name in spots]
    step_hooks = dict(optimizers._global_optimizer_post_hooks)

    def switch(*, on: bool) -> None:
        for (owner, name), function in zip(spots, hooked if on else own, strict=True):
            setattr(owner, name, function)
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks.update(step_hooks if on else {})

    steps, ratios, alone_s = _steps(torch), [], []
    for _ in range(WINDOWS):
        took: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * TURNS):
            on = turn % 4 in (0, 3)
            switch(on=on)
            took[on] += [next(steps) for _ in range(STEPS)][WARM_UP:]
        with_s, without_s = (quantiles(took[on])[0] for on in (True, False))
        ratios.append(with_s / without_s)
        alone_s.append(without_s)
    switch(on=False)
    return ratios, 1e3 * median(alone_s)


def _steps(torch: Any) -> Iterator[float]:
    """Train without end; yield the CPU seconds of each step."""
    inputs, targets = torch.randn(64 * BATCH, WIDTH), torch.randn(64 * BATCH, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    while True:
        began = time.thread_time()
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x.to("cpu")), y.to("cpu")).backward()
            optimizer.step()
            yield time.thread_time() - began
            began = time.thread_time()
