"""Problems of ``fitting.untimed``.

They are problems of ``families.jsonl`` that have an unrolled kernel, in TF32 and 16 bits, and random ones between
them, which are for training alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from benchmarks.families_build import LEAST_UNROLLED_COLUMNS, MAX_UNROLLED_NONZEROS
from benchmarks.families_cases import SETS, Case, Uneven
from benchmarks.kernels import SEED

#: The set of the drawn problems.
BETWEEN = "between"

#: Sets and types; the most important come first, in case a run is stopped.
WORK = (
    ("shapes", "float16"),
    ("shapes", "tf32"),
    ("map", "tf32"),
    ("map", "float16"),
    ("real", "float16"),
    ("shapes", "bfloat16"),
    ("real", "bfloat16"),
    (BETWEEN, "tf32"),
    (BETWEEN, "float16"),
)

#: Problems drawn of each type; a longer run times more of them.
DRAWN = 800

#: Rows and columns of A, from and to; nonzeros; elements of B and C.
SIDES, NONZEROS, MOST_ELEMENTS = (24, 2048), (300, 160_000), 48_000_000

#: Values with their chances: columns of B, zeros, and how uneven rows and columns of A are.
COLUMNS = (
    *((16, 0.03), (49, 0.04), (128, 0.06), (196, 0.1), (784, 0.2)),
    *((1024, 0.07), (3136, 0.2), (4096, 0.1), (12544, 0.12), (50176, 0.08)),
)
SPARSITIES = ((0.5, 0.05), (0.7, 0.1), (0.8, 0.1), (0.9, 0.25), (0.95, 0.25), (0.98, 0.25))
UNEVENNESS = ((0.0, 0.6), (0.4, 0.2), (0.9, 0.2))


def between(device: str, _layers: Path | None) -> list[Case]:
    """Return DRAWN problems of each type, alternating between the types."""
    random = np.random.default_rng(SEED)
    found: list[Case] = []
    while len(found) < 2 * DRAWN:
        m, k = (_side(random) for _ in range(2))
        n, sparsity, unevenness = (_one_of(random, some) for some in (COLUMNS, SPARSITIES, UNEVENNESS))
        nonzeros, elements = m * k * (1 - sparsity), n * (m + k)
        if NONZEROS[0] <= nonzeros <= NONZEROS[1] and elements <= MOST_ELEMENTS:
            name = f"{m} x {k}, {sparsity:.0%} zeros, rows {unevenness}"
            dtype = ("tf32", "float16")[len(found) % 2]
            found.append(Case(BETWEEN, name, Uneven(m, k, sparsity, unevenness), int(n), dtype, device))
    return found


def _side(random: np.random.Generator) -> int:
    """Draw a side, log-uniformly; three of four are multiples of 16."""
    side = int(np.exp(random.uniform(*np.log(SIDES))))
    return side if random.random() < 0.25 else max(32, side // 16 * 16)


def _one_of(random: np.random.Generator, some: Sequence[tuple[float, float]]) -> float:
    values, chances = zip(*some, strict=True)
    return float(random.choice(values, p=chances))


#: By name.
UNTIMED_SETS: Mapping[str, Callable[[str, Path | None], list[Case]]] = MappingProxyType({**SETS, BETWEEN: between})


def cases_of(device: str, layers: Path | None, names: Sequence[str] | None, dtypes: Sequence[str] | None) -> list[Case]:
    """Return the cases in the order of ``WORK``, the slowest to build first, the drawn ones last."""
    found: list[Case] = []
    drawn: list[Case] = []
    for name, dtype in WORK:
        if (name == "real" and layers is None) or (names and name not in names) or (dtypes and dtype not in dtypes):
            continue
        every = UNTIMED_SETS[name](device, layers)
        own = [case for case in every if case.dtype == dtype and case.n >= LEAST_UNROLLED_COLUMNS]
        if name == BETWEEN:
            drawn = [case for case in every if case in own or case in drawn]  # alternating between types
        else:
            found += own if name == "real" else sorted(own, key=_nonzeros, reverse=True)
    return [
        case for case in (*found, *drawn) if isinstance(case.source, str) or _nonzeros(case) <= MAX_UNROLLED_NONZEROS
    ]


def _nonzeros(case: Case) -> float:
    """Return the nonzeros of a drawn matrix."""
    assert not isinstance(case.source, str)
    m, k, sparsity, *_ = case.source
    return m * k * (1 - sparsity)
