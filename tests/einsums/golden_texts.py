"""What is generated for some expressions, behind the prelude: ``make golden`` writes it anew."""

from pathlib import Path
from typing import Any

import numpy as np

from lospmm.einsums.expression import parse
from lospmm.einsums.loops import kernel_of_loops
from lospmm.einsums.operands import check
from lospmm.families.packed import source_of_prelude
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN

GOLDEN = Path(__file__).parent / "golden"

_R, _C = np.array([0, 2, 1, 2]), np.array([3, 0, 1, 1])

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sddmm": ("float16", "V[p] += X[r[p],d] * Y[c[p],d]", {"r": _R, "c": _C, "X": (3, 64), "Y": (4, 64)}),
    "scatter": ("float32", "C[r[p],n] += A[p] * B[c[p],n]", {"r": _R, "c": _C, "A": (4,), "B": (4, 5), "C": (3, 5)}),
    "two_buckets": ("float32", "C[r[p],c[q]] += A[p] * B[q]", {"r": _R, "c": _C, "A": (4,), "B": (4,), "C": (3, 4)}),
}


def texts() -> dict[str, str]:
    """File name -> what it must hold."""
    found = {}
    for name, (dtype, text, operands) in CASES.items():
        kernel = kernel_of_loops(check(parse(text), operands), DTYPES[dtype])
        prelude = source_of_prelude({}, dtype=DTYPES[dtype], epilogue=PLAIN, takes_residual=kernel.takes_residual)
        found[f"{name}.cu"] = kernel.source.removeprefix(prelude)
    return found


def renew() -> None:
    for path in GOLDEN.iterdir():
        path.unlink()
    for name, text in texts().items():
        (GOLDEN / name).write_text(text)
