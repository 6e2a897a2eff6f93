"""Sources of features, and tracing processes that misbehave."""

import asyncio
import itertools
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from carpool_core.resources.features import ModelFeatures, TracedStep
from carpool_core.resources.job import CatalogModel, GraphLayer, GraphModel, ModelSource, Training
from carpool_core.values import Optimizer
from carpool_predictor.catalog import store
from carpool_predictor.catalog.names import refusal_of
from carpool_predictor.features import Abstention, Sample
from carpool_predictor.tracing.process import FactoryModel, TraceLimits, TraceRequest
from carpool_predictor.tracing.source import SubprocessTracer, features_of, input_digest, untraceable

FEATURES = ModelFeatures(
    name="given",
    parameters=1,
    trainable_parameters=1,
    parameter_bytes=4,
    steps=[TracedStep(batch_size=1, peak_bytes=4, activation_bytes=0, flops=1, bytes_moved=1, kernels=1)],
)
PARTS = {"model": ModelSource, "training": Training}
CATALOG = ModelSource(catalog=CatalogModel(name="timm/resnet18"))


class KnownTracer:
    """Returns fixed features, and records requests."""

    def __init__(self) -> None:
        self.asked: list[ModelSource] = []

    async def trace(self, model: ModelSource, training: Training) -> ModelFeatures | Abstention:
        self.asked.append(model)
        return FEATURES


@pytest.mark.parametrize(
    ("model", "is_known", "traced"),
    [
        pytest.param(None, False, [], id="no model"),
        pytest.param(ModelSource(), False, [], id="empty"),
        pytest.param(ModelSource(features=FEATURES), True, [], id="features are given"),
        pytest.param(CATALOG, True, [CATALOG], id="catalog"),
    ],
)
async def test_only_catalog_models_are_traced(
    model: ModelSource | None, is_known: bool, traced: list[ModelSource]
) -> None:
    tracer = KnownTracer()
    found = await features_of(model, Training(), tracer)
    assert found is FEATURES if is_known else isinstance(found, Abstention) and found.reason == "UnknownModel"
    assert tracer.asked == traced


def test_the_digest_changes_with_model_and_training() -> None:
    digest = input_digest(CATALOG, Training())
    assert digest == input_digest(ModelSource(catalog=CatalogModel(name="timm/resnet18")), Training())
    assert digest == input_digest(CATALOG, Training(steps=1000)), "a step is the same, whatever their number"
    assert digest != input_digest(CATALOG, Training(batch_size=31))
    assert digest != input_digest(None, Training())
    assert len(digest) <= 128


class InstantTrace:
    """A trace that answers at once, without a process."""

    def __init__(self, request: TraceRequest, limits: TraceLimits) -> None:
        self.request, self.limits = request, limits

    def answer(self) -> ModelFeatures | Abstention:
        return FEATURES

    def kill(self) -> None:
        raise AssertionError("nothing to end")


def no_process(request: TraceRequest, limits: TraceLimits) -> InstantTrace:
    raise AssertionError(f"expected no trace of {request}")


async def ask(tmp_path: Path, body: str, **limits: float) -> ModelFeatures | Abstention:
    """Trace a factory whose body is given; it returns nn.Linear(4, 4) where the body does not end it."""
    file = tmp_path / "mine.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    file.write_text(f"import os, sys, time\nfrom torch import nn\n\ndef build():\n{lines}    return nn.Linear(4, 4)\n")
    tracer = SubprocessTracer(TraceLimits(**{"timeout_s": 60, "memory_mib": 3072, **limits}))  # type: ignore[arg-type]
    factory = FactoryModel(path=str(file), function="build", inputs=[Sample((4,))])
    return await tracer.run(TraceRequest(factory=factory, training=Training(batch_size=8)))


