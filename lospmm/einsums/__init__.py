"""Indirect Einsums: sums of products of arrays, some of whose indices are themselves read from arrays.

    c = lospmm.einsum("C[r[p],n] += A[p] * B[k[p],n]", C=(rows, columns), r=r, k=k, A=values, B=b)

The text is parsed (``expression``), checked against its operands (``operands``), and compiled to a kernel: of a
family if it is a sparse matrix times a dense one (``products``), of small dense products if rows are gathered for
them (``gathered``), else of inverted loops (``plan``, ``loops``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums import run
from lospmm.einsums.expression import parse
from lospmm.einsums.gathered import kernel_of_gathered
from lospmm.einsums.loops import MAX_INPUTS, kernel_of_loops
from lospmm.einsums.operands import Operands, check, check_range
from lospmm.einsums.products import product_of
from lospmm.errors import BadRequest
from lospmm.families.block_group_coo import has_tensor_cores
from lospmm.families.packed import PackedKernel
from lospmm.gpu.detect import own_gpu
from lospmm.problem.device import USUAL_DEVICE, DeviceSpec, find_device
from lospmm.problem.dtype import dtype_named, float32_of


@dataclass(frozen=True, slots=True, eq=False)
class EinsumKernel:
    """The kernel of an expression, called with the arrays of its ``inputs`` by name.

    ``family`` is that of ``lospmm.families``, "gather_gemm" or "loops".
    """

    operands: Operands
    packed: PackedKernel
    family: str
    device: DeviceSpec
    runs_on_gpu: bool

    def __repr__(self) -> str:
        text = " ".join(self.operands.expression.text.split())
        of = ", ".join(self.inputs) or "nothing"
        return f"<EinsumKernel {text!r} of {of}: {self.family}, {self.packed.dtype.name}, {self.device.name}>"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that a call takes."""
        return self.operands.inputs

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return self.operands.output_shape

    @property
    def source(self) -> str:
        """CUDA C++ source; the known operands are data in the cubin."""
        return self.packed.source

    def cubin(self) -> bytes:
        """Return the cubin for ``device``. Raises ToolchainFault.

        It is launched with the first input, the output and, if there is one, the second input.
        """
        return run.compile_for(self.packed, self.device.arch)

    def __call__(self, /, **inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Return the sums, from zero. Raises BadRequest for other names or shapes, GpuFault, ToolchainFault."""
        if set(inputs) != set(self.inputs):
            raise BadRequest(
                f"einsum: this kernel takes {', '.join(self.inputs) or 'nothing'}, not {', '.join(inputs)}"
            )
        arrays = [float32_of(f"einsum: {name}", inputs[name]) for name in self.inputs]
        for name, array in zip(self.inputs, arrays, strict=True):
            if array.shape != self.operands.shapes[name]:
                raise BadRequest(
                    f"einsum: {name} has the shape {array.shape}; this kernel takes {self.operands.shapes[name]}"
                )
            check_range(name, array, self.packed.dtype)
        if 0 in self.output_shape:
            return np.zeros(self.output_shape, np.float32)
        if self.runs_on_gpu:
            return run.run_on_gpu(self.packed, self.cubin(), arrays, self.output_shape)
        return run.run_on_cpu(self.packed, arrays, self.output_shape)


def einsum_kernel(expression: str, /, *, dtype: str = "float32", device: str = "auto", **operands: Any) -> EinsumKernel:
    """Return the kernel of ``expression``, which means loops over all its variables (docs/einsum.md).

    Arrays among ``operands`` are known and become part of the kernel; a factor given as a tuple, its shape, is an
    input of every call; there may be two. Arrays of indices are always known. The output is given by its shape if
    that does not follow from its variables. ``device`` is "auto", this machine's GPU or else the CPU; "cpu"; or a
    name of the device table, to be compiled for. Raises BadRequest, which points at the expression, and Unsupported.
    """
    parsed = parse(expression)
    return _kernel(check(parsed, operands), dtype, device)


def einsum(expression: str, /, *, dtype: str = "float32", device: str = "auto", **operands: Any) -> NDArray[np.float32]:
    """Return the output of ``expression`` as float32: sums of products, added to a given output array.

    All ``operands`` are arrays; the output may be given as its shape, or, if that follows, not at all. With another
    ``dtype`` factors and sums are rounded to it. Raises as ``einsum_kernel``, and GpuFault and ToolchainFault.
    """
    parsed = parse(expression)
    output = operands.get(parsed.output.name)
    known = check(parsed, operands)
    if known.inputs:
        raise BadRequest(f"einsum: {known.inputs[0]} is a shape; give the array, or make an einsum_kernel")
    later = _later(known)
    shaped = {name: array.shape if name in later else array for name, array in operands.items()}
    shaped[parsed.output.name] = known.output_shape
    kernel = _kernel(check(parsed, shaped), dtype, device)
    sums = kernel(**{name: known.values[name] for name in later})
    return sums if not isinstance(output, np.ndarray) else float32_of(f"einsum: {parsed.output.name}", output) + sums


def _kernel(operands: Operands, dtype: str, device: str) -> EinsumKernel:
    own = own_gpu() if device == "auto" else None
    spec = find_device(own or USUAL_DEVICE if device in ("auto", "cpu") else device)
    type_of_elements = dtype_named(dtype)
    for name, array in operands.values.items():
        check_range(name, array, type_of_elements)
    found = product_of(operands, type_of_elements, spec)
    if found is None and has_tensor_cores(spec) and (gathered := kernel_of_gathered(operands, type_of_elements)):
        found = gathered, "gather_gemm"
    kernel, family = found or (kernel_of_loops(operands, type_of_elements), "loops")
    return EinsumKernel(operands, kernel, family, spec, own is not None)


def _later(operands: Operands) -> tuple[str, ...]:
    """Return the factors that remain inputs of the kernel: those with most axes, the largest of them."""
    values: Mapping[str, NDArray[np.float32]] = operands.values
    ranked = sorted(values, key=lambda name: (values[name].ndim, values[name].size), reverse=True)
    gathered = {one.name for one in operands.expression.factors if any(index.is_indirect for index in one.indices)}
    dense = [name for name in ranked if name in gathered] or ranked
    return tuple(name for name in values if name in dense[:MAX_INPUTS])


__all__ = ["EinsumKernel", "einsum", "einsum_kernel"]
