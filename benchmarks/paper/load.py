"""Figure 4: the time of one thread block against the columns that it loads, with the multiply-adds held fixed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.paper.rows import Record, Row
from benchmarks.paper.timing import Stand
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order

#: Section 4.1: the kernel, launched as one block, and its nonzeros.
M, K, N = 128, 2048, 128
NNZ = (2048, 3072, 4096)
NNC = (64, 128, 256, 512, 1024, 1536, 2048)

#: Loads in flight: as few as the paper's kernel may have had, and as many as fit here.
PREFETCHES = (4, 72)


def matrix_of(nnz: int, nnc: int) -> SparseMatrix:
    """``nnz`` nonzeros in ``nnc`` columns, evenly over the columns and the rows."""
    rng = np.random.default_rng(0)
    columns = np.sort(rng.choice(K, nnc, replace=False))
    turn, column = np.divmod(np.arange(nnz), nnc)
    return from_coo((M, K), (37 * turn + column) % M, columns[column], rng.uniform(0.5, 1.5, nnz))


def measure(stand: Stand) -> Iterator[Record]:
    for nnz in NNZ:
        for nnc in (count for count in NNC if count <= nnz <= M * count):
            matrix = matrix_of(nnz, nnc)
            tiling = natural_order(matrix, M)
            candidates = [UnrolledPlan(TileSize(M, N), Schedule(prefetch), tiling) for prefetch in PREFETCHES]
            found = stand.times(matrix, N, candidates)
            for prefetch, micros in zip(PREFETCHES, found, strict=True):
                counts = {"nnz": matrix.nnz, "nnc": int(tiling.nnc.sum())}
                yield {"figure": "4", **counts, "prefetch": prefetch, "micros": round(micros, 3)}


def divergence(records: Sequence[Record], prefetch: int) -> float:
    """The largest ratio of two times with the same nonzeros."""
    of_nnz: dict[int, list[float]] = {}
    for one in records:
        if one["prefetch"] == prefetch:
            of_nnz.setdefault(one["nnz"], []).append(one["micros"])
    return max(max(micros) / min(micros) for micros in of_nnz.values())


def rows(records: Sequence[Record]) -> list[Row]:
    deep = "; ".join(str(prefetch) for prefetch in PREFETCHES)
    found = "; ".join(f"{divergence(records, prefetch):.2f}" for prefetch in PREFETCHES)
    return [Row(f"slowest over fastest at equal nonzeros, {deep} loads in flight", "10.99", found)]


def plot(records: Sequence[Record], path: Path) -> None:
    figure, panels = plt.subplots(1, len(PREFETCHES), figsize=(10, 4), sharey=True, layout="constrained")
    for panel, prefetch in zip(panels, PREFETCHES, strict=True):
        for nnz in NNZ:
            mine = [one for one in records if (one["nnz"], one["prefetch"]) == (nnz, prefetch)]
            panel.plot([one["nnc"] for one in mine], [one["micros"] for one in mine], "o-", label=f"nnz {nnz:,}")
        panel.set_title(f"{prefetch} loads in flight")
        panel.set_xlabel("non-empty columns")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("microseconds")
    figure.suptitle(f"Figure 4: one block of {M} x {N}, K {K:,}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
