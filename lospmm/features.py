"""Table 1: the features of a candidate that the rank model of section 3.5 sees, and the axes of the schedule."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.constraints import block_count
from lospmm.model import Candidate, Problem, ceil_div

#: The columns of ``features``, in order: Table 1, then the axes that this project adds to it.
FEATURES = (
    "row_tiles",  # A_tile num
    "column_tiles",  # B_tile num
    "block_count",  # block num
    "sparsity",
    "nnc_sum",  # NNC_sum, non-empty columns over all tiles
    "nnz_max",  # NNZ_max, nonzeros of the heaviest tile
    "rows",  # M1
    "cols",  # N1
    "k",
    "prefetch",
    "column_group",  # column blocks next to each other with the same tile
)


def features(problem: Problem, candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """One row per candidate, (candidates, FEATURES)."""
    tilings = {id(candidate.tiling): candidate.tiling for candidate in candidates}
    sums = {key: (int(tiling.nnc.sum()), int(tiling.nnz.max(initial=0))) for key, tiling in tilings.items()}
    return np.array(
        [
            (
                len(c.tiling.tiles),
                ceil_div(problem.n, c.tile.cols),
                block_count(problem, c.tile),
                problem.matrix.sparsity,
                *sums[id(c.tiling)],
                c.tile.rows,
                c.tile.cols,
                problem.matrix.k,
                c.schedule.prefetch,
                c.schedule.column_group or ceil_div(problem.n, c.tile.cols),
            )
            for c in candidates
        ],
        dtype=np.float64,
    ).reshape(len(candidates), len(FEATURES))
