"""Kernels as tensors of bytes, which an operator of C++ runs without Python (docs/embedding.md).

    c = torch.ops.lospmm.apply(input, package, high, low, shape, residual)    (m, n) for (k, n), or a convolution's

A package holds what a launch needs and the cubin, so that an exported program has its kernels among its constants.
``high`` and ``low`` are the package's digest: the operator reads the package once for each GPU and finds it by these,
wherever a compiler moves it. It comes with the wheel lospmm-torch (``native/``); without it, exported programs need
``operator``.
"""

import hashlib
import importlib
import importlib.util
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lospmm.kernel import Kernel

#: ``Head`` of native/operators.cpp: magic, digest, grid, block, shared bytes, alignment, bytes of an element and of the
#: name, elements of B and C, bytes of the cubin.
_HEAD = struct.Struct("<8sqq8I3Q")
_MAGIC = b"LOSPMMP1"

#: Whether the operator is there.
IS_NATIVE = importlib.util.find_spec("lospmm_torch") is not None


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A kernel in bytes, (size,) uint8, and its digest in two numbers."""

    data: Tensor
    high: int
    low: int


def package_of(
    kernel: Kernel, *, b_elements: int, c_elements: int, element_bytes: int, alignment_bytes: int, device: torch.device
) -> Package:
    """Return the package of a kernel, on ``device``. B has to lie at multiples of ``alignment_bytes``."""
    launch, name = kernel.launch(), kernel.manifest["name"].encode()
    sizes = (*launch.grid, launch.block, launch.shared_bytes, alignment_bytes, element_bytes, len(name))
    numbers = (*sizes, b_elements, c_elements, len(kernel.cubin))
    high, low = struct.unpack("<qq", hashlib.sha256(repr(numbers).encode() + name + kernel.cubin).digest()[:16])
    content = _HEAD.pack(_MAGIC, high, low, *numbers) + name + kernel.cubin
    return Package(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device), high, low)


def _fake_apply(
    input: Tensor,
    package: Tensor,  # noqa: ARG001
    high: int,  # noqa: ARG001
    low: int,  # noqa: ARG001
    shape: Sequence[int],
    residual: Tensor | None = None,  # noqa: ARG001
) -> Tensor:
    return input.new_empty(shape)


if IS_NATIVE:
    importlib.import_module("lospmm_torch")  # which loads the operator
    torch.library.register_fake("lospmm::apply", _fake_apply)
    apply = torch.ops.lospmm.apply.default
