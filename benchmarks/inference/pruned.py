"""The networks of ``benchmarks.networks``, their random weights and what is pruned of them.

A pruned layer's patterns are those of ``lospmm_datasets.networks``; the kept weights are scaled so that its outputs are
as large as before pruning. To add a network, write its module beside this one and add a row to ``CASES``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benchmarks.inference import bert, decoder, mobilenet, resnet
from lospmm_datasets.networks import SPREADS, Pattern, RealPattern, WantedPattern, depth_sparsities, drawn, real

SEED = 0

#: Tokens of a sentence, of whose matrices the paper has the shapes.
TOKENS = 128


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and an input of so many sentences or images."""

    model: Callable[[], nn.Module]
    example: Callable[[int], Tensor]

    def repeated(self, count: int) -> "Setup":
        """The model so many times, one after the other."""
        return self if count == 1 else replace(self, model=lambda: nn.Sequential(*(self.model() for _ in range(count))))


@dataclass(frozen=True, slots=True)
class Case:
    """A network at a sparsity. ``toy`` is the same in small, for tests; ``origin`` says where the patterns are from.

    One that takes ``tokens`` at a time has the kernels of all these numbers at once.
    """

    network: str
    sparsity: float
    full: Setup
    toy: Setup
    patterns: Callable[[nn.Module, float, Sequence[RealPattern]], dict[str, Pattern]]
    origin: str
    tokens: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.network} {self.sparsity:.0%}"


@dataclass(frozen=True, slots=True, eq=False)
class Pruned:
    """A model for inference, inputs by their images, sentences or tokens, and the patterns of pruned layers by name."""

    model: nn.Module
    examples: Mapping[int, Tensor]
    patterns: Mapping[str, Pattern]

    @property
    def example(self) -> Tensor:
        """The first input."""
        return next(iter(self.examples.values()))

    @property
    def sparsity(self) -> float:
        """Of all weights of the pruned layers."""
        masks = [pattern.mask for pattern in self.patterns.values()]
        return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.size for mask in masks)


def build(
    setup: Setup, case: Case, batch: int, found: Sequence[RealPattern] = (), dtype: torch.dtype = torch.float32
) -> Pruned:
    """The same weights, patterns and inputs every time, on the CPU."""
    torch.manual_seed(SEED)
    model = setup.model().eval()
    examples = {count: setup.example(count) for count in case.tokens or (batch,)}
    patterns = case.patterns(model, case.sparsity, found)
    for name, pattern in patterns.items():
        prune(model.get_submodule(name), pattern)
    given = {count: one.to(dtype) if one.is_floating_point() else one for count, one in examples.items()}
    return Pruned(model.to(dtype), given, MappingProxyType(patterns))


@torch.no_grad()
def prune(layer: nn.Module, pattern: Pattern) -> None:
    weight = layer.weight
    mask = torch.from_numpy(pattern.mask).view(weight.shape)
    weight *= mask / math.sqrt(float(pattern.mask.mean()))


def sizes(layer: nn.Module, sparsity: float) -> WantedPattern:
    weight = layer.weight
    return WantedPattern(weight.shape[0], weight[0].numel(), sparsity, weight[0, 0].numel())


def by_depth(model: nn.Module, sparsity: float, _found: Sequence[RealPattern]) -> dict[str, Pattern]:
    """BERT, by movement pruning: all linear layers of the encoder, the lower ones less; rows differ as learned."""
    layers = model.encoder.layer
    patterns = {}
    for depth, one in enumerate(depth_sparsities(sparsity, len(layers))):
        for name, layer in layers[depth].named_modules():
            if isinstance(layer, nn.Linear):
                wanted = sizes(layer, one)
                patterns[f"encoder.layer.{depth}.{name}"] = drawn(wanted, SPREADS["learned"], SEED + len(patterns))
    return patterns


def real_or_drawn(model: nn.Module, sparsity: float, found: Sequence[RealPattern]) -> dict[str, Pattern]:
    """ResNet-50: all convolutions but the first, as the paper has it; real patterns where there is one of the shape."""
    patterns: dict[str, Pattern] = {}
    uses: dict[WantedPattern, int] = {}
    for name, layer in convolutions(model):
        if name == "conv1":
            continue
        wanted = sizes(layer, sparsity)
        use = uses[wanted] = uses.get(wanted, -1) + 1
        given = real(found, wanted, use)
        patterns[name] = given or drawn(wanted, SPREADS["magnitude"], SEED + len(patterns))
    return patterns


