"""Common models of the Hugging Face hub: configuration class and values, from `hub.json`. No PyTorch.

The values are those of each model's `config.json` that differ from the class's defaults in `transformers` and change
the graph. A test compares the numbers of parameters with the published ones.
"""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

from carpool_predictor.features import TraceError

Value = int | float | bool | str | list[object]


class PublishedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a model of the hub."""

    config: str
    """Class of `transformers`, such as `BertConfig`."""
    values: Mapping[str, Value] = {}


@cache
def published_models() -> dict[str, PublishedModel]:
    """Return the common models by their full name, such as `openai-community/gpt2-xl`."""
    content = resources.files("carpool_predictor").joinpath("catalog/hub.json").read_bytes()
    return msgspec.json.decode(content, type=dict[str, PublishedModel])


@cache
def _full_names() -> dict[str, str]:
    """Return full names by names without organization."""
    return {name.rpartition("/")[2]: name for name in published_models()}


def full_name(name: str) -> str:
    """Return a common model's name with its organization; other names unchanged."""
    return _full_names().get(name, name)


def published(name: str) -> PublishedModel | None:
    """Return the configuration of a model, with or without its organization: `gpt2-xl`, `openai-community/gpt2-xl`."""
    return published_models().get(full_name(name))


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


CORRECT = "correct the name, because a job of an unknown model has a GPU of its own until its memory is measured"
"""Advice in the errors about unknown names."""


def unknown_to_the_hub(name: str) -> TraceError:
    """Return the error for an unknown name, with the nearest names."""
    folded = {short.casefold(): short for short in _full_names()}
    found = difflib.get_close_matches(name.rpartition("/")[2].casefold(), folded, n=3, cutoff=0.5)
    near = ", ".join(f"transformers/{folded[short]}" for short in found)
    return TraceError(
        "UnknownCatalogModel",
        f"the catalog has no model {name!r} of the hub, nor has transformers a configuration class of that name, "
        f"{f'the nearest names are {near}' if near else 'no name is near'}; {CORRECT}, or name any other model by "
        "class and values, such as transformers/LlamaConfig@hidden_size=1024",
    )
