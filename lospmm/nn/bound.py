"""Kernels bound to a weight, found by its address, so that layers share one compiled graph.

An operator that named its kernel by a number would compile another graph for every layer. The weight is an argument
anyway, for dense calls, and its address in memory finds the kernels when the operator runs. A bound tensor stays alive,
so that no other tensor can take its address.

PyTorch's version counter of each tensor shows in-place changes, for one comparison per call; changed weights are then
compared with the kernels' by fingerprint. Changes through ``tensor.data``, and changes of tensors made in inference
mode, are not counted: call ``status`` after them.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lospmm.errors import BadMatrix, GpuFault
from lospmm.gpu.launcher import Launcher
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.nn.package import Package
from lospmm.problem.dtype import DTYPES, FLOAT32, Dtype
from lospmm.problem.launch import Launch

#: What selects a kernel: operand shape, ReLU or not, residual or not, and (stride, padding, dilation) of a convolution.
Call = tuple[tuple[int, ...], bool, bool, tuple[int, ...]]

#: Where the elements of a tensor lie: address, and size and stride of each dimension; None without a tensor.
Storage: TypeAlias = tuple[int, tuple[tuple[int, int], ...]] | None

#: Key of A and its bias: storage of weight and mask, number of groups, address of the bias.
Address: TypeAlias = tuple[Storage, Storage, int, int]


def address_of(weight: Tensor, mask: Tensor | None, bias: Tensor | None, groups: int = 1) -> Address:
    """Return the key of A and its bias.

    A transpose of a weight, some of its rows, or the weight under another mask is another A at the same address.
    """
    own = weight.data_ptr(), _layout(weight.shape, weight.stride())
    masked = None if mask is None else (mask.data_ptr(), _layout(mask.shape, mask.stride()))
    return own, masked, groups, 0 if bias is None else bias.data_ptr()


@lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of each dimension longer than 1; a row and an image of one row are then alike."""
    return tuple((size, step) for size, step in zip(shape, stride, strict=True) if size != 1)


#: PyTorch's type for each type name; float32 tensors may be multiplied as tf32.
_TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)

#: The type of kernel for each type of tensor.
_OURS = {torch.float32: FLOAT32, torch.float16: DTYPES["float16"], torch.bfloat16: DTYPES["bfloat16"]}


def named(dtype: torch.dtype) -> str:
    """Return the name of a type, as in float16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Tensor) -> Dtype | None:
    """Return the type of a tensor's kernels, or None for a type that no kernel takes."""
    return _OURS.get(tensor.dtype)


