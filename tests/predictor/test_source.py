"""Where features come from, and a tracing process that misbehaves in every way we could think of."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from carpool_core.resources.features import ModelFeatures, TracedStep
from carpool_core.resources.job import CatalogModel, GraphLayer, GraphModel, ModelSource, Training
from carpool_predictor.features import Abstention
from carpool_predictor.tracing.source import (
    FactoryModel,
    SubprocessTracer,
    TraceLimits,
    TraceRequest,
    features_of,
    input_digest,
    untraceable,
)

FEATURES = ModelFeatures(
    name="given",
    parameters=1,
    trainable_parameters=1,
    parameter_bytes=4,
    steps=[TracedStep(batch_size=1, peak_bytes=4, activation_bytes=0, flops=1, bytes_moved=1, kernels=1)],
)
CATALOG = ModelSource(catalog=CatalogModel(name="timm/resnet18"))


class KnownTracer:
    """Answers from a table and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[ModelSource] = []

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        self.asked.append(model)
        return FEATURES


@pytest.mark.parametrize("model", [None, ModelSource()])
async def test_an_unknown_model_is_abstained_from(model: ModelSource | None) -> None:
    tracer = KnownTracer()
    found = await features_of(model, Training(), tracer)
    assert isinstance(found, Abstention)
    assert found.reason == "UnknownModel"
    assert tracer.asked == []


async def test_given_features_are_not_traced() -> None:
    tracer = KnownTracer()
    assert await features_of(ModelSource(features=FEATURES), Training(), tracer) is FEATURES
    assert tracer.asked == []


async def test_a_catalog_model_is_traced() -> None:
    tracer = KnownTracer()
    assert await features_of(CATALOG, Training(), tracer) is FEATURES
    assert tracer.asked == [CATALOG]


def test_digest_changes_with_what_it_is_of() -> None:
    digest = input_digest(CATALOG, Training())
    assert digest == input_digest(ModelSource(catalog=CatalogModel(name="timm/resnet18")), Training())
    assert digest == input_digest(CATALOG, Training(steps=1000)), "a step is the same, whatever their number"
    assert digest != input_digest(CATALOG, Training(batch_size=31))
    assert digest != input_digest(None, Training())
    assert len(digest) <= 128


def child(body: str, tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text(f"import os, sys, time\n{body}\n")
    return (sys.executable, str(script))


async def ask(command: tuple[str, ...], timeout_s: float = 20) -> ModelFeatures | Abstention:
    tracer = SubprocessTracer(TraceLimits(timeout_s=timeout_s), command=command, known=lambda *_: None)
    return await tracer.trace(CATALOG, Training())


ENDLESS = "while True: pass"
MISBEHAVIOUR = [
    pytest.param("os.kill(os.getpid(), 9)", "TraceOutOfMemory", "limit 3,072 MiB", id="killed by the kernel"),
    pytest.param("sys.exit('threw std::bad_alloc')", "TraceOutOfMemory", "--trace-memory", id="bad_alloc"),
    pytest.param("sys.exit('something broke')", "TraceFailed", "ended with code 1: something broke", id="traceback"),
    pytest.param("sys.stdin.read()", "TraceFailed", "ended with code 0: it said nothing", id="says nothing"),
    pytest.param("print('{\"features\": 3}')", "TraceFailed", "code 0", id="answers nonsense"),
    pytest.param("print('{}')", "TraceFailed", "empty answer", id="answers nothing"),
    pytest.param("sys.stderr.write('x' * 10_000_000 + '\\nlast words'); sys.exit(3)", "TraceFailed", "last words",
                 id="talks without end"),
    pytest.param("os.close(0); sys.exit(4)", "TraceFailed", "code 4", id="does not listen"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "reason", "word"), MISBEHAVIOUR)
async def test_a_misbehaving_trace_is_an_abstention(body: str, reason: str, word: str, tmp_path: Path) -> None:
    found = await ask(child(body, tmp_path))
    assert isinstance(found, Abstention)
    assert found.reason == reason
    assert word in found.message


async def test_a_trace_that_never_ends_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"child = os.fork()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n{ENDLESS}"
    found = await ask(child(body, tmp_path), timeout_s=1)
    assert isinstance(found, Abstention)
    assert found.reason == "TraceTimedOut"
    assert "longer than 1 s" in found.message
    assert "(--trace-timeout, or settings.traceTimeoutSeconds of" in found.message
    async with asyncio.timeout(20):  # a killed process is gone a moment after the signal
        while any(_runs(int(pid)) for pid in pids.read_text().split()):  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an orphan that was killed may still wait for init to collect it


async def test_cancelling_kills_the_trace(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    draft = str(pid_file) + "~"
    body = f"open({draft!r}, 'w').write(str(os.getpid()))\nos.rename({draft!r}, {str(pid_file)!r})\n"
    task = asyncio.create_task(ask(child(body + ENDLESS, tmp_path)))
    async with asyncio.timeout(20):
        while not pid_file.exists():  # noqa: ASYNC110  (another process writes it; there is no event to wait for)
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _runs(int(pid_file.read_text()))


async def test_the_wait_for_other_traces_is_no_time_of_a_trace(tmp_path: Path) -> None:
    """Regression: of rows that were traced one after the other each counted those before it, too."""
    looks = itertools.count()
    tracer = SubprocessTracer(command=child("print('{}')", tmp_path), seconds=lambda: float(next(looks)))
    request = TraceRequest(factory=FactoryModel(path="x.py", function="f", input=[3]), training=Training())
    found = await asyncio.gather(*(tracer.timed(request) for _ in range(4)))
    # Each looks before and after, and while the first is traced the three others look, too, as they arrive.
    assert [took for _, took in found] == [4, 1, 1, 1]


async def test_answers_pass_through(tmp_path: Path) -> None:
    answer = msgspec.json.encode({"features": FEATURES}).decode()
    assert await ask(child(f"print({answer!r})", tmp_path)) == FEATURES


async def test_the_child_is_told_the_limit_and_the_model(tmp_path: Path) -> None:
    seen = tmp_path / "request"
    await ask(child(f"open({str(seen)!r}, 'w').write(sys.stdin.read())", tmp_path))
    request = json.loads(seen.read_text())
    assert request["memory_mib"] == 3072
    assert request["model"]["catalog"]["name"] == "timm/resnet18"


async def test_the_child_sees_no_gpu_and_no_hub(tmp_path: Path) -> None:
    seen = tmp_path / "environment"
    await ask(child(f"open({str(seen)!r}, 'w').write(repr(dict(os.environ)))", tmp_path))
    assert "'CUDA_VISIBLE_DEVICES': ''" in seen.read_text()
    assert "'HF_HUB_OFFLINE': '1'" in seen.read_text()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(None, ["carpool[trace]"], id="an inline graph"),
        pytest.param(CatalogModel(name="timm/resnet50", num_classes=7), ["carpool[trace]"], id="a known name"),
        pytest.param(CatalogModel(name="timm/resnet5o"), ["timm/resnet50", "carpool[trace]"], id="a typing error"),
        pytest.param(CatalogModel(name="timm/qqqqqqqqq"), ["no name is near", "carpool[trace]"], id="nothing like it"),
    ],
)
def test_without_torch_the_nearest_stored_names_are_told(model: CatalogModel | None, words: list[str]) -> None:
    found = untraceable(model)
    assert found.reason == "TorchMissing"
    assert all(word in found.message for word in words)


