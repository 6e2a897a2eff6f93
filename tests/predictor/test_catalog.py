"""Catalog names, against the libraries themselves."""

import time
from pathlib import Path

import pytest
import torch
from carpool_core.resources.job import CatalogModel, Training
from carpool_predictor.catalog.recipes import recipe_of
from carpool_predictor.features import TraceError
from carpool_predictor.tracing.models import trace_recipe
from carpool_predictor.tracing.step import fake_weights, meta_mode


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(CatalogModel(name="timm/resnet50"), (3, 224, 224), id="timm's own size"),
        pytest.param(CatalogModel(name="timm/vit_base_patch16_384"), (3, 384, 384), id="timm's larger size"),
        pytest.param(CatalogModel(name="timm/resnet50", input=[1, 28, 28]), (1, 28, 28), id="given"),
        pytest.param(CatalogModel(name="torchvision/resnet18"), (3, 224, 224), id="torchvision"),
        pytest.param(CatalogModel(name="torchvision/inception_v3"), (3, 299, 299), id="torchvision's own crop"),
        pytest.param(CatalogModel(name="torchvision/r3d_18"), (3, 16, 112, 112), id="video"),
        pytest.param(CatalogModel(name="torchvision/ssd300_vgg16"), (3, 224, 224), id="detection, nothing downloaded"),
        pytest.param(CatalogModel(name="transformers/gpt2"), (512,), id="tokens"),
        pytest.param(CatalogModel(name="transformers/xlnet-large-cased"), (512,), id="no longest text"),
        pytest.param(CatalogModel(name="transformers/google/vit-base-patch16-224"), (3, 224, 224), id="images"),
        pytest.param(CatalogModel(name="transformers/videomae-base"), (16, 3, 224, 224), id="videos"),
        pytest.param(CatalogModel(name="transformers/whisper-large-v3"), (128, 3000), id="spectrograms"),
        pytest.param(CatalogModel(name="transformers/yolos-small"), (3, 512, 864), id="oblong images"),
    ],
)
def test_input_shapes(model: CatalogModel, shape: tuple[int, ...]) -> None:
    assert recipe_of(model).input_shape == shape


@pytest.mark.parametrize(
    ("name", "reason", "word"),
    [
        pytest.param("timm/resnet5o", "UnknownCatalogModel", "timm/resnet50", id="typing error"),
        pytest.param("torchvision/mobilnet_v2", "UnknownCatalogModel", "torchvision/mobilenet_v2", id="torchvision"),
        pytest.param("timm/qqqqqqqqqq", "UnknownCatalogModel", "no name is near", id="nothing like it"),
        pytest.param("transformers/bert-base-uncase", "UnknownCatalogModel", "bert-base-uncased", id="transformers"),
        pytest.param("transformers/QqqqConfig", "UnknownCatalogModel", "class and values", id="no such configuration"),
        pytest.param("transformers/gpt2@n_layr=2", "UnknownCatalogModel", "n_layr", id="no such value"),
        pytest.param("transformers/gpt2@n_layer", "UnknownCatalogModel", "key=value", id="no value"),
        pytest.param("transformers/gpt2@task=chess", "UnknownCatalogModel", "image-classification", id="no such task"),
        pytest.param("transformers/Qwen3-8", "UnknownCatalogModel", "transformers/Qwen3-8B", id="part of a name"),
        pytest.param("keras/resnet50", "CatalogUnsupported", "carpool graph", id="another library"),
    ],
)
def test_unknown_names_get_a_suggestion(name: str, reason: str, word: str) -> None:
    with pytest.raises(TraceError, match=word) as caught:
        recipe_of(CatalogModel(name=name))
    assert caught.value.reason == reason


_PARAMETERS = {
    "bert-base-uncased": 109_514_298,
    "openai-community/gpt2-xl": 1_557_611_200,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "google-t5/t5-small": 60_506_624,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-1b-pt": 999_885_952,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/whisper-large-v3": 1_543_490_560,
    "nvidia/segformer-b0-finetuned-ade-512-512": 3_752_694,
}
"""As published with the weights, language-modeling heads included."""


