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
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu import cuda, ptx_machine, sass_machine
from lospmm.cpu.geometry import Run
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype

#: How each language is run.
RUNTIMES: Mapping[str, Callable[[Emission, Run], NDArray[np.float32]]] = MappingProxyType(
    {"sass": sass_machine.execute_emission, "ptx": ptx_machine.execute, "cuda": cuda.execute}
)


def execute(emission: Emission, asked: Run) -> NDArray[np.float32]:
    """Return C of an emission, run on the CPU. Raises Unsupported for a language without a runtime.

    The columns are those of the geometry's words; B, C and the residual have as many elements of each as a word
    holds.
    """
    if emission.language not in RUNTIMES:
        raise Unsupported(f"running {emission.language!r} on a CPU: choose one of {', '.join(RUNTIMES)}")
    geometry, per_word, count = asked.geometry, asked.geometry.words.columns, len(asked.columns)
    assert asked.b.shape == (geometry.k, per_word * count), f"B of shape {asked.b.shape} for {count} columns"
    assert (asked.residual is not None) == geometry.takes_residual, "a residual where the kernel takes one"
    execute_here = RUNTIMES[emission.language]
    if per_word == 1:
        return execute_here(emission, asked)
    third = None if asked.residual is None else _paired(asked.residual, geometry.dtype)
    c = execute_here(emission, replace(asked, b=_paired(asked.b, geometry.dtype), residual=third))
    return geometry.dtype.from_storage(c.view(geometry.dtype.to_storage(c[:0]).dtype))


def _paired(elements: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """Return words of two neighbouring columns each, the lower half first, as registers hold them."""
    return np.ascontiguousarray(dtype.to_storage(elements)).view(np.float32)