async def test_memory_is_limited_before_anything_is_built(tmp_path: Path) -> None:
    body = "from carpool_predictor.trace import limit_memory\nlimit_memory(200)\nbytearray(300 << 20)"
    found = await ask(child(body, tmp_path))
    assert isinstance(found, Abstention)
    assert found.reason == "TraceOutOfMemory"


FACTORY = """
import torch
from torch import nn

def small():
    print("a factory may print")
    return nn.Linear(4, 4)

def greedy():
    return nn.Linear(4, bytearray(8 << 30)[0])

def empty():
    return 3
"""


@pytest.fixture(scope="module")
def real_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFeatures | Abstention]:
    """Ask the real subprocess, two at a time: each start takes PyTorch's import."""
    file = tmp_path_factory.mktemp("factory") / "mine.py"
    file.write_text(FACTORY)
    training = Training(batch_size=8)
    requests = {
        name: TraceRequest(factory=FactoryModel(path=str(file), function=name, input=[4]), training=training)
        for name in ("small", "greedy")
    }
    layers = [GraphLayer(kind="Flatten"), GraphLayer(kind="Linear", out=3)]
    requests["graph"] = TraceRequest(
        model=ModelSource(graph=GraphModel(input=[3, 4, 4], layers=layers)), training=training
    )

    async def all_of_them() -> list[ModelFeatures | Abstention]:
        tracer = SubprocessTracer(TraceLimits(timeout_s=200, memory_mib=2048, concurrency=2), known=lambda *_: None)
        return await asyncio.gather(*(tracer.run(request) for request in requests.values()))

    return dict(zip(requests, asyncio.run(all_of_them()), strict=True))


def test_a_real_factory_is_traced(real_answers: dict[str, ModelFeatures | Abstention]) -> None:
    found = real_answers["small"]
    assert isinstance(found, ModelFeatures), found
    assert (found.name, found.parameters) == ("mine:small", 20)


def test_a_real_factory_that_takes_too_much_memory_is_stopped(
    real_answers: dict[str, ModelFeatures | Abstention],
) -> None:
    found = real_answers["greedy"]
    assert isinstance(found, Abstention)
    assert found.reason == "TraceOutOfMemory"
    assert "2,048 MiB" in found.message


def test_a_real_inline_graph_is_traced(real_answers: dict[str, ModelFeatures | Abstention]) -> None:
    found = real_answers["graph"]
    assert isinstance(found, ModelFeatures), found
    assert found.parameters == 48 * 3 + 3
    assert [step.batch_size for step in found.steps] == [4, 8]


@pytest.mark.parametrize("module", ["predict", "tracing.source", "cli"])
def test_the_operator_needs_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, carpool_predictor.{module}; sys.exit(bool({{'torch', 'numpy', 'timm'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_trace_is_left_running() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    assert not [pid for pid, command in commands.items() if b"carpool_predictor.trace" in command]
