"""Configurations of common models of the Hugging Face hub: configuration class and differing values. No PyTorch.

Values are those of each model's `config.json` that differ from the class's defaults in `transformers` and change the
graph. A test compares the numbers of parameters with the published ones.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from carpool_predictor.features import TraceError

Value = int | float | bool | str | list[object]


@dataclass(frozen=True, slots=True)
class Published:
    """Configuration of a model of the hub."""

    config: str
    """Class of `transformers`, such as `BertConfig`."""
    values: Mapping[str, Value] = field(default_factory=dict)


def _wide(sizes: tuple[int, int, int, int], more: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """Return width, layers, heads and inner width under their usual names."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {**dict(zip(names, sizes, strict=True)), **(more or {})}


_TIED: dict[str, Value] = {"tie_word_embeddings": True}
_BASE, _LARGE = (768, 12, 12, 3072), (1024, 24, 16, 4096)


def _encoders() -> Iterator[tuple[str, Published]]:
    for name, vocabulary in (
        ("uncased", 30522), ("cased", 28996), ("multilingual-cased", 119547), ("multilingual-uncased", 105879),
        ("chinese", 21128),
    ):  # fmt: skip
        yield f"google-bert/bert-base-{name}", Published("BertConfig", _wide(_BASE, {"vocab_size": vocabulary}))
    for name, vocabulary in (("uncased", 30522), ("cased", 28996)):
        yield f"google-bert/bert-large-{name}", Published("BertConfig", _wide(_LARGE, {"vocab_size": vocabulary}))
        yield f"distilbert/distilbert-base-{name}", Published("DistilBertConfig", {"vocab_size": vocabulary})
    roberta: dict[str, Value] = {"max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265}
    yield "FacebookAI/roberta-base", Published("RobertaConfig", _wide(_BASE, roberta))
    yield "FacebookAI/roberta-large", Published("RobertaConfig", _wide(_LARGE, roberta))
    yield "distilbert/distilroberta-base", Published("RobertaConfig", _wide((768, 6, 12, 3072), roberta))
    xlm = {**roberta, "vocab_size": 250002}
    yield "FacebookAI/xlm-roberta-base", Published("XLMRobertaConfig", _wide(_BASE, xlm))
    yield "FacebookAI/xlm-roberta-large", Published("XLMRobertaConfig", _wide(_LARGE, xlm))
    yield "almanach/camembert-base", Published("CamembertConfig", _wide(_BASE, {**roberta, "vocab_size": 32005}))
    for name, sizes in (
        ("base", _BASE), ("large", _LARGE), ("xlarge", (2048, 24, 16, 8192)), ("xxlarge", (4096, 12, 64, 16384)),
    ):  # fmt: skip
        yield (
            f"albert/albert-{name}-v2",
            Published("AlbertConfig", _wide(sizes, {"embedding_size": 128, "vocab_size": 30000})),
        )
    for name, sizes, embedding in (
        ("small", (256, 12, 4, 1024), 128), ("base", _BASE, 768), ("large", _LARGE, 1024),
    ):  # fmt: skip
        electra = _wide(sizes, {"embedding_size": embedding})
        yield f"google/electra-{name}-discriminator", Published("ElectraConfig", electra)
    yield "google/mobilebert-uncased", Published("MobileBertConfig")
    for name, sizes in (
        ("xsmall", (384, 12, 6, 1536)), ("small", (768, 6, 12, 3072)), ("base", _BASE), ("large", _LARGE),
    ):  # fmt: skip
        yield f"microsoft/deberta-v3-{name}", Published(
            "DebertaV2Config",
            _wide(
                sizes,
                {
                    "vocab_size": 128100, "relative_attention": True, "position_buckets": 256,
                    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
                    "position_biased_input": False, "type_vocab_size": 0, "max_relative_positions": -1,
                },
            ),
        )  # fmt: skip
    yield (
        "xlnet/xlnet-base-cased",
        Published("XLNetConfig", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    )
    yield "xlnet/xlnet-large-cased", Published("XLNetConfig")


def _decoders() -> Iterator[tuple[str, Published]]:
    for name, width, layers, heads in (
        ("gpt2", 768, 12, 12), ("gpt2-medium", 1024, 24, 16), ("gpt2-large", 1280, 36, 20), ("gpt2-xl", 1600, 48, 25),
    ):  # fmt: skip
        yield f"openai-community/{name}", Published("GPT2Config", {"n_embd": width, "n_layer": layers, "n_head": heads})
    yield "distilbert/distilgpt2", Published("GPT2Config", {"n_layer": 6})
    yield "openai-community/openai-gpt", Published("OpenAIGPTConfig")
    for name, width, layers, heads in (("125m", 768, 12, 12), ("1.3B", 2048, 24, 16), ("2.7B", 2560, 32, 20)):
        yield f"EleutherAI/gpt-neo-{name}", Published(
            "GPTNeoConfig",
            {
                "hidden_size": width, "num_layers": layers, "num_heads": heads,
                "attention_types": [[["global", "local"], layers // 2]],
            },
        )  # fmt: skip
    yield "EleutherAI/gpt-j-6b", Published("GPTJConfig")
    for name, sizes in (
        ("70m", (512, 6, 8, 2048)), ("160m", _BASE), ("410m", _LARGE), ("1b", (2048, 16, 8, 8192)),
        ("1.4b", (2048, 24, 16, 8192)), ("2.8b", (2560, 32, 32, 10240)), ("6.9b", (4096, 32, 32, 16384)),
    ):  # fmt: skip
        vocabulary = 50432 if name == "6.9b" else 50304
        yield f"EleutherAI/pythia-{name}", Published("GPTNeoXConfig", _wide(sizes, {"vocab_size": vocabulary}))
    for name, width, layers, heads, more in (
        ("125m", 768, 12, 12, {}),
        ("350m", 1024, 24, 16, {"word_embed_proj_dim": 512, "do_layer_norm_before": False}),
        ("1.3b", 2048, 24, 32, {}),
        ("2.7b", 2560, 32, 32, {}),
        ("6.7b", 4096, 32, 32, {}),
    ):
        values: dict[str, Value] = {
            "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * width,
            "word_embed_proj_dim": width,
        }  # fmt: skip
        yield f"facebook/opt-{name}", Published("OPTConfig", {**values, **more})
    for name, width, layers, heads in (
        ("560m", 1024, 24, 16), ("1b1", 1536, 24, 16), ("1b7", 2048, 24, 16), ("3b", 2560, 30, 32),
    ):  # fmt: skip
        yield (
            f"bigscience/bloom-{name}",
            Published("BloomConfig", {"hidden_size": width, "n_layer": layers, "n_head": heads, "vocab_size": 250880}),
        )
    empty: dict[str, Value] = {}
    for name, config, sizes, keys, different in (
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "LlamaConfig", (2048, 22, 32, 5632), 4, empty),
        ("meta-llama/Llama-2-7b-hf", "LlamaConfig", (4096, 32, 32, 11008), 32, {}),
        ("meta-llama/Meta-Llama-3-8B", "LlamaConfig", (4096, 32, 32, 14336), 8, {"vocab_size": 128256}),
        ("meta-llama/Llama-3.2-1B", "LlamaConfig", (2048, 16, 32, 8192), 8, {"vocab_size": 128256, **_TIED}),
        ("meta-llama/Llama-3.2-3B", "LlamaConfig", (3072, 28, 24, 8192), 8, {"vocab_size": 128256, **_TIED}),
        ("Qwen/Qwen2.5-0.5B", "Qwen2Config", (896, 24, 14, 4864), 2, {"vocab_size": 151936, **_TIED}),
        ("Qwen/Qwen2.5-1.5B", "Qwen2Config", (1536, 28, 12, 8960), 2, {"vocab_size": 151936, **_TIED}),
        ("Qwen/Qwen2.5-7B", "Qwen2Config", (3584, 28, 28, 18944), 4, {"vocab_size": 152064}),
        ("mistralai/Mistral-7B-v0.1", "MistralConfig", (4096, 32, 32, 14336), 8, {}),
        ("microsoft/phi-1_5", "PhiConfig", (2048, 24, 32, 8192), 32, {"vocab_size": 51200}),
        ("microsoft/phi-2", "PhiConfig", (2560, 32, 32, 10240), 32, {"vocab_size": 51200}),
        ("google/gemma-2b", "GemmaConfig", (2048, 18, 8, 16384), 1, {"vocab_size": 256000, "head_dim": 256}),
    ):  # fmt: skip
        yield name, Published(config, _wide(sizes, {"num_key_value_heads": keys, **different}))


def _translators_and_images() -> Iterator[tuple[str, Published]]:
    for name, width, inner, layers, heads in (
        ("small", 512, 2048, 6, 8), ("base", 768, 3072, 12, 12), ("large", 1024, 4096, 24, 16),
    ):  # fmt: skip
        yield (
            f"google-t5/t5-{name}",
            Published("T5Config", {"d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads}),
        )
    for name, width, inner, layers, heads in (
        ("small", 512, 1024, 8, 6), ("base", 768, 2048, 12, 12), ("large", 1024, 2816, 24, 16),
        ("xl", 2048, 5120, 24, 32),
    ):  # fmt: skip
        yield f"google/flan-t5-{name}", Published(
            "T5Config",
            {
                "d_model": width, "d_ff": inner, "num_layers": layers, "num_heads": heads,
                "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
            },
        )  # fmt: skip
    bart: dict[str, Value] = {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    }  # fmt: skip
    yield "facebook/bart-base", Published("BartConfig", bart)
    yield "facebook/bart-large", Published("BartConfig")
    yield "facebook/mbart-large-50", Published("MBartConfig", {"vocab_size": 250054})
    yield "google/vit-base-patch16-224", Published("ViTConfig", _wide(_BASE))
    yield "google/vit-large-patch16-224", Published("ViTConfig", _wide(_LARGE))
    yield "google/vit-huge-patch14-224-in21k", Published("ViTConfig", _wide((1280, 32, 16, 5120), {"patch_size": 14}))
    yield "facebook/deit-tiny-patch16-224", Published("ViTConfig", _wide((192, 12, 3, 768)))
    yield "facebook/deit-small-patch16-224", Published("ViTConfig", _wide((384, 12, 6, 1536)))
    yield "microsoft/swin-tiny-patch4-window7-224", Published("SwinConfig")
    swin: dict[str, Value] = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
    yield "microsoft/swin-base-patch4-window7-224", Published("SwinConfig", swin)
    yield "microsoft/resnet-50", Published("ResNetConfig")
    yield "facebook/convnext-tiny-224", Published("ConvNextConfig")


HUB: Mapping[str, Published] = dict([*_encoders(), *_decoders(), *_translators_and_images()])
"""Models by their full name, such as `openai-community/gpt2-xl`."""

_SHORT: Mapping[str, str] = {name.rpartition("/")[2]: name for name in HUB}


def full_name(name: str) -> str:
    """Return a common model's name with its organization; other names as they are."""
    return _SHORT.get(name, name)


def published(name: str) -> Published | None:
    """Return the configuration of a model, with or without its organization: `gpt2-xl`, `openai-community/gpt2-xl`."""
    return HUB.get(full_name(name))


def split_name(name: str) -> tuple[str, dict[str, Value]]:
    """Split `NAME@key=value,…` into the name and its values.

    Raises:
        TraceError: A part after the `@` is not key=value.
    """
    base, _, rest = name.partition("@")
    values: dict[str, Value] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not (key and equals and text):
            raise TraceError("UnknownCatalogModel", f"expected NAME@key=value,key=value; found {part!r} in {name!r}")
        values[key] = _value(text)
    return base, values


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def unknown_to_the_hub(name: str) -> TraceError:
    """Return the error for an unknown name, with the nearest names."""
    folded = {short.casefold(): short for short in _SHORT}
    found = difflib.get_close_matches(name.rpartition("/")[2].casefold(), folded, n=3, cutoff=0.5)
    near = ", ".join(f"transformers/{folded[short]}" for short in found)
    return TraceError(
        "UnknownCatalogModel",
        f"the catalog has no model {name!r} of the hub, nor has transformers a configuration class of that name; "
        f"{f'the nearest names are {near}' if near else 'no name is near'}; any other goes by class and values, such "
        "as transformers/LlamaConfig@hidden_size=1024",
    )
