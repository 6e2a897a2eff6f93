"""Measures what people train on this machine's GPU, with the libraries that they use, in a process for each case.

Models come from the catalog with random weights, adapters from `peft`, optimizers from PyTorch, Adafactor from
`transformers`. A causal language model computes its own loss, and one with an adapter runs under autocast, as in
`transformers.Trainer`. Needs a GPU, transformers, timm, torchvision and peft.
"""

import csv
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from carpool_core.values import MIB, Optimizer, Precision
from carpool_predictor.catalog.recipes import recipe_of

from carpool_research.published import Case, read_cases

WARM_UP_STEPS, STEPS = 2, 4
LONGEST_S = 60.0
"""Longest time of one case."""
TOKENS = 1000
"""Different token ids of the inputs."""
KINDS = ("allocated", "reserved", "process")
_CONTEXT = multiprocessing.get_context("forkserver")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks of one case in MiB, and its median step time in seconds."""

    allocated: float
    reserved: float
    process: float
    """Memory in use on the GPU, less that before the process began."""
    step_time_s: float
    gpu: str
    torch: str


def training_step(case: Case, device: str = "cuda") -> Callable[[], None]:
    """Build a case's model and optimizer; return a function that makes a step with all its passes.

    Raises:
        TraceError: The catalog does not have the model.
        ValueError: The case names no model.
    """
    import torch
    from carpool_predictor.tracing.step import AUTOCAST, losses

    if case.model is None:
        raise ValueError(f"expected case {case.name} to name a model, found none")
    recipe, training = recipe_of(case.model), case.training
    dtype = torch.bfloat16 if training.precision is Precision.BF16 else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = _adapted(recipe.build().to(dtype), case).train()
    torch.set_default_dtype(torch.float32)
    causal = _causal_language_model(model)
    optimizer = _optimizer(case, [weight for weight in model.parameters() if weight.requires_grad])
    shape = (training.batch_size, *recipe.input_shape)
    inputs = torch.randint(TOKENS, shape) if recipe.tokens else torch.randn(shape, dtype=dtype)
    inputs = inputs.to(device)
    cast = torch.bfloat16 if training.adapter else AUTOCAST.get(training.precision)
    scaler = torch.amp.GradScaler(device, enabled=training.precision is Precision.FP16_MIXED)

    def loss() -> Any:
        if causal is not None:
            return causal(input_ids=inputs, labels=inputs, use_cache=False).loss
        found = losses(model(inputs), is_cast=dtype is torch.bfloat16)
        return sum(found, start=torch.zeros((), device=device))

    def step() -> None:
        for _ in range(training.gradient_accumulation):
            with torch.autocast(device, dtype=cast or torch.bfloat16, enabled=cast is not None):
                found = loss()
            scaler.scale(found / training.gradient_accumulation).backward()
            del found
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _adapted(model: Any, case: Case) -> Any:
    """Switch activation checkpointing on, and add the adapter."""
    training, inner = case.training, _transformers_model(model)
    if training.activation_checkpointing:
        from torch.utils.checkpoint import noop_context_fn

        model.set_grad_checkpointing(True, *([] if inner is model else [noop_context_fn]))
    if training.adapter is None:
        return model
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    adapter, targets = training.adapter, list(training.adapter.targets)
    wanted = targets if targets and targets != ["all-linear"] else "all-linear"
    adapted = get_peft_model(inner, LoraConfig(r=adapter.rank, target_modules=wanted, lora_dropout=adapter.dropout))
    if training.activation_checkpointing:
        adapted.enable_input_require_grads()
    return adapted


def _transformers_model(model: Any) -> Any:
    """Return the model of `transformers` that the catalog has wrapped, or the model itself."""
    from carpool_predictor.catalog.hub_models import HubModel

    return model.model if isinstance(model, HubModel) else model


def _causal_language_model(model: Any) -> Any:
    """Return what computes the loss of a causal language model, with its adapter; None for other models."""
    inner = _transformers_model(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return inner if "CausalLM" in type(base).__name__ or "LMHead" in type(base).__name__ else None


def _optimizer(case: Case, weights: Sequence[Any]) -> Any:
    if case.training.optimizer is Optimizer.ADAFACTOR:
        from transformers.optimization import Adafactor

        return Adafactor(weights, lr=1e-4, scale_parameter=False, relative_step=False)
    from carpool_predictor.tracing.step import OPTIMIZERS

    return OPTIMIZERS[case.training.optimizer](weights, lr=1e-4)


def measure(case: Case) -> Measured:
    """Train some steps on the first GPU, which must be idle."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.training.precision is Precision.TF32
    step = training_step(case)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARM_UP_STEPS + STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return Measured(
        allocated=torch.cuda.max_memory_allocated() / MIB,
        reserved=torch.cuda.max_memory_reserved() / MIB,
        process=(pynvml.nvmlDeviceGetMemoryInfo(handle).used - before) / MIB,
        step_time_s=median(times[WARM_UP_STEPS:]),
        gpu=torch.cuda.get_device_name(0),
        torch=torch.__version__,
    )


def _work(connection: Connection, case: Case) -> None:
    warnings.simplefilter("ignore")
    try:
        connection.send(measure(case))
    except Exception as e:  # whatever a library raises becomes the row's reason
        connection.send(f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:300]}")


def answers(
    cases: Sequence[Case], work: Callable[[Connection, Case], None] = _work
) -> Iterator[tuple[Case, Measured | str]]:
    """Yield what each case measured, or why it failed."""
    _CONTEXT.set_forkserver_preload(["torch", "transformers", "timm"])
    for case in cases:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=work, args=(theirs, case))
        process.start()
        theirs.close()
        try:
            answer = ours.recv() if ours.poll(LONGEST_S) else f"no answer within {LONGEST_S:g} s"
        except EOFError:
            process.join()
            answer = f"the process ended with code {process.exitcode}"
        process.kill()
        process.join()
        yield case, answer


@click.command(short_help="Measure cases of training on this machine's GPU.")
@click.argument("cases", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File of rows: one for each kind of peak.")
@click.option("--budget", type=float, default=600.0, show_default=True, help="Seconds after which no case begins.")
def finetuning(cases: Path, out: Path, budget: float) -> None:
    """Measure cases of training on this machine's GPU; CASES has the columns of `research/data/published.csv`.

    A case with several rows, as in this command's own file, is measured once.
    """
    with cases.open(newline="", encoding="utf-8") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    end = time.monotonic() + budget
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, next(iter(rows.values())).keys(), lineterminator="\n")
        writer.writeheader()
        for case, answer in answers(list({case.name: case for case in read_cases(cases)}.values())):
            writer.writerows(_rows(rows[case.name], answer))
            file.flush()
            click.echo(f"{case.name}: {answer}")
            if time.monotonic() > end:
                click.echo(f"the rest does not fit into {budget:g} s")
                return


def _rows(row: dict[str, str], answer: Measured | str) -> Iterator[dict[str, str]]:
    if isinstance(answer, str):
        yield row | {"excluded": answer}
        return
    for kind in KINDS:
        own = {"kind": kind, "memory_mib": f"{getattr(answer, kind):.0f}"}
        time_s = f"{answer.step_time_s:.4g}" if kind == "process" else ""
        yield row | own | {"step_time_s": time_s, "gpu": answer.gpu, "note": f"torch {answer.torch}"}
