"""MobileNetV2 (Sandler et al., CVPR 2018) for inference, batch norms folded into the convolutions."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

#: Table 2 of the paper: expansion, channels, blocks, stride.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@dataclass(frozen=True, slots=True)
class Size:
    """MobileNetV2 1.0x, unless said otherwise."""

    stages: tuple[tuple[int, int, int, int], ...] = STAGES
    stem: int = 32
    last: int = 1280
    classes: int = 1000


class InvertedResidual(nn.Module):
    """Expand by a 1x1, a depthwise 3x3, project by a 1x1."""

    def __init__(self, channels: tuple[int, int], expansion: int, stride: int) -> None:
        super().__init__()
        before, after = channels
        inner = before * expansion
        self.expand = nn.Identity() if expansion == 1 else nn.Sequential(nn.Conv2d(before, inner, 1), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner), nn.ReLU6())
        self.project = nn.Conv2d(inner, after, 1)
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        found = self.project(self.depthwise(self.expand(x)))
        return found + x if self.adds else found


class MobileNet(nn.Module):
    """Images (batch, 3, height, width) to classes (batch, classes)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        before = size.stem
        for expansion, after, count, stride in size.stages:
            for number in range(count):
                blocks.append(InvertedResidual((before, after), expansion, 1 if number else stride))
                before = after
        self.stem = nn.Sequential(nn.Conv2d(3, size.stem, 3, stride=2, padding=1), nn.ReLU6())
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(before, size.last, 1), nn.ReLU6())
        self.classifier = nn.Linear(size.last, size.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))
