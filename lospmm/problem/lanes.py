"""Words: the elements of B or C in a register of an unrolled kernel, of one or two columns.

The search and the code generator treat words as float32, and count columns in words. The machine code is then converted
to the actual words (``codegen.sass.emit``). To add a kind of word, add it here, its conversion there, and when to use
it (``lanes_of``).
"""

from dataclasses import dataclass, replace

from lospmm.errors import BadRequest, Unsupported
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Lanes:
    """A kind of word: the columns of B and C in one, and its bytes in memory."""

    name: str
    columns: int
    stored_bytes: int


SINGLE = Lanes("single", 1, 4)
NARROW = Lanes("narrow", 1, 2)  # 16 bits, sums in float32
DOUBLE = Lanes("double", 2, 4)  # 16 bits, sums in float32
PAIRS = Lanes("pairs", 2, 4)  # 16 bits, sums in 16 bits
FLOAT_SUMS = (NARROW, DOUBLE)


def lanes_of(problem: Problem, thread_words: int = 1) -> Lanes:
    """Return the words of a problem's unrolled kernels.

    With 16 bits: pairs if sums may have 16 bits, n is even, and there is neither a convolution nor an epilogue;
    otherwise one element per word with float32 sums, which are always allowed. Two such words per thread
    (``Schedule.thread_words``) are a kind of their own. Raises Unsupported if the problem takes no ``thread_words``.
    """
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
            f"{thread_words} words a thread: only 2, of a 16-bit dtype with float32 sums, an even n and no convolution"
        )
    return DOUBLE


def takes_double(problem: Problem) -> bool:
    """Return whether a thread may have two narrow words: 16-bit elements that are neighbours in memory."""
    return problem.dtype.is_16_bit and problem.convolution is None and problem.n % DOUBLE.columns == 0


def lanes_stored(dtype: Dtype, columns: int, thread_words: int) -> Lanes:
    """Return the words of a finished kernel, given the ``columns`` and ``thread_words`` of a thread.

    Raises BadRequest if this version has no such words.
    """
    kinds = {1: (SINGLE, NARROW, PAIRS), DOUBLE.columns: (DOUBLE,)}.get(thread_words, ())
    found = [one for one in kinds if (one.columns, one.stored_bytes) == (columns, columns * dtype.element_bytes)]
    if not found:
        raise BadRequest(f"this version has no kernels of {columns} columns a thread in {dtype.name}")
    return found[0]


def in_lanes(problem: Problem) -> Problem:
    """Return the problem that is searched in place of ``problem``: n is counted in words.

    Its type is float32 if words have 4 bytes; with narrow words it stays, with float32 sums.
    """
    words = lanes_of(problem)
    if words == NARROW:
        return replace(problem, sums=FLOAT32)
    return replace(problem, n=problem.n // words.columns, dtype=FLOAT32, sums=FLOAT32)
