"""Which kernels stand for a weight: found by where the tensor lies, so that a compiled graph is the same for all.

An operator that named its kernel by a number would be another graph for every layer. The weight is its argument
instead, which it needs anyway where it has to be dense, and the kernels are looked up by the weight's place in memory
when it runs. A tensor that lies here stays alive, so that no other can have its address.

In-place changes are noticed by PyTorch's version counter of each tensor, at the cost of a comparison per call; the
weights are then compared with the kernels' by their fingerprint. A change through ``tensor.data`` is not counted, nor
is one of a tensor that was made in inference mode: call ``status`` after such a change.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lospmm.errors import BadMatrix, GpuFault, Unsupported
from lospmm.gpu.launcher import Launcher
from lospmm.kernel import Kernel
from lospmm.matrix.csr import from_dense
from lospmm.nn.dtypes import named, torch_dtype_of

#: The shape of the operand, whether ReLU follows, whether there is a residual, and the way of a window.
Call = tuple[tuple[int, ...], bool, bool, tuple[int, ...]]

#: What a template loads at a time, at most: a view of a tensor may begin where it cannot.
VECTOR_BYTES = 16

#: Where the elements of a tensor lie: its address, and the sizes and strides of its dimensions; nothing where there is
#: none.
Storage: TypeAlias = tuple[int, tuple[tuple[int, int], ...]] | None

#: What A and its bias are made of: the places of weight and mask, the groups, and the address of the bias.
Address: TypeAlias = tuple[Storage, Storage, int, int]


def address_of(weight: Tensor, mask: Tensor | None, bias: Tensor | None, groups: int = 1) -> Address:
    """Layers that share a weight share its kernels only if they read it in the same way: a transpose of it, some of its
    rows, or what another mask leaves of it is another A at the same address."""
    own = weight.data_ptr(), _layout(weight.shape, weight.stride())
    masked = None if mask is None else (mask.data_ptr(), _layout(mask.shape, mask.stride()))
    return own, masked, groups, 0 if bias is None else bias.data_ptr()


@lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Without dimensions of one element, whose strides mean nothing, and which images of one row have and rows have
    not."""
    return tuple((size, step) for size, step in zip(shape, stride, strict=True) if size != 1)


@dataclass(frozen=True, slots=True)
class ColumnBucket:
    """A kernel and the calls that it serves: those of at least ``least`` columns, up to its own."""

    kernel: Kernel
    call: Call
    out_shape: tuple[int, ...]
    least: int
    fuses: bool  # bias, ReLU and residual are in its code; else they are PyTorch's
    bias: str | None = None  # ``bias_digest`` of the one in its code


