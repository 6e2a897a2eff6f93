"""Trains in one process, and prints as JSON by how much each part raised the probe's counters."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from carpool_probe.recorder import FIELDS, recorder
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
found: dict[str, dict[str, int]] = {}


@contextmanager
def part(name: str) -> Iterator[None]:
    before = recorder.counters()
    yield
    grown = (new - old for new, old in zip(recorder.counters(), before, strict=True))
    found[name] = dict(zip(FIELDS[3:-1], grown, strict=True))


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters())


def train(model, *optimizers, steps: int, accumulate: int = 1) -> None:
    for _ in range(steps):
        for _ in range(accumulate):
            model(torch.ones(8, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


model, optimizer = network()
with part("loader"):
    for (batch,) in DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
with part("accumulation"):
    train(model, optimizer, steps=3, accumulate=4)
with part("gan"):
    # It keeps both until the end: the probe takes an optimizer that gets the identity of a deleted one for the same.
    pair = torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())
    train(model, *pair, steps=6)
with part("critic"):  # a discriminator that steps five times for each step of the generator
    critic, generator = torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())
    for _ in range(2):
        train(model, *[critic] * 5, generator, steps=1)
with part("scaler"):
    scaler = torch.amp.GradScaler("cpu")
    for scale in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 4)).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
with part("compiled"):
    train(torch.compile(model, fullgraph=True, backend="eager"), optimizer, steps=4)
with part("compiled copy"):
    compiled = torch.compile(lambda x: model(x.to(torch.float32)).sum(), fullgraph=True, backend="eager")
    compiled(torch.ones(8, 4).half())
with part("copy"):
    torch.ones(4).to("meta")
    torch.ones(4).to(torch.float16)
with part("checkpoint"):
    torch.save(model.state_dict(), "checkpoint.pt")
print(json.dumps(found))
