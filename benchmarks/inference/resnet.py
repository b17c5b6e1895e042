"""ResNet-50 (He et al., CVPR 2016) for inference, its modules named as in torchvision's resnet50.

Batch norms are folded into the convolutions, which have a bias instead, as inference engines do. The stride of a stage
is on its first 3x3 convolution, as in torchvision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """ResNet-50, unless said otherwise. A stage is (blocks, channels)."""

    stages: tuple[tuple[int, int], ...] = ((3, 64), (4, 128), (6, 256), (3, 512))
    expansion: int = 4
    stem: int = 64
    classes: int = 1000


class Bottleneck(nn.Module):
    """Channels: those that come in, those of the middle, those that go out."""

    def __init__(self, channels: tuple[int, int, int], stride: int) -> None:
        super().__init__()
        before, inner, after = channels
        self.conv1 = nn.Conv2d(before, inner, 1)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1)
        self.conv3 = nn.Conv2d(inner, after, 1)
        shrinks = stride > 1 or before != after
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride)) if shrinks else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        return functional.relu(self.conv3(inner) + self.downsample(x))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to classes (batch, classes)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, size.stem, 7, stride=2, padding=3)
        before = size.stem
        for number, (blocks, inner) in enumerate(size.stages, start=1):
            after = inner * size.expansion
            stride = 1 if number == 1 else 2
            first = Bottleneck((before, inner, after), stride)
            others = (Bottleneck((after, inner, after), 1) for _ in range(blocks - 1))
            self.add_module(f"layer{number}", nn.Sequential(first, *others))
            before = after
        self.stages = len(size.stages)
        self.fc = nn.Linear(before, size.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 3, stride=2, padding=1)
        for stage in self._stages():
            x = stage(x)
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    def _stages(self) -> Iterator[nn.Module]:
        for number in range(1, self.stages + 1):
            yield self.get_submodule(f"layer{number}")
