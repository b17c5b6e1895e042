"""Execution of the shipped text of a kernel on a CPU. To add a language, add a row to ``RUNTIMES``.

This checks what the text says: addresses, dispatch, row order, weights, the order of loads and their uses. It does not
check speed, the registers that a compiler will need, or races between threads.

A row is a function of the emission and a ``Run``; its value is the chosen columns of C, (m, columns), with NaN in
elements that are not written. B of a convolution is its unfolded input, and its values in the padding must not
influence C. A column may lie beyond the end of B and C, in the last block: its thread runs too, and must access
nothing. Each thread may access only its own column of B and C; any other access, and a text that cannot be run,
raises VerificationFailed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu import cpu, ptx_machine, sass_machine
from lospmm.cpu.geometry import Geometry, Run
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype
from lospmm.stages import Count, silent

#: How each language is run.
RUNTIMES: Mapping[str, Callable[[Emission, Run], NDArray[np.float32]]] = MappingProxyType(
    {"sass": sass_machine.execute_emission, "ptx": ptx_machine.execute, "cuda": cpu.execute}
)


def execute(
    emission: Emission,
    geometry: Geometry,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
    progress: Count = silent,
) -> NDArray[np.float32]:
    """Return C of an emission, run on the CPU. Raises Unsupported for a language without a runtime.

    ``columns`` are those of the geometry's words; B, C and the residual have as many elements of each as a word
    holds.
    """
    if emission.language not in RUNTIMES:
        raise Unsupported(f"running {emission.language!r} on a CPU: choose one of {', '.join(RUNTIMES)}")
    per_word = geometry.words.columns
    assert b.shape == (geometry.k, per_word * len(columns)), f"B of shape {b.shape} for {len(columns)} columns"
    assert (residual is not None) == geometry.takes_residual, "a residual where the kernel takes one"
    execute_here = RUNTIMES[emission.language]
    if per_word == 1:
        return execute_here(emission, Run(geometry, columns, b, residual, progress))
    third = None if residual is None else _paired(residual, geometry.dtype)
    c = execute_here(emission, Run(geometry, columns, _paired(b, geometry.dtype), third, progress))
    return geometry.dtype.from_storage(c.view(geometry.dtype.to_storage(c[:0]).dtype))


def _paired(elements: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """Return words of two neighbouring columns each, the lower half first, as registers hold them."""
    return np.ascontiguousarray(dtype.to_storage(elements)).view(np.float32)
