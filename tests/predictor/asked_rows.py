"""Rows as users write them."""

from typing import Any

SGD = {"batchSize": 64, "optimizer": "sgd-momentum", "precision": "fp32", "activationCheckpointing": False}


def row(id_: Any = "a", name: str = "timm/vgg11_bn", **changes: Any) -> dict[str, Any]:
    return {"id": id_, "catalog": {"name": name}, "training": SGD, "gpu": "A100-SXM4-40GB", **changes}
