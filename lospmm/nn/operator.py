"""PyTorch operators ``lospmm::spmm`` and ``lospmm::conv2d``, for inference.

    c = torch.ops.lospmm.spmm(b, weight, mask, bias, residual, relu)      relu((weight * mask) @ b + residual + bias)

B is (k, n) and C is (m, n), both row-major: features first. The weight's kernel for B's shape runs on the current
stream. Without one the dense product runs, on CPU and GPU alike, so that no result depends on whether there is a
kernel.
A B with fewer columns than a kernel's N is copied into a B of that N, whose other columns do not matter, and the kernel
is launched for the blocks of these columns alone.

The operators are written in Python below PyTorch's dispatcher, since ``torch.library.custom_op`` adds some ten
microseconds to a call. They allocate only C, through PyTorch, and never wait for the GPU: CUDA graphs can capture them.
There is no derivative: calls that need one raise RuntimeError.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lospmm.nn.bound import BoundKernels, ReadyKernel, address_of, find, named

_NAMESPACE = "lospmm"
_SPMM = (
    "spmm(Tensor b, Tensor weight, Tensor? mask=None, Tensor? bias=None, Tensor? residual=None, bool relu=False) "
    "-> Tensor"
)
_CONV2D = (
    "conv2d(Tensor input, Tensor weight, Tensor? mask, Tensor? bias, Tensor? residual, bool relu, "
    "int[2] stride, int[2] padding, int[2] dilation) -> Tensor"
)

#: The library ``torch.ops.lospmm``, kept for the life of the process.
LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
LIBRARY.define(_SPMM, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(_CONV2D, tags=(torch.Tag.pt2_compliant_tag,))


def _spmm(
    b: Tensor,
    weight: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    _refuse_gradients(b, weight, bias, residual)
    bound = find(address_of(weight, mask, bias))
    if bound is not None and (c := _by_kernel(bound, b, bias, residual, relu=relu)) is not None:
        return c
    _check_product(b, weight, residual)
    if bound is not None:
        bound.warn_once(bound.refusal or _unserved(bound, b, residual))
    return dense_product(b, weight, mask, bias, residual, relu=relu)


def _conv2d(
    input: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    _refuse_gradients(input, weight, bias, residual)
    bound = find(address_of(weight, mask, bias, input.shape[1] // weight.shape[1] or 1))
    if bound is not None:
        way_of_call = (*stride, *padding, *dilation)
        if (c := _by_kernel(bound, input, bias, residual, relu=relu, way=way_of_call)) is not None:
            return c
        bound.warn_once(bound.refusal or _unserved(bound, input, residual))
    way = tuple(stride), tuple(padding), tuple(dilation)
    return dense_convolution(input, weight, mask, bias, residual, relu=relu, way=way)


def _by_kernel(
    bound: BoundKernels,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    relu: bool,
    way: tuple[int, ...] = (),
) -> Tensor | None:
    """Return C by the kernel of just this input, or of a larger one that it is copied into; None without a kernel."""
    rest = relu, residual is not None, way
    ready = bound.ready.get((x.shape, *rest)) or bound.larger(x.shape, rest)
    if ready is None or x.dtype is not ready.dtype or x.device != ready.device or not bound.is_current():
        return None
    axis = 1 if x.dim() == 2 else 0  # columns, or images
    count, shape = x.shape[axis], ready.out_shape
    added = _added(residual, (*shape[:axis], count, *shape[axis + 1 :]), ready)
    if residual is not None and added is None:
        return None
    if x.shape == ready.call[0]:
        return _run(ready, x, bias, added, relu=relu)
    wide, added = _widened(x, ready.call[0], axis), None if added is None else _widened(added, shape, axis)
    first = ready.for_columns(count * math.prod(shape[2:]))
    return _run(first, wide, bias, added, relu=relu).narrow(axis, 0, count).contiguous()


def _widened(x: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    wide = x.new_empty(shape)
    if wide.device.type == "cpu":
        wide.zero_()  # the emulation reads the rest; on a GPU it may be anything
    wide.narrow(axis, 0, x.shape[axis]).copy_(x)
    return wide


def _added(residual: Tensor | None, shape: tuple[int, ...], ready: ReadyKernel) -> Tensor | None:
    """Return a residual in the shape and type of C.

    None without a residual, or if the sum would have another shape, type or device than C.
    """
    if residual is None or residual.device != ready.device:
        return None
    if residual.dtype is ready.dtype and residual.shape == shape:
        return residual
    if torch.promote_types(residual.dtype, ready.dtype) is not ready.dtype:
        return None
    fits = residual.dim() <= len(shape) and all(
        own in (1, wanted) for own, wanted in zip(reversed(residual.shape), reversed(shape), strict=False)
    )
    return residual.to(ready.dtype).expand(shape) if fits else None


def _run(ready: ReadyKernel, b: Tensor, bias: Tensor | None, residual: Tensor | None, *, relu: bool) -> Tensor:
    if not b.is_contiguous():
        b = b.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    residual = None if residual is None else aligned(residual, ready.alignment_bytes)
    c = ready(aligned(b, ready.alignment_bytes), residual)
    return c if ready.fuses else _finished(c, bias, residual, relu=relu)


def aligned(x: Tensor, alignment_bytes: int) -> Tensor:
    """Return an operand where a kernel can load it: copied if its address is no multiple of ``alignment_bytes``."""
    return x if alignment_bytes == 1 or x.data_ptr() % alignment_bytes == 0 else x.clone()


def _finished(c: Tensor, bias: Tensor | None, residual: Tensor | None, *, relu: bool) -> Tensor:
    """Apply residual, bias and ReLU in place, in the order of a kernel's epilogue."""
    if residual is not None:
        c += residual
    if bias is not None:
        c += bias.reshape(-1, *(1,) * (c.dim() - 1 if c.dim() == 2 else c.dim() - 2))
    return c.relu_() if relu else c