ENDLESS = "while True: pass"
MISBEHAVIOUR = [
    pytest.param("os.kill(os.getpid(), 9)", "TraceOutOfMemory", "limit 3,072 MiB", id="killed by the kernel"),
    pytest.param("os.write(2, b'threw std::bad_alloc'); os._exit(1)", "TraceOutOfMemory", "--trace-memory",
                 id="bad_alloc"),
    pytest.param("os.write(2, b'something broke'); os._exit(1)", "TraceFailed", "ended with code 1: something broke",
                 id="a message"),
    pytest.param("os._exit(0)", "TraceFailed", "ended with code 0: it printed nothing", id="prints nothing"),
    pytest.param("sys.stderr.write('x' * 10_000_000 + '\\nlast words'); sys.stderr.flush(); os._exit(3)", "TraceFailed",
                 "code 3: last words", id="prints without end"),
    pytest.param("os.closerange(0, 99); os._exit(4)", "TraceFailed", "code 4", id="closes its files"),
    pytest.param("bytearray(8 << 30)", "TraceOutOfMemory", "more than 3,072 MiB", id="takes too much memory"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "reason", "word"), MISBEHAVIOUR)
async def test_a_misbehaving_trace_is_an_abstention(body: str, reason: str, word: str, tmp_path: Path) -> None:
    found = await ask(tmp_path, body)
    assert isinstance(found, Abstention)
    assert (found.reason, word in found.message) == (reason, True), found


async def test_a_trace_that_never_ends_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"child = os.fork()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n{ENDLESS}"
    found = await ask(tmp_path, body, timeout_s=2)
    assert isinstance(found, Abstention)
    assert found.reason == "TraceTimedOut"
    assert "longer than 2 s" in found.message
    assert "(--trace-timeout, or settings.traceTimeoutSeconds of" in found.message
    async with asyncio.timeout(20):  # a killed process is gone a moment after the signal
        while any(_runs(int(pid)) for pid in pids.read_text().split()):  # noqa: ASYNC110  (there is no event for it)
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
    task = asyncio.create_task(ask(tmp_path, body + ENDLESS))
    async with asyncio.timeout(60):
        while not pid_file.exists():  # noqa: ASYNC110  (another process writes it; there is no event to wait for)
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while _runs(int(pid_file.read_text())):  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.01)


async def test_waiting_for_other_traces_is_not_counted() -> None:
    """Regression: rows that were traced one after the other each counted the traces before them, too."""
    looks = itertools.count()
    tracer = SubprocessTracer(start=InstantTrace, seconds=lambda: float(next(looks)))
    request = TraceRequest(factory=FactoryModel(path="x.py", function="f", inputs=[Sample((3,))]), training=Training())
    found = await asyncio.gather(*(tracer.timed(request) for _ in range(4)))
    # Each reads the clock before and after; during the first trace the other three read it on arrival.
    assert [took for _, took in found] == [4, 1, 1, 1]


