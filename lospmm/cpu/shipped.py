"""The kernel of an artifact, run on a CPU."""

import numpy as np
from numpy.typing import NDArray

from lospmm.artifact.artifact import Artifact
from lospmm.codegen.emission import Emission
from lospmm.cpu import execute
from lospmm.cpu.block import execute_packed
from lospmm.cpu.geometry import Geometry, Run
from lospmm.errors import BadRequest
from lospmm.families.packed import PackedKernel
from lospmm.problem.convolution import unfold
from lospmm.problem.dtype import dtype_named, float32_of
from lospmm.problem.lanes import lanes_stored
from lospmm.toolchain.cubin import machine_code
from lospmm.toolchain.data import data_of

#: Threads that run together at most: some ten numbers of each take a few hundred megabytes.
_THREADS_AT_ONCE = 1 << 22


def run(kernel: Artifact, b: NDArray[np.floating], residual: NDArray[np.floating] | None = None) -> NDArray[np.float32]:
    """Run the shipped text on the CPU and return C, as ``Kernel.run_on_cpu`` describes."""
    if kernel.manifest["plan"] is not None:
        return _run_packed(kernel, b, residual)
    geometry, n = _geometry(kernel), kernel.manifest["n"]
    convolution = geometry.convolution
    elements = _float32("B", b, (geometry.k, n) if convolution is None else convolution.input_shape)
    shape = (geometry.m, n) if convolution is None else convolution.output_shape(geometry.m)
    if (residual is not None) != geometry.takes_residual:
        raise BadRequest(f"this kernel takes {'a' if geometry.takes_residual else 'no'} residual")
    third = None if residual is None else _float32("the residual", residual, shape)
    emission = _emission(kernel)
    c = np.empty(shape, dtype=np.float32)
    step = max(1, _THREADS_AT_ONCE // geometry.block_rows)
    for start in range(0, geometry.n, step):
        words = geometry.together(np.arange(start, min(start + step, geometry.n)))
        columns = geometry.columns_of(words)
        own_b = elements[:, columns] if convolution is None else unfold(convolution, elements, columns)
        place = geometry.places_of_c(columns)
        own_third = None if third is None else third.reshape(-1)[place]
        c.reshape(-1)[place] = execute(emission, Run(geometry, words, own_b, own_third))
    return c


def _run_packed(kept: Artifact, b: NDArray[np.floating], residual: NDArray[np.floating] | None) -> NDArray[np.float32]:
    manifest, kernel = kept.manifest, _packed_kernel(kept)
    m, k, n = (manifest[name] for name in ("m", "k", "n"))
    if (residual is not None) != kernel.takes_residual:
        raise BadRequest(f"this kernel takes {'a' if kernel.takes_residual else 'no'} residual")
    elements = _float32("B", b, (k, n))
    third = None if residual is None else _float32("the residual", residual, (m, n))
    return execute_packed(kernel, np.arange(n), elements, m=m, residual=third)


def _geometry(kernel: Artifact) -> Geometry:
    """Return the launch that the manifest describes; a shipped kernel has its n in its code."""
    manifest = kernel.manifest
    tile, dtype = manifest["tile"], dtype_named(manifest["dtype"])
    words = lanes_stored(dtype, tile["thread_columns"], tile["thread_words"])
    return Geometry(
        m=manifest["m"],
        k=manifest["k"],
        n=manifest["n"] // words.columns,
        cols=tile["cols"],
        block_rows=kernel.launch.grid[1],
        grid=kernel.launch.grid,
        convolution=kernel.convolution,
        takes_residual=manifest["epilogue"]["residual"],
        words=words,
        dtype=dtype,
        walks=tile["walks"],
        kept_bytes=kernel.launch.shared_bytes if tile["walks"] > 1 else 0,
    )


def _emission(kernel: Artifact) -> Emission:
    manifest, source = kernel.manifest, kernel.source.decode()
    machine = None
    if manifest["emitter"] == "sass":  # what runs is the code in the cubin, not its listing
        machine = machine_code(kernel.cubin, manifest["name"], manifest["arch"])
    return Emission(manifest["emitter"], manifest["name"], source, (source,), machine)


def _packed_kernel(kept: Artifact) -> PackedKernel:
    """Return the kernel of a family with a template, with A from its cubin. Raises ToolchainFault."""
    manifest = kept.manifest
    return PackedKernel(
        entry=manifest["name"],
        source=kept.source.decode(),
        data=data_of(kept.cubin),
        launch=kept.launch,
        registers=manifest["registers"],
        cols=manifest["plan"]["cols"],
        dtype=dtype_named(manifest["dtype"]),
        takes_residual=manifest["epilogue"]["residual"],
    )


def _float32(name: str, array: NDArray[np.floating], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Check an operand and round it to float32. Raises BadRequest."""
    elements = float32_of(name, array)
    if elements.shape != shape:
        raise BadRequest(f"{name} has the shape {elements.shape}; this kernel takes {shape}")
    return elements
