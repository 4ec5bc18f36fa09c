"""Two convolutional networks as plain modules, for planning by name: VGG-13
(arXiv:1409.1556) and ResNet-50 (arXiv:1512.03385).
"""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    """`network(images)` with the cross entropy against `labels`: (loss, logits)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.network(images)
        return F.cross_entropy(logits, labels), logits


def vgg13(num_classes: int = 1000) -> nn.Module:
    """Configuration B of the paper, without batch normalisation; images are [N, 3, 224, 224]."""
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 128, 256, 512, 512):
        for _ in range(2):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
            width = out
        layers.append(nn.MaxPool2d(2, 2))
    hidden = [
        layer
        for in_features in (512 * 7 * 7, 4096)
        for layer in (nn.Linear(in_features, 4096), nn.ReLU(), nn.Dropout())
    ]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, num_classes))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is on the 3x3 convolution."""

    def __init__(self, width: int, inner: int, *, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.reduce, self.reduce_norm = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv, self.conv_norm = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.expand, self.expand_norm = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        is_plain = stride == 1 and width == out
        self.shortcut = (
            nn.Identity()
            if is_plain
            else nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.reduce_norm(self.reduce(x)))
        y = F.relu(self.conv_norm(self.conv(y)))
        return F.relu(self.expand_norm(self.expand(y)) + self.shortcut(x))


def resnet50(num_classes: int = 1000) -> nn.Module:
    """Images are [N, 3, H, W]."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 64
    for inner, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            layers.append(Bottleneck(width, inner, stride=stride if index == 0 else 1))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
