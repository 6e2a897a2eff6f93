"""Names that can be none are refused at once; others are left to their library."""

import pytest
from carpool_core.resources.job import CatalogModel, ModelSource, Training
from carpool_predictor.catalog.names import refusal_of
from carpool_predictor.features import Abstention
from carpool_predictor.tracing.source import SubprocessTracer


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
        pytest.param("gpumemnet/[('lin', 3, 4)]", ["layer 0", "found 'lin'"], id="list"),
        pytest.param("jax/resnet50", ["this version knows timm/NAME"], id="library"),
    ],
)
async def test_a_name_that_is_none_is_refused_before_anything_is_traced(name: str, words: list[str]) -> None:
    """Regression: it took a trace, and the wait for all that were asked before."""
    tracer = SubprocessTracer(command=("/bin/false",))
    found = await tracer.trace(ModelSource(catalog=CatalogModel(name=name)), Training())
    assert isinstance(found, Abstention)
    assert found.reason in {"UnknownCatalogModel", "CatalogUnsupported", "LayerListInvalid"}
    assert all(word in found.message for word in words)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("timm/tf_efficientnet_b0_ns", id="deprecated"),
        pytest.param("timm/resnet50.a1_in1k", id="with weights"),
        pytest.param("torchvision/vgg16", id="common"),
        pytest.param("transformers/LlamaConfig@hidden_size=64", id="configuration class"),
        pytest.param("transformers/openai-community/gpt2-xl", id="with its organization"),
        pytest.param("gpumemnet/[('linear', 64, 8256)]", id="list"),
    ],
)
def test_a_name_that_only_its_library_can_judge_is_not_refused(name: str) -> None:
    assert refusal_of(CatalogModel(name=name)) is None
