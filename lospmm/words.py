"""What a thread of an unrolled kernel has in a register: an element of B or C, or those of two columns side by side.

A kernel is searched for, and its code is written, as if words were float32: for so many columns of words. Then the code
is made that of the words that they are (``codegen.sass.words``). To add a kind of word, add its row to ``WORDS``, what
makes it of float32's machine code, and when it is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lospmm.dtype import FLOAT32, Dtype
from lospmm.errors import BadRequest
from lospmm.model import Problem


@dataclass(frozen=True, slots=True)
class Words:
    """``columns`` are those of B and C that a thread computes, ``stored_bytes`` what one takes of memory for them."""

    name: str
    columns: int
    stored_bytes: int


SINGLE = Words("single", 1, 4)
NARROW = Words("narrow", 1, 2)  # sums are float32, of either column:
DOUBLE = Words("double", 2, 4)
PAIRS = Words("pairs", 2, 4)  # sums are of the same type
FLOAT_SUMS = (NARROW, DOUBLE)

#: By name.
WORDS: Mapping[str, Words] = MappingProxyType({one.name: one for one in (SINGLE, NARROW, PAIRS)})


def words_of(problem: Problem) -> Words:
    """Of its unrolled kernels: pairs where sums may have 16 bits, the columns are even and nothing is added to the
    product; else an element each, with sums in float32, which are allowed wherever others are."""
    if not problem.dtype.is_16_bit:
        return SINGLE
    is_product = problem.convolution is None and problem.epilogue.is_plain
    return PAIRS if problem.sums.is_16_bit and is_product and problem.n % PAIRS.columns == 0 else NARROW


def words_stored(dtype: Dtype, columns: int) -> Words:
    """Of a finished kernel, whose threads compute so many columns. Raises BadRequest for what there is not."""
    stored_bytes = columns * dtype.element_bytes
    found = [one for one in WORDS.values() if (one.columns, one.stored_bytes) == (columns, stored_bytes)]
    if not found:
        raise BadRequest(f"threads of {columns} columns of {dtype.name}: not in this version")
    return found[0]


def in_words(problem: Problem) -> Problem:
    """The problem whose candidates are those of ``problem``: B's columns are counted in words; it is of float32 where a
    thread loads as many bytes."""
    words = words_of(problem)
    if words == NARROW:
        return replace(problem, sums=FLOAT32)
    return replace(problem, n=problem.n // words.columns, dtype=FLOAT32, sums=FLOAT32)
