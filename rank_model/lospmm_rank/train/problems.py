"""Random training problems, each determined by its number: the ranges of Table 3, widened.

Sizes are those of real layers, and others between; matrices are drawn in several ways, because Algorithm 1 finds more
in some than in others. Numbers from DROPPED on are matrices with empty rows and columns and long rows, as variational
dropout and l0 regularisation leave them. A number always stands for the same problem: a change here needs another SEED.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lospmm.matrix.csr import SparseMatrix
from lospmm_datasets.synthetic import clustered, pruned_low_rank, uneven, uniform

#: Part of the seed of every problem.
SEED = 6

#: Output channels, and input channels times the cells of the filter, of layers of section 7.1 and their like.
HEIGHTS = (64, 96, 128, 160, 192, 232, 256, 320, 384, 464, 512, 576, 640, 768, 960, 1024, 1280, 1536, 2048, 2304, 3072)
DEPTHS = (64, 96, 128, 147, 192, 232, 256, 320, 384, 464, 512, 576, 768, 960, 1024, 1152, 1536, 2048, 2304, 3072)

#: Columns of B: tokens of a batch, or pixels of one.
COLUMNS = (196, 392, 512, 784, 1024, 1024, 1568, 2048, 2048, 3136, 4096, 6272, 12544)

#: The share of sizes that no layer has: any whole number from 2^6 to 2^11.
BETWEEN = 0.35

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)

#: The first number of a matrix with empty rows; and the most of its columns that are empty.
DROPPED = 1_000_000
MOST_EMPTY_COLUMNS = 0.3

#: Points have to be cheap: build time grows with the nonzeros, run time with nonzeros x columns.
LEAST_NONZEROS = 512
MOST_NONZEROS = 300_000
MOST_PRODUCTS = 1e9


def _uniform(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    return uniform(m, k, sparsity, _seed(random))


def _uneven_rows(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    return uneven(m, k, sparsity, _seed(random), rows=random.uniform(0.2, 1.5), columns=random.uniform(0.0, 0.3))


def _uneven_columns(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    return uneven(m, k, sparsity, _seed(random), rows=random.uniform(0.0, 0.3), columns=random.uniform(0.3, 2.0))


def _clustered(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    block = int(random.choice((4, 8, 16, 32)))
    return clustered(m, k, sparsity, _seed(random), block=block, contrast=random.uniform(0.5, 2.0))


def _pruned_low_rank(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    rank = int(random.choice((2, 4, 8, 16, 32)))
    return pruned_low_rank(m, k, sparsity, _seed(random), rank=rank, noise=random.uniform(0.2, 1.5))


def _variational_dropout(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    return _dropped(m, k, sparsity, random, most_empty=0.95, rows=(0.3, 1.2), columns=(0.3, 0.9))


def _l0_regularization(m: int, k: int, sparsity: float, random: np.random.Generator) -> SparseMatrix:
    return _dropped(m, k, sparsity, random, most_empty=0.4, rows=(0.7, 2.0), columns=(0.2, 0.7))


def _dropped(
    m: int,
    k: int,
    sparsity: float,
    random: np.random.Generator,
    *,
    most_empty: float,
    rows: tuple[float, float],
    columns: tuple[float, float],
) -> SparseMatrix:
    """Draw a matrix with up to a share of ``most_empty`` rows; the cells that are left are at most half full."""
    empty_rows = most_empty * (2 * sparsity - 1) * random.random()
    left = 1 - 2 * (1 - sparsity) / (1 - empty_rows)
    empty_columns = MOST_EMPTY_COLUMNS * left * random.random() ** 2
    spread = {"rows": random.uniform(*rows), "columns": random.uniform(*columns)}
    return uneven(m, k, sparsity, _seed(random), **spread, empty_rows=empty_rows, empty_columns=empty_columns)


#: Functions that draw a matrix, by the name in lines of data; a pattern drawn more often stands here more than once.
PATTERNS: Mapping[str, Callable[[int, int, float, np.random.Generator], SparseMatrix]] = MappingProxyType(
    {
        "uniform": _uniform,
        "uneven rows": _uneven_rows,
        "uneven columns": _uneven_columns,
        "clustered": _clustered,
        "low rank": _pruned_low_rank,
        "variational dropout": _variational_dropout,
        "l0 regularization": _l0_regularization,
    }
)
_DROPPED = ("variational dropout", "l0 regularization")
_DRAWN = ("uniform", "uniform", "uneven rows", "uneven columns", "clustered", "low rank", "low rank")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The problem of a number: A (m, k), to be multiplied with ``n`` columns."""

    number: int
    pattern: str
    matrix: SparseMatrix
    n: int


def drawn(number: int) -> Drawn:
    """Return the problem of a number from 0 on."""
    random = np.random.default_rng((SEED, number))
    while True:
        m, k, n, sparsity = _size(random, HEIGHTS), _size(random, DEPTHS), _columns(random), _sparsity(random)
        nonzeros = (1 - sparsity) * m * k
        if LEAST_NONZEROS <= nonzeros <= MOST_NONZEROS and nonzeros * n <= MOST_PRODUCTS:
            break
    pattern = str(random.choice(_DRAWN if number < DROPPED else _DROPPED))
    return Drawn(number, pattern, PATTERNS[pattern](m, k, sparsity, random), n)


def _size(random: np.random.Generator, layers: tuple[int, ...]) -> int:
    return round(2 ** random.uniform(6, 11)) if random.random() < BETWEEN else int(random.choice(layers))


def _columns(random: np.random.Generator) -> int:
    return round(2 ** random.uniform(8, 13)) if random.random() < BETWEEN else int(random.choice(COLUMNS))


def _sparsity(random: np.random.Generator) -> float:
    if random.random() < BETWEEN:
        return float(1 - 2 ** random.uniform(np.log2(0.01), np.log2(0.5)))
    return float(random.choice(SPARSITIES))


def _seed(random: np.random.Generator) -> int:
    return int(random.integers(2**31))
