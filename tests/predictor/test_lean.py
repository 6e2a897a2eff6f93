"""What the tracing process leaves out: the same features, without PyTorch's compiler."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from carpool_core.resources.job import CatalogModel, GraphLayer, GraphModel, ModelSource, Training
from carpool_predictor.catalog import store
from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.requests import FactoryModel, TraceReply, TraceRequest

TRAINING = Training(batch_size=8)
LEAN = """
import sys, msgspec
from carpool_predictor.trace import answer
from carpool_predictor.tracing.requests import TraceRequest
reply = answer(msgspec.json.decode(sys.stdin.buffer.read(), type=TraceRequest), lean=True)
print(msgspec.json.encode({"reply": reply, "modules": list(sys.modules)}).decode())
"""


def lean(request: TraceRequest) -> tuple[TraceReply, set[str]]:
    """Trace in a process of its own; returns the reply and the modules that were imported."""
    catalog = None if request.model is None else request.model.catalog
    family = None if catalog is None else store.shipped().family(catalog.name)
    content = msgspec.json.encode(msgspec.structs.replace(request, family=family))
    done = subprocess.run([sys.executable, "-c", LEAN], input=content, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return msgspec.convert(found["reply"], type=TraceReply), set(found["modules"])


@pytest.mark.parametrize(
    "name",
    [
        "timm/test_resnet",
        "torchvision/mobilenet_v3_small",
        "transformers/bert-base-uncased@num_hidden_layers=2",
        "transformers/vit-base-patch16-224@num_hidden_layers=2",
        "transformers/SwinConfig",
    ],
)
def test_a_lean_trace_is_the_whole_one(name: str) -> None:
    """Regression: models of images failed, whose documentation needs all tokenizers, and were traced once more."""
    model = CatalogModel(name=name, num_classes=7)
    reply, modules = lean(TraceRequest(model=ModelSource(catalog=model), training=TRAINING))
    assert reply.features == trace_recipe(recipe_of(model), TRAINING)
    unused = {"torch._dynamo.convert_frame", "sympy.core", "torchvision.datasets", "timm.models.beit"}
    unused |= {"asyncio.events", "http.client", "httpcore2", "huggingface_hub._jobs_api", "httpx2._client"}
    assert not (unused | {"torch.export.exported_program", "torch.utils.data.dataloader"}) & modules


def test_a_model_of_another_module_of_the_same_name_is_found() -> None:
    """Regression: torchvision's `resnet` defines no models of video, but `video.resnet` does."""
    model = CatalogModel(name="torchvision/r3d_18", input=[3, 4, 32, 32])
    reply, _ = lean(TraceRequest(model=ModelSource(catalog=model), training=TRAINING))
    assert reply.features is not None, reply.abstention


SABOTAGED = """
import sys
from carpool_predictor import trace
from carpool_predictor.features.abstention import TraceError
from carpool_predictor.tracing import lean

def prepare(model, family):
    {failure}

lean.prepare = prepare
sys.exit(trace.main())
"""


@pytest.mark.parametrize(
    "failure",
    [
        "raise AttributeError('_import_family')",
        "raise ImportError('cannot import name')",
        "sys.modules['torch._subclasses.fake_tensor'] = None",
        "raise TraceError('UnknownCatalogModel', 'timm has no model')",
    ],
)
def test_whatever_a_lean_trace_fails_with_is_tried_again(failure: str) -> None:
    """Regression: what was left out was "not installed", and what `prepare` raised ended the process."""
    graph = GraphModel(input=[4], layers=[GraphLayer(kind="Linear", out=2)])
    content = msgspec.json.encode(TraceRequest(model=ModelSource(graph=graph), training=TRAINING))
    command = [sys.executable, "-c", SABOTAGED.format(failure=failure)]
    done = subprocess.run(command, input=content, check=True, capture_output=True)
    reply = msgspec.json.decode(done.stdout, type=TraceReply)
    assert reply.features is not None, reply.abstention


FACTORY = """
import asyncio, scipy, sympy
from torch import nn

def build():
    import torch
    torch._dynamo.reset()
    torch.utils.data.DataLoader([1, 2])
    torch.distributions.Normal(0.0, 1.0)
    torch.masked.masked_tensor
    torch.profiler.ProfilerActivity
    assert torch.hub.get_dir()
    asyncio.run(asyncio.sleep(0))
    import torch.ao.quantization, torch.nn.intrinsic, torch.utils.data.distributed
    torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    return nn.Linear(int(sympy.Symbol("x").subs("x", 4)), 4)
"""


def test_a_factory_has_everything_that_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "curious.py"
    file.write_text(FACTORY)
    reply, modules = lean(
        TraceRequest(factory=FactoryModel(path=str(file), function="build", input=[4]), training=TRAINING)
    )
    assert reply.features is not None, reply.abstention
    assert reply.features.parameters == 20
    assert {"scipy", "sympy.core", "torch._dynamo.convert_frame"} <= modules
