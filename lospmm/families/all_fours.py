"""Fours (``fours``) of a whole matrix, chosen for each block of rows and shared by processes.

For a large matrix, processes share the work and store the result: plans that differ in their columns of B, or tunings
for another n, have the same fours, and so do matrices with other weights in the same places.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np

from lospmm.families import fours
from lospmm.families.fours import FourColumns, choose_fours
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div

#: The stored result for some blocks; and a function that returns such results for some keys, made by several processes
#: (``lospmm.store.made_together``: kind, keys, and the maker of one).
Files = Mapping[str, bytes]
Together = Callable[[str, Sequence[str], Callable[[int], Files]], Sequence[Files]]

#: Makes the shared parts of a plan's packing, and leaves the result for ``pack``.
Shared = Callable[[Together], object]

#: The kind of entry in the store, and its file.
FOURS, _FILE = "fours", "fours.npz"

#: Block rows times columns that one process orders at a time, in some tenths of a second. Less is not stored.
PART_COLUMNS = 8192

#: The most results, each of a matrix and a block height, that a process keeps in memory.
_REMEMBERED = 3

_found: dict[tuple[SparseMatrix, int, int], list[FourColumns]] = {}
_finding = Lock()


def is_long(matrix: SparseMatrix, rows: int) -> bool:
    """Return whether the choice takes so long that processes share it."""
    return ceil_div(matrix.m, rows) * matrix.k > PART_COLUMNS


def choose_all(
    matrix: SparseMatrix, rows: int, *, multiple: int, together: Together | None = None
) -> list[FourColumns]:
    """Return the fours of each ``rows`` rows of A, ``multiple`` or a multiple of these a block of rows.

    They come from this process's memory if known, else from this thread alone or ``together`` with other processes.
    """
    asked = matrix, rows, multiple
    if (known := _found.get(asked)) is not None:
        return known
    firsts = range(0, matrix.m, rows)
    if together is None or not is_long(matrix, rows):
        found = [choose_fours(matrix, first, rows, multiple=multiple) for first in firsts]
    else:
        found = _in_parts(matrix, firsts, rows, multiple, together)
    with _finding:
        if len(_found) >= _REMEMBERED:
            del _found[next(iter(_found))]
        _found[asked] = found
    return found


def _in_parts(matrix: SparseMatrix, firsts: range, rows: int, multiple: int, together: Together) -> list[FourColumns]:
    of_part = max(1, PART_COLUMNS // matrix.k)
    parts = [firsts[at : at + of_part] for at in range(0, len(firsts), of_part)]

    def make(at: int) -> Files:
        return _written([choose_fours(matrix, first, rows, multiple=multiple) for first in parts[at]])

    made = together(FOURS, [_key(matrix, part, rows, multiple) for part in parts], make)
    return [choice for files in made for choice in _read(files)]


def _key(matrix: SparseMatrix, firsts: range, rows: int, multiple: int) -> str:
    """Return a choice's key in the store: a digest of the nonzeros' places, the parameters and the source code."""
    last = min(firsts[-1] + rows, matrix.m)
    offsets = matrix.indptr[firsts[0] : last + 1]
    digest = hashlib.sha256(Path(fours.__file__).read_bytes() + Path(__file__).read_bytes())
    digest.update(repr((len(firsts), rows, multiple, matrix.k, len(offsets))).encode())
    digest.update((offsets - offsets[0]).astype("<i8").tobytes())
    digest.update(matrix.indices[offsets[0] : offsets[-1]].astype("<i4").tobytes())
    return digest.hexdigest()


def _written(choices: Sequence[FourColumns]) -> Files:
    file = io.BytesIO()
    np.savez(
        file,
        counts=np.array([len(choice.columns) for choice in choices]),
        columns=np.concatenate([choice.columns for choice in choices]),
        kept=np.concatenate([choice.kept for choice in choices]),
    )
    return {_FILE: file.getvalue()}


def _read(files: Files) -> list[FourColumns]:
    with np.load(io.BytesIO(files[_FILE])) as arrays:
        ends = np.cumsum(arrays["counts"]).tolist()
        columns, kept = arrays["columns"], arrays["kept"]
    return [FourColumns(columns[begin:end], kept[begin:end]) for begin, end in pairwise([0, *ends])]