def dense_product(
    b: Tensor, weight: Tensor, mask: Tensor | None, bias: Tensor | None, residual: Tensor | None, *, relu: bool
) -> Tensor:
    """Compute ``spmm`` with PyTorch's dense product."""
    a = (weight if mask is None else weight * mask).flatten(1).to(b.device)  # it may be in host memory
    c = torch.mm(a, b) if residual is None else torch.addmm(residual, a, b)
    return _finished(c, bias, None, relu=relu)


def dense_convolution(
    input: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    relu: bool,
    way: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> Tensor:
    """Compute ``conv2d`` with PyTorch; the channels of input and weight give the number of groups."""
    groups = input.shape[1] // weight.shape[1] or 1
    c = functional.conv2d(input, weight if mask is None else weight * mask, bias, *way, groups)
    c = c if residual is None else c + residual
    return (c.relu() if relu else c).contiguous()


def _check_product(b: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    m, k = weight.shape[0], weight[0].numel()
    if b.dim() != 2 or b.shape[0] != k:
        raise RuntimeError(f"lospmm::spmm: B has the shape {tuple(b.shape)}; the weight of {m} x {k} takes ({k}, n)")
    if residual is not None and residual.shape != (m, b.shape[1]):
        raise RuntimeError(f"lospmm::spmm: the residual has the shape {tuple(residual.shape)}; C has {(m, b.shape[1])}")


def _unserved(bound: BoundKernels, b: Tensor, residual: Tensor | None) -> str:
    wanted = {ready.dtype for ready in bound.ready.values()}
    if wanted and b.dtype not in wanted:
        return f"its input is {named(b.dtype)}, and its kernels take {' and '.join(map(named, wanted))}"
    if residual is not None and any(call[0] == b.shape for call in bound.ready):
        size = " x ".join(map(str, residual.shape)) or "one element"
        return f"its residual, {size} of {named(residual.dtype)}, cannot be added in its type and shape"
    held = ", ".join(" x ".join(map(str, call[0])) for call in bound.ready)
    return f"no kernel serves an input of {' x '.join(map(str, b.shape))} (there are kernels for {held})"


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise RuntimeError(
            "lospmm: tuned kernels are for inference and have no derivative; call the model under "
            "torch.inference_mode() or torch.no_grad(), or give it back its dense layers with lospmm.nn.restore_"
        )


def _fake_spmm(
    b: Tensor,
    weight: Tensor,
    mask: Tensor | None = None,  # noqa: ARG001
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,  # noqa: ARG001
) -> Tensor:
    _refuse_gradients(b, weight, bias, residual)
    torch._check(b.dim() == 2, lambda: f"lospmm::spmm: B has {b.dim()} dimensions, not 2")
    return b.new_empty((weight.shape[0], b.shape[1]))


def _fake_conv2d(
    input: Tensor,
    weight: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,  # noqa: ARG001
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    _refuse_gradients(input, weight, bias, residual)
    sides = [
        (input.shape[2 + at] + 2 * padding[at] - dilation[at] * (weight.shape[2 + at] - 1) - 1) // stride[at] + 1
        for at in range(2)
    ]
    shape = input.shape[0], weight.shape[0], *sides
    if residual is None:
        return input.new_empty(shape)
    dtype = torch.promote_types(input.dtype, residual.dtype)
    return input.new_empty(torch.broadcast_shapes(shape, residual.shape), dtype=dtype)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("spmm", _spmm, _device)
    LIBRARY.impl("conv2d", _conv2d, _device)
torch.library.register_fake(f"{_NAMESPACE}::spmm", _fake_spmm, lib=LIBRARY)
torch.library.register_fake(f"{_NAMESPACE}::conv2d", _fake_conv2d, lib=LIBRARY)

#: The operators' overloads, so that calls skip the look-up.
spmm = torch.ops.lospmm.spmm.default
conv2d = torch.ops.lospmm.conv2d.default
