"""Execution of the shipped text of a kernel on a CPU. To add a language, add a row to ``RUNTIMES``.

This checks what the text says: addresses, dispatch, row order, weights, the order of loads and their uses. It does not
check speed, the registers that a compiler will need, or races between threads.

A row is a function of the emission, the launch's ``Geometry``, the chosen columns (distinct), those columns of B, (k,
columns), and of the residual, (m, columns), or None; its value is those columns of C, (m, columns), with NaN in
elements that are not written. B of a convolution is its unfolded input, and its values in the padding must not
influence C. A column may lie beyond the end of B and C, in the last block: its thread runs too, and must access
nothing. Each thread may access only its own column of B and C; any other access, and a text that cannot be run,
raises VerificationFailed. ``progress`` is called with the parts of the kernel that have run: tiles, or hundredths.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu import cpu, ptx_machine, sass_machine
from lospmm.cpu.geometry import Geometry
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype
from lospmm.stages import Count, uncounted


class Runtime(Protocol):
    """A function that runs a kernel on a CPU: a row of ``RUNTIMES``."""

    def __call__(
        self,
        emission: Emission,
        geometry: Geometry,
        columns: NDArray[np.int64],
        b: NDArray[np.float32],
        residual: NDArray[np.float32] | None = None,
        progress: Count = uncounted,
    ) -> NDArray[np.float32]:
        """Return the chosen columns of C, (m, columns)."""


RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {"sass": sass_machine.execute_emission, "ptx": ptx_machine.execute, "cuda": cpu.execute}
)


def execute(
    emission: Emission,
    geometry: Geometry,
    columns: NDArray[np.int64],
    b: NDArray[np.float32],
    residual: NDArray[np.float32] | None = None,
    progress: Count = uncounted,
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
    if per_word == 1:
        return RUNTIMES[emission.language](emission, geometry, columns, b, residual, progress)
    third = None if residual is None else _paired(residual, geometry.dtype)
    c = RUNTIMES[emission.language](emission, geometry, columns, _paired(b, geometry.dtype), third, progress)
    return geometry.dtype.from_storage(c.view(geometry.dtype.to_storage(c[:0]).dtype))


def _paired(elements: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """Return words of two neighbouring columns each, the lower half first, as registers hold them."""
    return np.ascontiguousarray(dtype.to_storage(elements)).view(np.float32)