def pointwise(model: nn.Module, sparsity: float, _found: Sequence[RealPattern]) -> dict[str, Pattern]:
    """A decoder's linear layers; of MobileNetV2 the 1x1 convolutions, most of its work."""
    layers = [
        (name, one)
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear | nn.Conv2d) and one.weight[0, 0].numel() == 1 and name != "classifier"
    ]
    return {
        name: drawn(sizes(layer, sparsity), SPREADS["magnitude"], SEED + number)
        for number, (name, layer) in enumerate(layers)
    }


def convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.groups == 1:
            yield name, layer


def _sentences(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(vocabulary, (batch, length))


def _decoder_layer(size: decoder.Size) -> Setup:
    return Setup(lambda: decoder.Layer(size), lambda tokens: torch.randn(1, tokens, size.hidden))


def _images(side: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, side, side)


_BERT = Setup(lambda: bert.Bert(bert.Size()), _sentences(bert.Size().vocabulary, TOKENS))
_TOY_BERT = Setup(
    lambda: bert.Bert(bert.Size(layers=1, hidden=16, heads=2, intermediate=32, vocabulary=50, positions=16)),
    _sentences(50, 8),
)
_RESNET = Setup(lambda: resnet.ResNet(resnet.Size()), _images(224))
_TOY_RESNET = Setup(lambda: resnet.ResNet(resnet.Size(stages=((1, 8), (1, 8)), stem=8, classes=10)), _images(16))
_MOBILENET = Setup(lambda: mobilenet.MobileNet(mobilenet.Size()), _images(224))
_TOY_MOBILENET = Setup(
    lambda: mobilenet.MobileNet(mobilenet.Size(stages=((1, 16, 1, 1), (2, 16, 2, 2)), stem=16, last=32, classes=10)),
    _images(16),
)
_DECODER = Setup(lambda: decoder.Decoder(decoder.Size()), _sentences(decoder.Size().vocabulary, TOKENS))
_LLAMA = _decoder_layer(decoder.LLAMA_2_7B)
_TOY_LLAMA = _decoder_layer(decoder.Size(hidden=32, intermediate=48, heads=2, key_heads=1))

_DRAWN = "drawn like layers pruned by magnitude"
_REAL = "real patterns of DLMC and SparseRT where the shape has one within 1.5 points, others drawn like them"

CASES = (
    Case(
        "BERT-base",
        0.9099,  # section 7.4
        _BERT,
        _TOY_BERT,
        by_depth,
        "drawn: movement pruning as far as it is published, lower layers denser (first twice the last, a choice)",
    ),
    Case("ResNet-50", 0.9, _RESNET, _TOY_RESNET, real_or_drawn, _REAL),
    Case("ResNet-50", 0.95, _RESNET, _TOY_RESNET, real_or_drawn, _REAL),
    Case("MobileNetV2", 0.9, _MOBILENET, _TOY_MOBILENET, pointwise, _DRAWN),
    Case("Llama-2-7B layer", 0.7, _LLAMA, _TOY_LLAMA, pointwise, _DRAWN, tokens=(1, 8, 512)),
)

#: Networks in full size, for ``alike``.
NETWORKS: Mapping[str, Setup] = MappingProxyType(
    {"ResNet-50": _RESNET, "BERT-base": _BERT, "MobileNetV2": _MOBILENET, "SmolLM2-135M": _DECODER}
)


@torch.no_grad()
def alike(network: str, batch: int, sparsity: float) -> tuple[nn.Module, Tensor]:
    """One of ``NETWORKS``, pruned but for depthwise layers and embeddings, and its input.

    Layers of one shape have equal weights, and so the same kernel.
    """
    model = NETWORKS[network].model().eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and getattr(layer, "groups", 1) == 1:
            torch.manual_seed(SEED)
            layer.weight.normal_().mul_(torch.rand(layer.weight.shape) >= sparsity)
            if layer.bias is not None:
                layer.bias.zero_()
    return model, NETWORKS[network].example(batch)
