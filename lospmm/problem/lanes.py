"""What a thread of an unrolled kernel has in a register: an element of B or C, or those of two columns side by side.

A kernel is searched for, and its code is written, as if words were float32: for so many columns of words. Then the code
is made that of the words that they are (``codegen.sass.words``). To add a kind of word, add its row to ``LANES``, what
makes it of float32's machine code, and when it is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lospmm.errors import BadRequest, Unsupported
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Lanes:
    """``columns`` are those of B and C that a thread computes, ``stored_bytes`` what one takes of memory for them."""

    name: str
    columns: int
    stored_bytes: int


SINGLE = Lanes("single", 1, 4)
NARROW = Lanes("narrow", 1, 2)  # sums are float32, of either column:
DOUBLE = Lanes("double", 2, 4)
PAIRS = Lanes("pairs", 2, 4)  # sums are of the same type
FLOAT_SUMS = (NARROW, DOUBLE)

#: By name.
LANES: Mapping[str, Lanes] = MappingProxyType({one.name: one for one in (SINGLE, NARROW, DOUBLE, PAIRS)})


def lanes_of(problem: Problem, thread_words: int = 1) -> Lanes:
    """Of its unrolled kernels: pairs where sums may have 16 bits, the columns are even and nothing is added to the
    product; else an element each, with sums in float32, which are allowed wherever others are. Two of these to a thread
    (``Schedule.thread_words``) are a word of their own. Raises Unsupported where there is none."""
    if not problem.dtype.is_16_bit:
        words = SINGLE
    else:
        is_product = problem.convolution is None and problem.epilogue.is_plain
        is_even = problem.n % PAIRS.columns == 0
        words = PAIRS if problem.sums.is_16_bit and is_product and is_even else NARROW
    if thread_words == 1:
        return words
    if words != NARROW or thread_words != DOUBLE.columns or not takes_double(problem):
        raise Unsupported(
            f"{thread_words} words to a thread: of 16 bits with float32 sums, two of an even n, no windows"
        )
    return DOUBLE


def takes_double(problem: Problem) -> bool:
    """Whether a thread may have two words, of a problem of 16 bits whose words are narrow: neighbours in memory."""
    return problem.dtype.is_16_bit and problem.convolution is None and problem.n % DOUBLE.columns == 0


def lanes_stored(dtype: Dtype, columns: int, thread_words: int) -> Lanes:
    """Of a finished kernel, whose threads compute so many columns, in so many words of a search. Raises BadRequest for
    what there is not."""
    if thread_words != 1 and (dtype.is_16_bit, columns, thread_words) == (True, DOUBLE.columns, DOUBLE.columns):
        return DOUBLE
    stored_bytes = columns * dtype.element_bytes
    kinds = [one for one in LANES.values() if one != DOUBLE and thread_words == 1]
    found = [one for one in kinds if (one.columns, one.stored_bytes) == (columns, stored_bytes)]
    if not found:
        raise BadRequest(f"threads of {columns} columns of {dtype.name}: not in this version")
    return found[0]


def in_lanes(problem: Problem) -> Problem:
    """The problem whose candidates are those of ``problem``: B's columns are counted in words; it is of float32 where a
    thread loads as many bytes."""
    words = lanes_of(problem)
    if words == NARROW:
        return replace(problem, sums=FLOAT32)
    return replace(problem, n=problem.n // words.columns, dtype=FLOAT32, sums=FLOAT32)
