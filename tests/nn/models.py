"""Small pruned models, and how they are tuned where there is no GPU: kernels for an H200, their code emulated."""

import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

#: Options of ``sparsify_``: everything that can be swapped is, and what is emulated later is not verified too.
EMULATED: MappingProxyType[str, Any] = MappingProxyType({"device": "h200", "choice": "sparse", "verify": "none"})

#: Relative to the largest element, of sums in float32 in another order.
MAX_ERROR = 1e-6


def pruned(*layers: nn.Module, share: float = 0.85) -> nn.Sequential:
    """The layers one after the other, each weight without its smallest elements, for good."""
    model = nn.Sequential(*layers).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            prune.l1_unstructured(module, "weight", share)
            prune.remove(module, "weight")
    return model


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(model: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
    """What the model computes in float64; call it before the model is tuned."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(*(one.double() for one in arguments))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return pruned(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16, bias=False))


class Mask(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask
