"""Networks of the size of a test, built like those that lightly's modules use."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models import VisionTransformer

FEATURES = 8
IMAGE_SIZE = 12


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)


class SmallResNet(nn.Module):
    """As torchvision's: children in the order of forward, the last one is ``fc``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, FEATURES, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(FEATURES)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _Residual(FEATURES)
        self.layer2 = _Residual(FEATURES)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc: nn.Module = nn.Linear(FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(x.flatten(1))


def without_classifier() -> nn.Module:
    """As the examples take a ResNet: its children but the last, in a row."""
    return nn.Sequential(*list(SmallResNet().children())[:-1])


def with_identity() -> nn.Module:
    """As the benchmarks take it: whole, with nothing in place of the classifier."""
    resnet = SmallResNet()
    resnet.fc = nn.Identity()
    return resnet


def small_vit() -> VisionTransformer:
    """The class token's features."""
    vit = VisionTransformer(
        image_size=IMAGE_SIZE, patch_size=4, num_layers=2, num_heads=2, hidden_dim=FEATURES,
        mlp_dim=16,
    )  # fmt: skip
    vit.heads = nn.Identity()
    return vit