async def test_the_process_has_the_limits_no_gpu_and_no_model_hub(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = (
        "import resource\n"
        f"open({str(seen)!r}, 'w').write(repr((os.environ['CUDA_VISIBLE_DEVICES'], os.environ['HF_HUB_OFFLINE'],"
        " resource.getrlimit(resource.RLIMIT_DATA)[0])))\nprint('a factory may print')"
    )
    found = await ask(tmp_path, body, memory_mib=2048)
    assert isinstance(found, ModelFeatures), found
    assert (found.name, found.parameters) == ("mine:build", 20)
    assert seen.read_text() == repr(("", "1", 2048 << 20))


async def test_a_real_inline_graph_is_traced() -> None:
    layers = [GraphLayer(kind="Flatten"), GraphLayer(kind="Linear", out=3)]
    model = ModelSource(graph=GraphModel(input=[3, 4, 4], layers=layers))
    found = await SubprocessTracer().trace(model, Training(batch_size=8))
    assert isinstance(found, ModelFeatures), found
    assert found.parameters == 48 * 3 + 3
    assert [step.batch_size for step in found.steps] == [4, 8]


async def test_a_model_of_the_store_starts_no_process() -> None:
    training = Training(batch_size=32, optimizer=Optimizer.ADAMW)
    model = CatalogModel(name="timm/resnet50")
    found = await SubprocessTracer(start=no_process).trace(ModelSource(catalog=model), training)
    assert found == store.features(model, training)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("timm/resnet5o", ["timm has no model 'resnet5o'", "timm/resnet50"], id="timm"),
        pytest.param("torchvision/resnet5o", ["torchvision has no model", "resnet50"], id="torchvision"),
        pytest.param("transformers/bert-base-unbased", ["no model 'bert-base-unbased' of the hub", "cased"], id="hub"),
        pytest.param("transformers/GPT2", ["are transformers/gpt2,"], id="capitals"),
        pytest.param(
            "transformers/tinyllama-1.1b-chat-V1.0", ["are transformers/TinyLlama-1.1B-Chat-v1.0"], id="other capitals"
        ),
        pytest.param("transformers/gpt2@layers", ["expected NAME@key=value"], id="value"),
        pytest.param("jax/resnet50", ["this version supports timm/NAME"], id="library"),
    ],
)
async def test_an_unknown_name_is_refused_before_tracing(name: str, words: list[str]) -> None:
    """Regression: it took a trace, and the wait for all that were asked before."""
    tracer = SubprocessTracer(start=no_process)
    found = await tracer.trace(ModelSource(catalog=CatalogModel(name=name)), Training())
    assert isinstance(found, Abstention)
    assert found.reason in {"UnknownCatalogModel", "CatalogUnsupported"}
    assert all(word in found.message for word in words)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("timm/tf_efficientnet_b0_ns", id="deprecated"),
        pytest.param("timm/resnet50.a1_in1k", id="with weights"),
        pytest.param("torchvision/vgg16", id="common"),
        pytest.param("transformers/LlamaConfig@hidden_size=64", id="configuration class"),
        pytest.param("transformers/openai-community/gpt2-xl", id="with its organization"),
    ],
)
def test_a_name_that_only_its_library_can_check_is_not_refused(name: str) -> None:
    assert refusal_of(CatalogModel(name=name)) is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(None, ["extra trace"], id="an inline graph"),
        pytest.param(CatalogModel(name="timm/resnet50", num_classes=2000), ["extra trace"], id="a known name"),
        pytest.param(CatalogModel(name="timm/resnet5o"), ["timm/resnet50", "extra trace"], id="a typing error"),
        pytest.param(CatalogModel(name="timm/qqqqqqqqq"), ["no name is near", "extra trace"], id="nothing like it"),
    ],
)
def test_without_torch_the_nearest_stored_names_are_suggested(model: CatalogModel | None, words: list[str]) -> None:
    found = untraceable(model)
    assert found.reason == "TorchMissing"
    assert all(word in found.message for word in words)


EXAMPLES = [
    pytest.param(job["spec"], id=path.stem)
    for path in sorted(Path(__file__).parents[2].joinpath("examples").glob("*.yaml"))
    for job in [yaml.safe_load(path.read_text())]
    if "catalog" in job["spec"].get("model", {})
]


@pytest.mark.parametrize("spec", EXAMPLES)
async def test_examples_of_the_catalog_are_predicted_without_torch(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the default image of the operator did not predict the README's own job, which has 100 classes."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    model, training = (msgspec.convert(spec[key], kind) for key, kind in PARTS.items())
    found = await SubprocessTracer().lookup(model, training)
    assert isinstance(found, ModelFeatures), found


def test_the_examples_that_share_a_gpu_are_alike_and_their_program_trains() -> None:
    """On CPUs, for one step; the image's PyTorch is another version."""
    folder = Path(__file__).parents[2] / "examples"
    first, second = (yaml.safe_load((folder / f"resnet18-{one}.yaml").read_text()) for one in "ab")
    assert first["spec"] == second["spec"]
    _, option, program = first["spec"]["template"]["spec"]["containers"][0]["command"]
    steps = str(first["spec"]["training"]["steps"])
    assert f"range({steps})" in program
    shortened = program.replace('"cuda"', '"cpu"').replace(steps, "1")
    done = subprocess.run([sys.executable, option, shortened], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0 ")


def test_predicting_imports_no_heavy_library() -> None:
    code = (
        "import sys, carpool_predictor.cli\n"
        "from carpool_predictor.models import activity, memory, step_time\n"
        "[model.shipped() for model in (activity, memory, step_time)]\n"
        "sys.exit(bool({'torch', 'numpy', 'timm', 'scipy', 'sklearn', 'lightgbm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_trace_is_left_running() -> None:
    assert multiprocessing.active_children() == []