def torch_dtype_of(manifest: Mapping[str, Any]) -> torch.dtype:
    """Return the type of B and C of the kernel with this manifest."""
    return _TORCH[manifest["dtype"]]


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """Tensors of a layer's A and bias: A is ``weight``, flattened to two dimensions, times ``mask``.

    In a convolution with ``groups``, A is zero in the channels of other groups.
    """

    weight: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    groups: int = 1

    @property
    def address(self) -> Address:
        """Key of these tensors in the registry."""
        return address_of(self.weight, self.mask, self.bias, self.groups)

    @property
    def pointers(self) -> tuple[int, ...]:
        """Addresses of the tensors, 0 where there is none."""
        every = (self.weight, self.mask, self.bias)
        return tuple(0 if one is None else one.data_ptr() for one in every)

    def pruned(self) -> Tensor:
        """Return the current weight times its mask, as (m, k) without the zeros of other groups."""
        weight = self.weight.detach()
        return (weight if self.mask is None else weight * self.mask.detach()).flatten(1)

    def matrix(self) -> SparseMatrix:
        """Return the current A. Raises BadMatrix."""
        a = self.pruned()
        if self.groups == 1 and a.is_cuda and torch.isfinite(a).all():
            return compressed(a)
        own = a.float().cpu().numpy()
        m, k = own.shape
        spread = np.zeros((self.groups, m // self.groups, self.groups, k), np.float32)
        each = np.arange(self.groups)
        spread[each, :, each] = own.reshape(self.groups, -1, k)
        return from_dense(own if self.groups == 1 else spread.reshape(m, -1))

    def bias_values(self) -> np.ndarray | None:
        """Return the current bias (m,) as float32 on the CPU."""
        return None if self.bias is None else self.bias.detach().float().cpu().numpy()

    def detached(self) -> "Tensors":
        """Return views with the same memory and version counters that do not hold the parameters."""
        mask, bias = (None if one is None else one.detach() for one in (self.mask, self.bias))
        return Tensors(self.weight.detach(), mask, bias, self.groups)


def compressed(a: Tensor) -> SparseMatrix:
    """Return a finite (m, k) as a matrix, made by the device that has it: a GPU is faster than NumPy."""
    rows, columns = a.nonzero(as_tuple=True)
    offsets = functional.pad(torch.count_nonzero(a, dim=1).cumsum(0), (1, 0))
    arrays = [one.cpu().numpy() for one in (offsets, columns.int(), a[rows, columns].float())]
    for array in arrays:
        array.setflags(write=False)
    return SparseMatrix(a.shape[0], a.shape[1], *arrays)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyKernel:
    """A kernel on the device of its weight: loaded on a GPU, emulated on a CPU."""

    call: Call
    out_shape: tuple[int, ...]
    least: int  # columns of a call, at least
    fuses: bool  # bias, ReLU and residual are in its code; else PyTorch computes them
    device: torch.device
    dtype: torch.dtype  # of B, C and the residual
    alignment_bytes: int  # of B and the residual; PyTorch's own allocations have it
    launcher: Launcher | None  # None on a CPU
    shape_for: Callable[[int], Launch] | None  # the launch for the first columns; None if blocks span all columns
    emulated: Callable[..., np.ndarray]  # runs the kernel's text
    tokens_first: tuple[Launcher, bool] | None = None  # the same with C (n, m) in memory, and whether B is (n, k)
    package: Package | None = None  # for exported models, which take a kernel with the whole epilogue
    narrower: dict[int, Launcher] = field(default_factory=dict)  # by their blocks along x and z

    def for_columns(self, columns: int) -> "ReadyKernel":
        """Return a kernel that computes at least the first ``columns``; the rest of C may be anything."""
        if self.launcher is None or self.shape_for is None:
            return self
        shape = self.shape_for(columns)
        blocks = shape.grid[0] * shape.grid[2]
        if blocks not in self.narrower:
            self.narrower[blocks] = self.launcher.shaped(shape)
        return replace(self, launcher=self.narrower[blocks])

    def __call__(
        self, b: Tensor, residual: Tensor | None, layout: tuple[Any, Any] | None = None, to: Tensor | None = None
    ) -> Tensor:
        """Return C, as a tensor of this (shape, stride) if given, or as ``to``. The memory of ``b`` is just B."""
        added = residual if self.fuses else None
        if self.launcher is None:
            given = (b.as_strided((b.numel(),), (1,)).view(self.call[0]), *(() if added is None else (added,)))
            c = torch.from_numpy(self.emulated(*(one.float().numpy() for one in given))).to(self.dtype)
            c = c if layout is None else c.as_strided(*layout)
            return c if to is None else to.copy_(c)
        if (c := to) is None:
            c = b.new_empty(self.out_shape) if layout is None else b.new_empty_strided(*layout)
        at_residual = 0 if added is None else added.data_ptr()
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            stream = torch._C._cuda_getCurrentRawStream(index)
            if self.launcher(stream, b.data_ptr(), c.data_ptr(), at_residual):
                return c
        with torch.cuda.device(index):
            torch.cuda.set_device(index)  # gives this thread a context
            if not self.launcher(torch.cuda.current_stream().cuda_stream, b.data_ptr(), c.data_ptr(), at_residual):
                raise GpuFault(f"no context on {self.device}")
        return c


@dataclass(slots=True, eq=False)
class BoundKernels:
    """Kernels at one address; ``refusal`` says why every call is dense, or is None."""

    name: str
    tensors: Tensors
    fingerprint: str
    bias: str | None
    ready: dict[Call, ReadyKernel] = field(default_factory=dict)
    versions: tuple[tuple[Tensor, int], ...] = ()
    refusal: str | None = None
    owners: int = 1
    warned: set[str] = field(default_factory=set)
    pointers: tuple[int, ...] = field(init=False)  # of ``tensors``

    def __post_init__(self) -> None:
        self.pointers = self.tensors.pointers

    def is_current(self) -> bool:
        """Return whether the weights are those of the kernels; compare them again after a write."""
        for tensor, version in self.versions:
            if tensor._version != version:
                self.look()
                break
        return self.refusal is None

    def look(self, read: tuple[int, ...] | None = None) -> None:
        """Compare the weights, bit for bit, with those in the kernels; waits for the GPU.

        Weights still of the versions ``read`` are known to be the same.
        """
        if self.tensors.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self.refusal = "its weights were written to, and cannot be looked at while a CUDA graph is captured"
            return
        self.versions = tuple((one, one._version) for one in _tracked(self.tensors))
        is_known = read is not None and read == versions_of(self.tensors)
        self.refusal = None if is_known else difference(self.tensors, self.fingerprint, self.bias)

    def larger(self, shape: Sequence[int], rest: tuple[bool, bool, tuple[int, ...]]) -> ReadyKernel | None:
        """Return the kernel of the smallest N, or batch, that serves an input of this shape within one of its own."""
        fitting = [ready for call, ready in self.ready.items() if call[1:] == rest and _serves(ready, shape)]
        return min(fitting, key=lambda ready: math.prod(ready.call[0]), default=None)

    def warn_once(self, reason: str) -> None:
        """Warn that calls are dense, once for each reason."""
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"lospmm: a layer is dense: {reason} (status of lospmm.nn lists which)", stacklevel=4)


def _serves(ready: ReadyKernel, shape: Sequence[int]) -> bool:
    most = ready.call[0]
    if len(shape) == len(most) == 2:
        return shape[0] == most[0] and ready.least <= shape[1] <= most[1]
    return serves_images(most, ready.out_shape, ready.least, shape)


def serves_images(most: tuple[int, ...], out_shape: tuple[int, ...], least: int, shape: Sequence[int]) -> bool:
    """Return whether a convolution's kernel for inputs ``most`` serves inputs of ``shape``.

    Shapes are (batch, channels, height, width). Both differ in the batch alone: ``shape`` has as many images, or fewer
    that fill ``least`` output pixels.
    """
    if len(shape) != 4 or len(most) != 4 or tuple(shape[1:]) != most[1:]:
        return False
    return shape[0] == most[0] or (shape[0] < most[0] and shape[0] * out_shape[2] * out_shape[3] >= least)


#: Kernels of all weights.
_BOUND: dict[Address, BoundKernels] = {}

find = _BOUND.get


def hold(name: str, tensors: Tensors, fingerprint: str, bias: str | None) -> BoundKernels:
    """Return the entry for ``tensors``, until ``release``; layers that share a weight share it."""
    kept = tensors.detached()
    found = _BOUND.get(kept.address)
    if found is not None and (found.fingerprint, found.bias) == (fingerprint, bias):
        found.owners += 1
        return found
    made = _BOUND[kept.address] = BoundKernels(name, kept, fingerprint, bias)
    return made


def release(bound: BoundKernels) -> None:
    """Undo one ``hold``."""
    bound.owners -= 1
    if bound.owners == 0 and _BOUND.get(bound.tensors.address) is bound:
        del _BOUND[bound.tensors.address]


def difference(tensors: Tensors, fingerprint: str, bias: str | None) -> str | None:
    """Return why these weights are not those of a kernel with this fingerprint and bias, or None."""
    try:
        same = tensors.matrix().fingerprint == fingerprint
    except BadMatrix as error:
        return f"its weights cannot be used: {error}"
    if not same:
        return "its weights are not those that its kernels were tuned for; sparsify_ the model again"
    own = tensors.bias_values()
    if bias is not None and (own is None or bias_digest(own) != bias):
        return "its bias is not the one in the code of its kernels; sparsify_ the model again"
    return None


def bias_digest(bias: np.ndarray) -> str:
    """Return the sha256 of a float32 bias (m,), -0.0 counted as 0.0."""
    return hashlib.sha256(np.ascontiguousarray(bias + np.float32(0.0), dtype="<f4").tobytes()).hexdigest()


def versions_of(tensors: Tensors) -> tuple[int, ...] | None:
    """Return the version counters of the tensors; None for tensors of inference mode, which have none."""
    every = [one for one in (tensors.weight, tensors.mask, tensors.bias) if one is not None]
    return None if any(one.is_inference() for one in every) else tuple(one._version for one in every)


def _tracked(tensors: Tensors) -> list[Tensor]:
    every = (tensors.weight, tensors.mask, tensors.bias)
    return [one for one in every if one is not None and not one.is_inference()]