@pytest.mark.parametrize("name", _PARAMETERS)
def test_models_of_the_hub_have_the_published_number_of_parameters(name: str) -> None:
    with fake_weights(meta_mode()):
        model = recipe_of(CatalogModel(name=f"transformers/{name}")).build()
    assert sum(p.numel() for p in model.parameters()) == _PARAMETERS[name]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(CatalogModel(name="transformers/gpt2@n_layer=2,n_embd=64,n_head=2", input=[16]), id="causal"),
        pytest.param(CatalogModel(name="transformers/t5-small@num_layers=1,d_model=64", input=[16]), id="translation"),
        pytest.param(
            CatalogModel(
                name="transformers/LlamaConfig@hidden_size=64,num_hidden_layers=1,num_attention_heads=2,vocab_size=99",
                input=[16],
                num_classes=3,
            ),
            id="configuration, classes",
        ),
        pytest.param(CatalogModel(name="timm/resnet18", input=[1, 64, 64], num_classes=7), id="timm, gray and small"),
        pytest.param(CatalogModel(name="timm/test_vit", input=[3, 64, 64]), id="transformer of other size"),
        pytest.param(CatalogModel(name="torchvision/googlenet", num_classes=7), id="several outputs"),
        pytest.param(
            CatalogModel(name="transformers/segformer-b0-finetuned-ade-512-512", input=[3, 64, 64], num_classes=7),
            id="segmentation, classes",
        ),
        pytest.param(
            CatalogModel(name="transformers/whisper-tiny@encoder_layers=1,decoder_layers=1"), id="speech recognition"
        ),
        pytest.param(CatalogModel(name="transformers/yolos-small@num_hidden_layers=2"), id="detection"),
        pytest.param(CatalogModel(name="transformers/TimesformerConfig@num_hidden_layers=1,num_frames=2"), id="videos"),
    ],
)
def test_catalog_models_trace(model: CatalogModel) -> None:
    features = trace_recipe(recipe_of(model), Training(batch_size=16))
    assert features.name == model.name
    layers = features.layers
    assert layers.embedding + layers.convolution > 0
    small, large = features.steps
    assert small.peak_bytes < large.peak_bytes


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        pytest.param("gpt2@n_layer=2,n_embd=64,n_head=2,attn_pdrop", False, id="fused attention"),
        pytest.param("openai-gpt@n_layer=2,n_embd=64,n_head=2,attn_pdrop", True, id="attention of its own"),
    ],
)
def test_attention_dropout_takes_memory_without_a_fused_kernel(name: str, keeps: bool) -> None:
    """Regression: dropout was left out of every model's attention, though only fused kernels keep nothing of it."""
    without, with_dropout = (
        trace_recipe(recipe_of(CatalogModel(name=f"transformers/{name}={rate}", input=[64])), Training(batch_size=4))
        for rate in (0.0, 0.1)
    )
    assert (with_dropout.steps[1].peak_bytes > without.steps[1].peak_bytes) is keeps


def test_eager_attention_keeps_scores_and_unknown_ones_are_refused() -> None:
    name = "transformers/BertConfig@num_hidden_layers=2,vocab_size=99"
    fused, eager = (
        trace_recipe(recipe_of(CatalogModel(name=f"{name},attn_implementation={kind}", input=[512])), Training(), (2,))
        for kind in ("sdpa", "eager")
    )
    scores = 2 * 2 * 12 * 512 * 512 * 4  # layers, samples, heads, queries and keys, FP32
    assert eager.steps[0].peak_bytes - fused.steps[0].peak_bytes > 2 * scores  # with the dropout's
    with pytest.raises(TraceError, match="sdpa or eager, found flush"):
        recipe_of(CatalogModel(name=f"{name},attn_implementation=flush"))


def test_queries_that_share_keys_keep_no_scores() -> None:
    """Regression: PyTorch keeps the matrix of scores on meta tensors, which CUDA's fused kernels do not."""
    name = "transformers/LlamaConfig@hidden_size=64,num_hidden_layers=2,num_attention_heads=4,vocab_size=99"
    alone, shared = (
        trace_recipe(
            recipe_of(CatalogModel(name=f"{name},num_key_value_heads={heads}", input=[256])), Training(batch_size=4)
        ).steps[1]
        for heads in (4, 2)
    )
    assert shared.flops < alone.flops
    assert shared.activation_bytes < alone.activation_bytes


def test_models_of_the_hub_recompute_their_layers() -> None:
    recipe = recipe_of(CatalogModel(name="transformers/gpt2@n_layer=2,n_embd=64,n_head=2", input=[16]))
    plain, checkpointed = (
        trace_recipe(recipe, Training(batch_size=16, activation_checkpointing=again)) for again in (False, True)
    )
    assert checkpointed.steps[1].flops > plain.steps[1].flops


def test_classes_of_pixels_have_the_size_of_the_image() -> None:
    recipe = recipe_of(CatalogModel(name="transformers/SegformerConfig@task=semantic-segmentation", input=[3, 64, 64]))
    with fake_weights(meta_mode()):
        model = recipe.build()
    assert model(torch.empty(2, 3, 64, 64, device="meta")).shape[2:] == (64, 64)


def test_resnet50_is_traced_in_three_seconds() -> None:
    start = time.process_time()
    trace_recipe(recipe_of(CatalogModel(name="timm/resnet50")), Training(batch_size=128))
    assert time.process_time() - start < 3


def test_the_weights_of_a_large_model_take_no_memory() -> None:
    before = _resident_mib()
    features = trace_recipe(recipe_of(CatalogModel(name="timm/eva_giant_patch14_224")), Training(batch_size=4))
    assert features.parameter_bytes > 3.5 * 2**30
    assert _resident_mib() - before < 300


def _resident_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10
