"""datasets/shapes.toml against the networks themselves, built anew from the tables of their papers."""

import itertools
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lospmm.errors import BadRequest
from lospmm_datasets.shapes import read_shapes

FILE = Path(__file__).parents[2] / "datasets" / "shapes.toml"
TABLE = read_shapes(FILE)
SHAPES = [(network.name, shape) for network in TABLE.networks for shape in network.shapes]

#: Section 7.1: the least and the greatest M, K and N.
RANGES = ((64, 3072), (27, 3072), (512, 50176))

#: In the file although the rule leaves them out, and the queries, keys and values that are also there one by one.
BEYOND = {(32, 27, 50176), (2304, 768, 4096)}


class Layer(NamedTuple):
    name: str
    out_channels: int
    in_channels: int
    kernel: int
    out_size: tuple[int, ...]


def bert() -> Iterator[Layer]:
    for block in range(12):
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            yield Layer(f"encoder.layer.{block}.{name}", 768, 768, 1, (128,))
        yield Layer(f"encoder.layer.{block}.intermediate.dense", 3072, 768, 1, (128,))
        yield Layer(f"encoder.layer.{block}.output.dense", 768, 3072, 1, (128,))


def resnet() -> Iterator[Layer]:
    yield Layer("conv1", 64, 3, 7, (112, 112))
    channels, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}."
            yield Layer(f"{name}conv1", width, channels, 1, (size, size))
            if block == 0 and stage > 1:
                size //= 2  # the stride of the stage
            yield Layer(f"{name}conv2", width, width, 3, (size, size))
            yield Layer(f"{name}conv3", 4 * width, width, 1, (size, size))
            if block == 0:
                yield Layer(f"{name}downsample.0", 4 * width, channels, 1, (size, size))
            channels = 4 * width


def shufflenet() -> Iterator[Layer]:
    """Depthwise convolutions left out: each unit has 1x1 convolutions on half of its channels."""
    yield Layer("conv1.0", 24, 3, 3, (112, 112))
    channels = 24
    for stage, (width, units, size) in enumerate(((116, 4, 28), (232, 8, 14), (464, 4, 7)), start=2):
        half = width // 2
        yield Layer(f"stage{stage}.0.branch1.2", half, channels, 1, (size, size))
        yield Layer(f"stage{stage}.0.branch2.0", half, channels, 1, (2 * size, 2 * size))
        yield Layer(f"stage{stage}.0.branch2.5", half, half, 1, (size, size))
        for unit, place in itertools.product(range(1, units), (0, 5)):
            yield Layer(f"stage{stage}.{unit}.branch2.{place}", half, half, 1, (size, size))
        channels = width
    yield Layer("conv5.0", 1024, 464, 1, (7, 7))


def mobilenet() -> Iterator[Layer]:
    """Table 2: expansion, channels, repetitions and stride; depthwise convolutions left out."""
    yield Layer("features.0.0", 32, 3, 3, (112, 112))
    channels, size, number = 32, 112, 1
    for expansion, width, blocks, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            inner = expansion * channels
            if expansion > 1:
                yield Layer(f"features.{number}.conv.0.0", inner, channels, 1, (size, size))
            if block == 0:
                size //= stride
            yield Layer(f"features.{number}.conv.{1 if expansion == 1 else 2}", width, inner, 1, (size, size))
            channels, number = width, number + 1
    yield Layer("features.18.0", 1280, 320, 1, (7, 7))


NETWORKS = {"BERT-base": bert, "ResNet-50": resnet, "ShuffleNetV2": shufflenet, "MobileNetV2": mobilenet}


def batch_of(network: str, layer: Layer) -> int:
    return 32 if network == "BERT-base" else 4 if layer.out_size == (112, 112) else 16


def gemm_of(network: str, layer: Layer) -> tuple[int, int, int]:
    k = layer.in_channels * layer.kernel * layer.kernel
    return layer.out_channels, k, batch_of(network, layer) * math.prod(layer.out_size)


