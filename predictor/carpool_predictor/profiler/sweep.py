"""What is measured, in an order of which any beginning is a fair sample: a budget may end it anywhere."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from carpool_core.values import Optimizer, Precision

from carpool_predictor.profiler.ports import Workload

Mode = Literal["time-slicing", "mps"]

_MODELS = (
    "timm/resnet18", "timm/resnet50", "timm/resnet101", "timm/wide_resnet50_2", "timm/resnext50_32x4d",
    "timm/densenet121", "timm/vgg16", "timm/mobilenetv2_100", "timm/mobilenetv3_large_100", "timm/efficientnet_b0",
    "timm/efficientnet_b3", "timm/regnety_032", "timm/convnext_tiny", "timm/convnext_base", "timm/inception_v3",
    "timm/xception41", "timm/dpn68", "timm/hrnet_w18", "timm/res2net50_26w_4s", "timm/ghostnet_100",
    "timm/mnasnet_100", "timm/dla34", "timm/repvgg_a2", "timm/vit_tiny_patch16_224", "timm/vit_small_patch16_224",
    "timm/vit_base_patch16_224", "timm/deit_small_patch16_224", "timm/swin_tiny_patch4_window7_224",
    "timm/swin_base_patch4_window7_224", "timm/mixer_b16_224", "timm/beit_base_patch16_224", "timm/cait_xxs24_224",
    "timm/coat_lite_tiny", "timm/pit_s_224", "timm/levit_256", "timm/twins_svt_small", "timm/poolformer_s24",
    "timm/maxvit_tiny_rw_224", "torchvision/resnet50", "torchvision/squeezenet1_1", "torchvision/shufflenet_v2_x1_0",
    "torchvision/googlenet",
)  # fmt: skip
_BATCHES = (4, 8, 16, 32, 64, 128, 256)
_OPTIMIZERS = (Optimizer.SGD_MOMENTUM, Optimizer.ADAMW)
_PRECISIONS = (Precision.FP32, Precision.BF16_MIXED)
_SOLOS_A_PAIR = 5
_BATCHES_OF_PAIRS = (8, 32, 64)
SWEEPS = ("default", "solo", "pairs")


@dataclass(frozen=True, slots=True)
class Point:
    """One row to be: a job alone, or two beside each other."""

    workload: Workload
    partner: Workload | None = None
    mode: Mode | None = None

    @property
    def key(self) -> str:
        """Return what tells rows apart; equal in every run."""
        return self.workload.key if self.partner is None else f"{self.workload.key}+{self.partner.key}|{self.mode}"


def points(sweep: str) -> Iterator[Point]:
    """Name every point of a sweep, in its order.

    Raises:
        ValueError: There is no such sweep.
    """
    if sweep not in SWEEPS:
        raise ValueError(f"expected a sweep out of {', '.join(SWEEPS)}, found {sweep!r}")
    solos = [] if sweep == "pairs" else _shuffled([Point(w) for w in _workloads(_BATCHES)])
    pairs = [] if sweep == "solo" else _pairs()
    while solos or pairs:
        yield from solos[:_SOLOS_A_PAIR]
        yield from pairs[:1]
        solos, pairs = solos[_SOLOS_A_PAIR:], pairs[1:]


def _workloads(batches: Sequence[int]) -> list[Workload]:
    return [
        Workload(model=model, batch_size=batch, optimizer=optimizer, precision=precision)
        for model in _MODELS
        for batch in batches
        for optimizer in _OPTIMIZERS
        for precision in _PRECISIONS
    ]


def _pairs() -> list[Point]:
    """Pair every job with one other, in both modes one after the other: they differ in nothing else."""
    jobs = _shuffled([Point(w) for w in _workloads(_BATCHES_OF_PAIRS)])
    found = []
    for one, other in zip(jobs[::2], jobs[1::2], strict=False):
        modes: tuple[Mode, Mode] = ("time-slicing", "mps")
        found += [Point(one.workload, other.workload, mode) for mode in modes]
    return found


def _shuffled(given: list[Point]) -> list[Point]:
    """Mix, the same way everywhere and whatever is added later."""
    return sorted(given, key=lambda point: hashlib.sha256(point.key.encode()).digest())
