"""The golden texts: what the emitters write for a small example and its edge cases, one file each.

``make golden`` writes them anew; what changed is then read as a diff.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lospmm.artifact.artifact import SOURCE_FILES
from lospmm.codegen import EMITTERS, emit, source_of
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.lanes import SINGLE
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from tests.einsums import golden_texts
from tests.golden import transposes

GOLDEN = Path(__file__).parent
ARCH = "sm_90"

#: Rows 0, 2, 4, 6 and 1, 3, 5, 7 share columns, so that regrouping has something to find.
EXAMPLE = np.array(
    [
        [1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
        [3.0, 0.0, 0.0, 0.0, -1.5, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, -4.0],
        [5.0, 0.0, 6.0, 0.0, 7.0, 0.0, 0.0, 0.0],
        [0.0, -8.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, -0.75, 0.0, 10.0, 0.0, 0.0, 0.0],
        [0.0, 11.0, 0.0, 12.0, 0.0, 0.0, 0.0, 0.3],
    ],
    dtype=np.float32,
)


SCHEDULE = Schedule(prefetch=2)


def regrouped(matrix: SparseMatrix) -> Tiling:
    return regroup(matrix, [4])[4]


def as_they_come(matrix: SparseMatrix) -> Tiling:
    return natural_order(matrix, 4)


def example(
    weights: NDArray[np.float32] = EXAMPLE,
    *,
    n: int = 96,
    schedule: Schedule = SCHEDULE,
    tiling: Callable[[SparseMatrix], Tiling] = regrouped,
    convolution: Convolution | None = None,
    epilogue: Epilogue = PLAIN,
    dtype: str = "float32",
    sums: str = "float32",
) -> KernelProgram:
    """Tiles of four rows and 32 columns."""
    matrix = from_dense(weights)
    columns, types = n if convolution is None else convolution.n, (DTYPES[dtype], DTYPES[sums])
    problem = Problem(matrix, columns, find_device("h200"), convolution, epilogue, *types)
    return replace(lower(problem, UnrolledPlan(TileSize(4, 32), schedule, tiling(matrix))), name="example")


#: Two channels and a window of 2 x 2, so that A has eight columns.
WINDOW = Convolution(batch=2, channels=2, height=5, width=6, kernel_height=2, kernel_width=2)
ALL = Epilogue(bias=(0.5, 0.0, -1.0, 2.0, 0.0, 3.0, 0.25, 1.0), relu=True, residual=True)


def without_rows(*rows: int) -> NDArray[np.float32]:
    weights = EXAMPLE.copy()
    weights[list(rows)] = 0.0
    return weights


def programs() -> dict[str, KernelProgram]:
    """The cases by the names of their files."""
    return {
        "example": example(),
        "not_reordered": example(tiling=as_they_come),
        "column_order": example(schedule=Schedule(prefetch=2, column_group=0)),
        "column_groups": example(n=200, schedule=Schedule(prefetch=2, column_group=4)),
        "deep_prefetch": example(schedule=Schedule(prefetch=80)),
        "ragged_columns": example(n=70),
        "empty_rows": example(without_rows(1, 4, 5)),
        "all_zero": example(np.zeros_like(EXAMPLE)),
        "run_time_columns": replace(example(), cols=None),
        "repeated_tiles": replace(example(), dispatch=(0, 1, 1, 0)),
        "far_rows": example(n=100_000_000),  # row 7 is beyond 2^31 bytes
        "bias_and_relu": example(without_rows(1, 2), epilogue=replace(ALL, residual=False)),
        "residual": example(without_rows(1, 2), epilogue=ALL),
        "convolution": example(convolution=WINDOW),
        "padded_convolution": example(convolution=replace(WINDOW, padding=(1, 0), stride=(2, 1)), epilogue=ALL),
        "float16": example(n=97, epilogue=ALL, dtype="float16"),
        "bfloat16": example(n=97, dtype="bfloat16"),
        "two_columns_of_float16": example(
            epilogue=ALL, dtype="float16", schedule=Schedule(prefetch=2, column_group=2, thread_words=2)
        ),
        "two_columns_of_bfloat16": example(dtype="bfloat16", schedule=Schedule(prefetch=2, thread_words=2)),
        "pairs_of_float16": example(dtype="float16", sums="float16"),
        "pairs_of_bfloat16": example(dtype="bfloat16", sums="bfloat16"),
    }


def languages(program: KernelProgram) -> list[str]:
    """Those that write the case: only machine code has 16 bits."""
    return ["sass"] if program.words != SINGLE else list(EMITTERS)


def texts() -> dict[str, str]:
    """File name -> what it must hold."""
    return {
        name + Path(SOURCE_FILES[language]).suffix: source_of(program, emit(program, language, ARCH), ARCH)
        for name, program in programs().items()
        for language in languages(program)
    }


def files() -> dict[str, str]:
    """File name -> what it holds."""
    suffixes = {Path(file).suffix for file in SOURCE_FILES.values()}
    return {path.name: path.read_text() for path in GOLDEN.iterdir() if path.suffix in suffixes}


def renew() -> None:
    wanted = texts()
    for name in files().keys() - wanted.keys():
        (GOLDEN / name).unlink()
    for name, text in wanted.items():
        (GOLDEN / name).write_text(text)
    golden_texts.renew()
    transposes.renew()


if __name__ == "__main__":
    renew()
