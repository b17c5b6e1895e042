"""The work of ``benchmarks.einsum``: matrices of graphs, of blocks and of pruned layers, drawn from seeds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm_datasets.synthetic import uniform


def power_law(nodes: int, degree: int, seed: int, exponent: float = 1.8) -> SparseMatrix:
    """A graph's (nodes, nodes): out-degrees and the targets of edges both fall off as a power, as R-MAT's do.

    ``degree`` edges a node on average, fewer where one is drawn twice; nodes are numbered at random.
    """
    random = np.random.default_rng(seed)
    chance = np.arange(1, nodes + 1) ** (-1.0 / (exponent - 1.0) * 0.6)
    ends = np.cumsum(chance / chance.sum())
    count = nodes * degree
    names = random.permutation(nodes), random.permutation(nodes)
    rows, cols = (name[np.searchsorted(ends, random.random(count)).clip(max=nodes - 1)] for name in names)
    keys = np.unique(rows.astype(np.int64) * nodes + cols)
    return from_coo((nodes, nodes), keys // nodes, keys % nodes, random.standard_normal(len(keys)).astype(np.float32))


def blocky(m: int, k: int, side: int, density: float, seed: int) -> SparseMatrix:
    """(m, k) whose nonzeros fill blocks of ``side`` x ``side``, ``density`` of all of them."""
    random = np.random.default_rng(seed)
    there = random.random((m // side, k // side)) < density
    rows, cols = np.nonzero(np.kron(there, np.ones((side, side), bool)))
    return from_coo((m, k), rows, cols, random.standard_normal(len(rows)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Spmm:
    make: Callable[[], SparseMatrix]
    n: int
    dtypes: tuple[str, ...]
    families: tuple[str, ...] = ("group_coo",)


SPMM: Mapping[str, Spmm] = MappingProxyType(
    {
        "graph 65536, degree 16": Spmm(lambda: power_law(65536, 16, 1), 128, ("float32", "float16")),
        "graph 65536, degree 16, narrow": Spmm(lambda: power_law(65536, 16, 1), 32, ("float32", "float16")),
        "graph 16384, degree 64": Spmm(lambda: power_law(16384, 64, 3), 128, ("float32",)),
        "layer 768 x 768, 95 %": Spmm(lambda: uniform(768, 768, 0.95, 4), 4096, ("float32", "float16")),
        "layer 4096 x 4096, 90 %": Spmm(lambda: uniform(4096, 4096, 0.9, 5), 512, ("float32", "float16")),
        "blocks of 32, 10 %": Spmm(
            lambda: blocky(4096, 4096, 32, 0.1, 6),
            512,
            ("float32", "tf32", "float16"),
            ("block_group_coo", "group_coo"),
        ),
        "blocks of 32, 10 %, wide": Spmm(
            lambda: blocky(4096, 4096, 32, 0.1, 6), 4096, ("tf32", "float16"), ("block_group_coo",)
        ),
        "blocks of 16, 5 %": Spmm(
            lambda: blocky(4096, 4096, 16, 0.05, 7), 1024, ("tf32", "float16"), ("block_group_coo", "group_coo")
        ),
    }
)
