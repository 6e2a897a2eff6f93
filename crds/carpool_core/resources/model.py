"""Where a job's model comes from: `spec.model`."""

from typing import Annotated, ClassVar

import msgspec

from carpool_core.resources.features import ModelFeatures
from carpool_core.resources.schema import ATOMIC, Resource, Rule, field


class CatalogModel(Resource, frozen=True, kw_only=True):
    """A published architecture by name; no weights are ever downloaded."""

    name: Annotated[
        str,
        field(
            "`timm/NAME`, `torchvision/NAME`, `transformers/NAME`, a model of the Hugging Face hub such as "
            "transformers/bert-base-uncased or a configuration class; `@key=value,…` after either changes values of "
            "its configuration, such as transformers/LlamaConfig@hidden_size=1024,num_hidden_layers=8. Or "
            "`gpumemnet/LAYERS`, a list of layers in the notation of GPUMemNet's data, such as "
            "gpumemnet/[('linear', 64, 8256), ('ReLU', 64, 0), ('linear', 10, 650)].",
            max_length=4096,
            rules=[
                Rule(
                    r"""self.matches("^((timm|torchvision)/[A-Za-z0-9._-]+"""
                    r"""|transformers/([A-Za-z0-9._-]+/)?[A-Za-z0-9._-]+(@[a-z0-9_]+=[A-Za-z0-9._-]+"""
                    r"""(,[a-z0-9_]+=[A-Za-z0-9._-]+)*)?|gpumemnet/\\[[A-Za-z0-9_()', ]+\\])$")""",
                    "expected timm/NAME, torchvision/NAME, transformers/NAME or gpumemnet/LAYERS, such as "
                    "timm/resnet50; for any other model give spec.model.features as `carpool graph` prints them",
                    "'expected timm/NAME, torchvision/NAME, transformers/NAME or gpumemnet/LAYERS, such as "
                    "timm/resnet50, found ' + self + "
                    "'; for any other model give spec.model.features as `carpool graph` prints them'",
                )
            ],
        ),
    ]
    input: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]],
            field(
                "Shape of one sample, without the batch, such as [3, 224, 224]. The model's own when left out.",
                schema=ATOMIC,
                min_length=1,
                max_length=4,
            ),
        ]
        | None
    ) = None
    num_classes: (
        Annotated[int, field("Outputs of the classifier. The model's own when left out.", ge=1, le=1_000_000)] | None
    ) = None


class GraphLayer(Resource, frozen=True, kw_only=True):
    """One layer of an inline model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(self.kind in ['Linear', 'Conv2d']) || (has(self.out) && dyn(self.out) != null)",
            "a Linear or Conv2d layer needs `out`: the number of its output features or channels",
        ),
        Rule(
            "!(self.kind in ['Conv2d', 'MaxPool2d', 'AvgPool2d']) || (has(self.kernel) && dyn(self.kernel) != null)",
            "a Conv2d, MaxPool2d or AvgPool2d layer needs `kernel`: its kernel size",
        ),
    )

    kind: Annotated[
        str,
        field(
            "Name of the torch.nn layer.",
            schema={
                "enum": [
                    "Linear",
                    "Conv2d",
                    "BatchNorm2d",
                    "LayerNorm",
                    "ReLU",
                    "GELU",
                    "Tanh",
                    "MaxPool2d",
                    "AvgPool2d",
                    "Flatten",
                    "Dropout",
                ]
            },
        ),
    ]
    out: Annotated[int, field("Output features or channels (Linear, Conv2d).", ge=1, le=1_000_000)] | None = None
    kernel: Annotated[int, field("Kernel size (Conv2d and pools).", ge=1, le=1024)] | None = None
    stride: Annotated[int, field("Stride (Conv2d and pools).", ge=1, le=1024)] | None = None
    padding: Annotated[int, field("Padding (Conv2d).", ge=0, le=1024)] | None = None


class GraphModel(Resource, frozen=True, kw_only=True):
    """A model written down layer by layer."""

    input: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]],
        field(
            "Shape of one sample, without the batch, such as [1, 28, 28].", schema=ATOMIC, min_length=1, max_length=4
        ),
    ]
    layers: Annotated[list[GraphLayer], field("Layers, in order.", schema=ATOMIC, min_length=1, max_length=2048)]


_GIVEN = "[{}].filter(given, given != '')".format(
    ", ".join(f"has(self.{one}) && self.{one} != null ? '{one}' : ''" for one in ("features", "catalog", "graph"))
)
"""CEL: names of the model sources that are given."""


class ModelSource(Resource, frozen=True, kw_only=True):
    """Where the model's graph comes from: one of the three. Left out altogether, the model is unknown."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"{_GIVEN}.size() == 1",
            "give exactly one of features, catalog and graph; leave out spec.model if the model is unknown",
        ),
    )

    features: (
        Annotated[ModelFeatures, field("The training step in numbers, as `carpool graph` prints them.")] | None
    ) = None
    catalog: (
        Annotated[CatalogModel, field("A published architecture by its name in timm, torchvision or transformers.")]
        | None
    ) = None
    graph: Annotated[GraphModel, field("The model written down layer by layer.")] | None = None
