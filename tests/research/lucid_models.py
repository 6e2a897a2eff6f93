"""The ten models of Lucid's measurements that no catalog has, by their published sizes (S-Lab-System-Group/Lucid)."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from carpool_core.values import Optimizer
from carpool_predictor.catalog.recipes import Recipe
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu

POINTS = ((3, 64), (64, 128), (128, 1024))


def normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normed(inputs, outputs, 3, stride), normed(outputs, outputs, 3)
        self.shortcut = nn.Sequential() if inputs == outputs else normed(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(relu(self.first(x)))
        out += self.shortcut(x)
        return relu(out)


class Inverted(nn.Module):
    """MobileNetV2's block with ReLU, or with EfficientNet's squeeze and excitation of its outputs."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, *, squeezes: bool) -> None:
        super().__init__()
        inner = expansion * inputs
        self.expand, self.project = normed(inputs, inner, 1), normed(inner, outputs, 1)
        self.depthwise = normed(inner, inner, 3, stride, inner)
        self.shortcut = nn.Sequential() if inputs == outputs else normed(inputs, outputs, 1)
        self.adds, hidden = stride == 1, outputs // 16
        pair = (nn.Conv2d(outputs, hidden, 1), nn.Conv2d(hidden, outputs, 1)) if squeezes else ()
        self.squeeze = nn.ModuleList(pair)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(relu(self.depthwise(relu(self.expand(x)))))
        if not self.squeeze:
            return out + self.shortcut(x) if self.adds else out
        shortcut, (first, second) = self.shortcut(x) if self.adds else out, self.squeeze
        return out * second(relu(first(avg_pool2d(out, out.shape[-1])))).sigmoid() + shortcut


def blocks(stages: Iterable[tuple[int, int, int, int]], *, squeezes: bool) -> list[nn.Module]:
    """Return blocks of stages of expansion, outputs, blocks and stride of the first one."""
    found, inputs = list[nn.Module](), 32
    for expansion, outputs, count, stride in stages:
        for index in range(count):
            found.append(Inverted(inputs, outputs, 1 if index else stride, expansion, squeezes=squeezes))
            inputs = outputs
    return found


class Classifier(nn.Module):
    """A classifier of CIFAR-10's images: a stem, blocks, perhaps a last convolution, the mean and a linear layer."""

    def __init__(self, body: list[nn.Module], *widths: int) -> None:
        super().__init__()
        self.stem, self.body = normed(3, widths[0], 3), nn.Sequential(*body)
        self.last = normed(*widths[1:], 1) if len(widths) == 3 else None
        self.linear = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(relu(self.stem(x)))
        x = x if self.last is None else relu(self.last(x))
        found: Tensor = self.linear(avg_pool2d(x, x.shape[-1]).flatten(1))
        return found


def resnet18() -> nn.Module:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    return Classifier([Residual(a, b, 1 if a == b else 2) for a, b in pairwise(widths)], 64, 512)


def mobilenet_v2() -> nn.Module:
    stages = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    return Classifier(blocks(stages, squeezes=False), 32, 320, 1280)


def efficientnet() -> nn.Module:
    stages = ((16, 1, 2), (24, 2, 1), (40, 2, 2), (80, 3, 2), (112, 3, 1), (192, 4, 2), (320, 1, 2))
    body = blocks([(6 if width > 16 else 1, width, *rest) for width, *rest in stages], squeezes=True)
    return Classifier(body, 32, 320)


def dcgan() -> nn.Module:
    """Return generator and discriminator in a row: the generator's update, which has the peak."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride, padding in ((100, 512, 1, 0), (512, 256, 2, 1), (256, 128, 2, 1), (128, 64, 2, 1)):
        convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    layers += [nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh()]
    layers += [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for width in (64, 128, 256):
        convolution = nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False)
        layers += [convolution, nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(512, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten())


class PointNet(nn.Module):
    """PointNet's classifier with its transformation of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.features = self.trunk(nn.ReLU()), self.trunk(nn.Identity())
        self.to_matrix, self.classify = self.head(9), self.head(16, nn.Dropout(0.3))

    @staticmethod
    def trunk(last: nn.Module) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in POINTS:
            layers += [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1], last)

    @staticmethod
    def head(outputs: int, *dropout: nn.Module) -> nn.Sequential:
        first = (nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256))
        return nn.Sequential(*first, *dropout, nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, outputs))

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.to_matrix(self.transform(x).amax(2)).view(-1, 3, 3)
        turned = torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1)
        found: Tensor = self.classify(self.features(turned).amax(2))
        return found


class NeuMF(nn.Module):
    """Neural matrix factorization of MovieLens-1M."""

    def __init__(self) -> None:
        super().__init__()
        users, items = 6040, 3706
        self.tables = nn.ModuleList(nn.Embedding(n, width) for width in (32, 128) for n in (users, items))
        widths = (256, 128, 64, 32)
        pairs = pairwise(widths)
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())))
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other, user, item = (table(x[:, i % 2]) for i, table in enumerate(self.tables))
        found: Tensor = self.last(torch.cat((one * other, self.layers(torch.cat((user, item), -1))), -1))
        return found


def policy(inputs: int, *widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for one, other in pairwise((inputs, *widths)):
            layers += [nn.Linear(one, other), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


class Translation(nn.Module):
    """The base transformer between two vocabularies of Multi30k."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9521, 512), nn.Embedding(9521, 512)
        self.body, self.last = nn.Transformer(batch_first=True), nn.Linear(512, 9521, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self.source(x), self.target(x)))
        return found


class Answers(nn.Module):
    """BERT with a start and an end for each token, and attention as its implementation of then."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForQuestionAnswering

        self.inner: Any = BertForQuestionAnswering(BertConfig(attn_implementation="eager"))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(input_ids=x)
        return torch.stack((found.start_logits, found.end_logits), 1)


SGD, ADAM = Optimizer.SGD_MOMENTUM, Optimizer.ADAM
RECIPES = {
    "ResNet18": (Recipe("resnet18", resnet18, (3, 32, 32)), SGD),
    "MobileNetV2": (Recipe("mobilenet", mobilenet_v2, (3, 32, 32)), SGD),
    "EfficientNet": (Recipe("efficientnet", efficientnet, (3, 32, 32)), SGD),
    "DCGAN": (Recipe("dcgan", dcgan, (100, 1, 1)), ADAM),
    "PointNet": (Recipe("pointnet", PointNet, (3, 2500)), ADAM),
    "NeuMF": (Recipe("neumf", NeuMF, (2,), tokens=True), SGD),
    "PPO": (Recipe("ppo", policy(8, 64, 64, 5), (8,)), ADAM),
    "TD3": (Recipe("td3", policy(24, 400, 300, 4), (24,)), ADAM),
    "Transformer": (Recipe("transformer", Translation, (45,), tokens=True), ADAM),
    "BERT": (Recipe("bert", Answers, (384,), tokens=True), Optimizer.ADAMW),
}
"""Recipe and optimizer by the name in the measurements."""
