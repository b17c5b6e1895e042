"""The pruned layers as a user of torch.sparse has them: CSR weights, cuSPARSE on a GPU.

Linear layers and 1x1 convolutions only. Their inputs are brought features first, as ``torch.sparse.mm`` needs them,
and back; other convolutions stay dense.
"""

import warnings

import torch
from torch import Tensor, nn

from lospmm_datasets.networks import Pattern


class SparseLinear(nn.Module):
    """nn.Linear (..., k) to (..., m)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = csr(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        b = x.reshape(-1, x.shape[-1]).t().contiguous()  # row-major: cuSPARSE takes ten times as long for the other
        found = torch.sparse.mm(self.weight, b).t().unflatten(0, x.shape[:-1])
        return found if self.bias is None else found + self.bias


class SparsePointwise(nn.Module):
    """A 1x1 nn.Conv2d (batch, k, height, width) to (batch, m, height, width)."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight = csr(layer.weight.flatten(1))
        self.bias = layer.bias
        self.stride = layer.stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride[0], :: self.stride[1]]
        batch, _, height, width = x.shape
        found = (
            torch.sparse.mm(self.weight, x.transpose(0, 1).flatten(1)).view(-1, batch, height, width).transpose(0, 1)
        )
        return found if self.bias is None else found + self.bias[:, None, None]


def csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return weight.detach().to_sparse_csr()


def replace(model: nn.Module, patterns: dict[str, Pattern]) -> list[str]:
    """Put them in place of the pruned layers that can be so; gives the names of the others."""
    left = []
    for name in patterns:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            sparse: nn.Module = SparseLinear(layer)
        elif layer.kernel_size == (1, 1) and layer.padding == (0, 0):
            sparse = SparsePointwise(layer)
        else:
            left.append(name)
            continue
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, sparse)
    return left