def bucket_of(kernel: Kernel, least: int, *, has_bias: bool, relu: bool, adds: bool) -> ColumnBucket:
    """A kernel for a layer that ends so: with all of that in its code, or nothing.

    Raises BadRequest where its files lack the bias, Unsupported where its code ends otherwise.
    """
    artifact = kernel.artifact
    m, k, n = (artifact.manifest[name] for name in ("m", "k", "n"))
    window, epilogue = artifact.convolution, artifact.epilogue()
    ends = epilogue.bias is not None, epilogue.relu, epilogue.residual
    if not epilogue.is_plain and ends != (has_bias, relu, adds):
        parts = [part for part, is_there in zip(("a bias", "ReLU", "a residual"), ends, strict=True) if is_there]
        raise Unsupported(f"its kernels end with {', '.join(parts)}, and it does not; sparsify_ the model again")
    fuses = not epilogue.is_plain or not (has_bias or relu or adds)
    bias = None if epilogue.bias is None else bias_digest(np.array(epilogue.bias, dtype=np.float32))
    if window is None:
        return ColumnBucket(kernel, ((k, n), relu, False, ()), (m, n), least, fuses, bias)
    shape = window.batch, window.channels, window.height, window.width
    way = (*window.stride, *window.padding, *window.dilation)
    return ColumnBucket(kernel, (shape, relu, adds, way), window.output_shape(m), least, fuses, bias)


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """What a layer's A and bias are made of: A is ``weight``, flattened to two dimensions, times ``mask``.

    Of a convolution in ``groups`` the rows of a group have only its channels: A is zero at the others.
    """

    weight: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    groups: int = 1

    @property
    def address(self) -> Address:
        return address_of(self.weight, self.mask, self.bias, self.groups)

    def matrix(self) -> np.ndarray:
        """A (m, k) as it is now, of float32, on the CPU."""
        weight = self.weight.detach()
        a = weight if self.mask is None else weight * self.mask.detach()
        own = a.flatten(1).float().cpu().numpy()
        if self.groups == 1:
            return own
        m, k = own.shape
        spread = np.zeros((self.groups, m // self.groups, self.groups, k), np.float32)
        each = np.arange(self.groups)
        spread[each, :, each] = own.reshape(self.groups, -1, k)
        return spread.reshape(m, -1)

    def bias_values(self) -> np.ndarray | None:
        """The bias (m,) as it is now, on the CPU."""
        return None if self.bias is None else self.bias.detach().float().cpu().numpy()

    def detached(self) -> "Tensors":
        """The same memory and the same version counters, without the parameters themselves."""
        mask, bias = (None if one is None else one.detach() for one in (self.mask, self.bias))
        return Tensors(self.weight.detach(), mask, bias, self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyKernel:
    """A bucket's kernel where its weight is: ``launcher`` on a GPU, the emulated runtime on a CPU."""

    bucket: ColumnBucket
    device: torch.device
    launcher: Launcher | None
    dtype: torch.dtype  # of B, C and the residual
    alignment_bytes: int  # that B must have; PyTorch's own tensors have it
    narrower: dict[int, Launcher] = field(default_factory=dict)  # by their blocks along x and z

    def for_columns(self, columns: int) -> "ReadyKernel":
        """For the first ``columns`` alone where blocks have their own: what else is in C may be anything."""
        if self.launcher is None or self.bucket.kernel.artifact.manifest["tile"] is None:
            return self
        shape = self.bucket.kernel.launch(columns)
        blocks = shape.grid[0] * shape.grid[2]
        if blocks not in self.narrower:
            self.narrower[blocks] = self.launcher.shaped(shape)
        return replace(self, launcher=self.narrower[blocks])

    def __call__(self, b: Tensor, residual: Tensor | None) -> Tensor:
        """C of a contiguous ``b`` of exactly the kernel's shape."""
        bucket = self.bucket
        if self.launcher is None:
            given = (b,) if residual is None or not bucket.fuses else (b, residual)
            return torch.from_numpy(bucket.kernel.run_on_cpu(*(one.float().numpy() for one in given))).to(self.dtype)
        c = torch.empty(bucket.out_shape, dtype=self.dtype, device=self.device)
        added = 0 if residual is None or not bucket.fuses else residual.data_ptr()
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            stream = torch._C._cuda_getCurrentRawStream(index)
            if self.launcher(stream, b.data_ptr(), c.data_ptr(), added):
                return c
        with torch.cuda.device(index):
            torch.cuda.set_device(index)  # which gives a thread its context
            if not self.launcher(torch.cuda.current_stream().cuda_stream, b.data_ptr(), c.data_ptr(), added):
                raise GpuFault(f"no context on {self.device}")
        return c


@dataclass(slots=True, eq=False)
class BoundKernels:
    """The kernels at one address. ``refusal`` says why all calls are dense, where they are."""

    name: str
    tensors: Tensors
    fingerprint: str
    bias: str | None
    ready: dict[Call, ReadyKernel] = field(default_factory=dict)
    versions: tuple[tuple[Tensor, int], ...] = ()
    refusal: str | None = None
    owners: int = 1
    warned: set[str] = field(default_factory=set)

    def is_current(self) -> bool:
        """Whether the weights are those of the kernels; looks at them again where they were written to."""
        for tensor, version in self.versions:
            if tensor._version != version:
                self.look()
                break
        return self.refusal is None

    def look(self) -> None:
        """Compare the weights, bit for bit, with those that the kernels were made of. Waits for the GPU."""
        if self.tensors.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self.refusal = "its weights were written to, and cannot be looked at while a CUDA graph is captured"
            return
        self.versions = tuple((one, one._version) for one in _tracked(self.tensors))
        self.refusal = difference(self.tensors, self.fingerprint, self.bias)

    def padded(self, shape: Sequence[int], rest: tuple[bool, bool, tuple[int, ...]]) -> ReadyKernel | None:
        """The kernel of the smallest bucket that holds an operand of two dimensions, at least as full as it must be."""
        if len(shape) != 2:
            return None
        k, n = shape
        fitting = [
            ready
            for call, ready in self.ready.items()
            if call[1:] == rest and len(call[0]) == 2 and call[0][0] == k and call[0][1] >= n >= ready.bucket.least
        ]
        return min(fitting, key=lambda ready: ready.bucket.call[0][1], default=None)

    def fewer_images(self, shape: Sequence[int], rest: tuple[bool, bool, tuple[int, ...]]) -> ReadyKernel | None:
        """The kernel for the fewest images that holds so many, of the same size, at least as full as it must be."""
        fitting = [
            ready
            for call, ready in self.ready.items()
            if call[1:] == rest and serves_images(call[0], ready.bucket.out_shape, ready.bucket.least, shape)
        ]
        return min(fitting, key=lambda ready: ready.bucket.call[0][0], default=None)

    def warn_once(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"lospmm: a layer is dense: {reason} (status of lospmm.nn lists which)", stacklevel=4)


def serves_images(most: tuple[int, ...], out_shape: tuple[int, ...], least: int, shape: Sequence[int]) -> bool:
    """Whether a convolution of inputs (batch, channels, height, width) ``most``, and no fewer than ``least`` pixels of
    its output, is one of ``shape`` too: as many images, or fewer."""
    if len(shape) != 4 or len(most) != 4 or tuple(shape[1:]) != most[1:]:
        return False
    return shape[0] == most[0] or (shape[0] < most[0] and shape[0] * out_shape[2] * out_shape[3] >= least)


#: Every weight that has kernels.
_BOUND: dict[Address, BoundKernels] = {}

#: Code that was loaded, by its sha256 and GPU. It stays: a CUDA graph that was captured may hold it.
_LAUNCHERS: dict[tuple[str, int], Launcher] = {}

find = _BOUND.get


def bind(name: str, tensors: Tensors, buckets: Sequence[ColumnBucket], *, emulate: bool) -> BoundKernels:
    """Have calls with this weight run on ``buckets``, until ``release``; ``emulate`` is for a weight on the CPU.

    Where they cannot be used there, the reason is in ``refusal``. Raises GpuFault where code cannot be loaded.
    """
    manifest = buckets[0].kernel.artifact.manifest
    kept, bias = tensors.detached(), bias_in(buckets)
    found = _BOUND.get(kept.address)
    if found is not None and (found.fingerprint, found.bias) == (manifest["fingerprint"], bias):
        bound = found
        bound.owners += 1
    else:
        bound = _BOUND[kept.address] = BoundKernels(name, kept, manifest["fingerprint"], bias)
    reason = misfit(kept.weight, buckets, emulate=emulate)
    if reason is None:
        for bucket in buckets:
            bound.ready[bucket.call] = _ready(bucket, kept.weight.device)
    bound.look()
    bound.refusal = bound.refusal or reason
    return bound


def release(bound: BoundKernels) -> None:
    """Forget a weight, once for each ``bind``."""
    bound.owners -= 1
    if bound.owners == 0 and _BOUND.get(bound.tensors.address) is bound:
        del _BOUND[bound.tensors.address]


def misfit(weight: Tensor, buckets: Sequence[ColumnBucket], *, emulate: bool) -> str | None:
    """Why the kernels cannot run where ``weight`` is, and as it is."""
    if weight.dtype is not (wanted := torch_dtype_of(buckets[0].kernel.artifact.manifest)):
        return f"its weights are {named(weight.dtype)}, and its kernels take {named(wanted)}"
    if weight.device.type == "cpu":
        how = "choice='sparse' of sparsify_, emulate=True of load_"
        return None if emulate else f"it is on the CPU; to emulate kernels there: {how}"
    if weight.device.type != "cuda":
        return f"it is on {weight.device}, and kernels run on NVIDIA GPUs"
    arch = buckets[0].kernel.artifact.manifest["arch"]
    own = "sm_{}{}".format(*torch.cuda.get_device_capability(weight.device))
    return None if arch.rstrip("a") == own else f"its kernels are for {arch}, and {weight.device} is {own}"


def difference(tensors: Tensors, fingerprint: str, bias: str | None) -> str | None:
    """Why these weights are not those of a kernel with this fingerprint and bias."""
    try:
        same = from_dense(tensors.matrix()).fingerprint == fingerprint
    except BadMatrix as error:
        return f"its weights cannot be used: {error}"
    if not same:
        return "its weights are not those that its kernels were tuned for; sparsify_ the model again"
    own = tensors.bias_values()
    if bias is not None and (own is None or bias_digest(own) != bias):
        return "its bias is not the one in the code of its kernels; sparsify_ the model again"
    return None


def bias_digest(bias: np.ndarray) -> str:
    """sha256 of a bias (m,) of float32; both zeros are one."""
    return hashlib.sha256(np.ascontiguousarray(bias + np.float32(0.0), dtype="<f4").tobytes()).hexdigest()


def bias_in(buckets: Sequence[ColumnBucket]) -> str | None:
    """The bias that is in the code of kernels, which is the same for all."""
    return next((bucket.bias for bucket in buckets if bucket.bias is not None), None)


def _tracked(tensors: Tensors) -> list[Tensor]:
    every = (tensors.weight, tensors.mask, tensors.bias)
    return [one for one in every if one is not None and not one.is_inference()]


def _alignment_bytes(manifest: Mapping[str, Any]) -> int:
    """Of B: what a thread loads at a time, where that is more than an element."""
    if manifest["tile"] is None:
        return VECTOR_BYTES
    columns: int = manifest["tile"]["thread_columns"]
    return 1 if columns == 1 else columns * torch_dtype_of(manifest).itemsize


def _ready(bucket: ColumnBucket, device: torch.device) -> ReadyKernel:
    manifest = bucket.kernel.artifact.manifest
    dtype, alignment_bytes = torch_dtype_of(manifest), _alignment_bytes(manifest)
    if device.type == "cpu":
        return ReadyKernel(bucket, device, None, dtype, 1)
    key = manifest["cubin_sha256"], device.index
    if key not in _LAUNCHERS:
        with torch.cuda.device(device):
            _LAUNCHERS[key] = Launcher(bucket.kernel.cubin, manifest["name"], bucket.kernel.launch())
    return ReadyKernel(bucket, device, _LAUNCHERS[key], dtype, alignment_bytes)