def test_there_are_41_shapes_and_205_kernels() -> None:
    assert len({shape.gemm for _, shape in SHAPES}) == len(SHAPES) == 41
    assert TABLE.sparsities == (0.7, 0.8, 0.9, 0.95, 0.98)
    assert len(SHAPES) * len(TABLE.sparsities) == 205
    assert [network.name for network in TABLE.networks] == list(NETWORKS)


@pytest.mark.parametrize(("network", "shape"), SHAPES, ids=lambda value: getattr(value, "layer", value))
def test_each_shape_follows_from_its_layer(network: str, shape: Any) -> None:
    assert shape.m == shape.out_channels
    assert shape.k == shape.in_channels * shape.kernel * shape.kernel
    assert shape.n == shape.batch * math.prod(shape.out_size)
    if shape.layer == "encoder.layer.0.attention.self":  # query, key and value as one
        assert shape.out_channels == 3 * 768 and shape.count == 12
        return
    layers = {layer.name: layer for layer in NETWORKS[network]()}
    layer = layers[shape.layer]
    assert layer == Layer(shape.layer, shape.out_channels, shape.in_channels, shape.kernel, shape.out_size)
    assert shape.batch == batch_of(network, layer)
    alike = [name for name, other in layers.items() if gemm_of(network, other) == shape.gemm]
    assert (alike[0], len(alike)) == (shape.layer, shape.count)


def test_they_are_all_that_the_ranges_of_the_paper_leave() -> None:
    of_networks = {gemm_of(network, layer) for network, layers in NETWORKS.items() for layer in layers()}
    within = {
        gemm for gemm in of_networks if all(low <= x <= high for x, (low, high) in zip(gemm, RANGES, strict=True))
    }
    assert len(within) == 39
    assert {shape.gemm for _, shape in SHAPES} == within | BEYOND
    m, k, n = (sorted(figure) for figure in zip(*within, strict=True))
    assert (m[0], m[-1], k[-1], n[0], n[-1]) == (64, 3072, 3072, 784, 50176)
    assert min(shape.k for _, shape in SHAPES) == 27


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = FILE.read_text()
    assert text.count(old) == 1, old
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(old, new))
    with pytest.raises(BadRequest) as refused:
        read_shapes(file)
    message = str(refused.value)
    assert message.startswith(f"{file}: ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("m = 3072, k = 768,  n = 4096", "m = 3072, k = 769,  n = 4096", "encoder.layer.0.intermediate.dense"),
        ("m = 3072, k = 768,  n = 4096", "m = 3072, k = 768", "networks.0.shapes.2.n"),
        ("m = 3072, k = 768,  n = 4096", "m = 3072, k = 768, n = 4096.0", "networks.0.shapes.2.n"),
        ("m = 3072, k = 768,  n = 4096", "m = 3072, k = 768, n = 4096, o = 1", "networks.0.shapes.2.o"),
        ("m = 2304, k = 768,  n = 4096", "m = 2304, k = 768,  n = ", "expected TOML"),
        ("[0.7, 0.8, 0.9, 0.95, 0.98]", "[0.7, 1.0]", "sparsities.1"),
        ("[0.7, 0.8, 0.9, 0.95, 0.98]", "70", "sparsities"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert named in changed(tmp_path, old, new)


def test_a_shape_may_not_be_there_twice(tmp_path: Path) -> None:
    line = next(line for line in FILE.read_text().splitlines() if "layer4.1.conv1" in line)
    assert "(512, 2048, 784) are there more than once" in changed(tmp_path, line, f"{line}\n{line}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        read_shapes(tmp_path / "none.toml")


def test_the_file_holds_nothing_that_the_reader_does_not_see() -> None:
    given = tomllib.loads(FILE.read_text())
    assert sum(len(network["shapes"]) for network in given["networks"]) == len(SHAPES)
