"""What ``benchmarks.families`` is run on: problems by name, small enough to be sent to a builder and drawn there."""

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.kernels import SEED, SHAPES_FILE
from benchmarks.real_weights import columns_of, read_pixels
from lospmm.errors import BadRequest
from lospmm.gpu.messages import CacheState
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm_datasets import graphs
from lospmm_datasets.shapes import read_shapes
from lospmm_datasets.synthetic import uneven, uniform

#: Axes of the map: square layers, as large as language models have them, and N from one token to a batch of sequences.
MAP_SIDES = (512, 1024, 4096)
MAP_SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
MAP_COLUMNS = (4096, 16, 128, 1, 1024)
MAP_DTYPES = ("float32", "tf32", "float16")

SHAPE_SPARSITIES = (0.95, 0.98)
#: Layers of language models at many columns; ``benchmarks.decode`` has few.
LLM_SHAPES, LLM_COLUMNS = ((4096, 4096), (4096, 11008)), (512, 4096)
LLM_SPARSITIES = (0.5, 0.7, 0.8, 0.9)

#: Where A comes from memory at every launch; elsewhere only B does, as in a search.
STREAMED = ("llm", "decode")

#: Elements of a drawn matrix that is kept.
WORTH_KEEPING = 1 << 22

GRAPH_COLUMNS = (1, 32, 128)
GRAPHS: Mapping[str, Callable[[], SparseMatrix]] = {
    "power-law 100k": lambda: graphs.power_law(100_000, 10, SEED),
    "R-MAT 2^16": lambda: graphs.rmat(16, 16, SEED),
    "scattered 100k": lambda: graphs.scattered(100_000, 100_000, 10, SEED),
    "banded 200k": lambda: graphs.banded(200_000, 64, 12, SEED),
    "stencil 9, 400 x 400": lambda: graphs.stencil(400, 9, SEED),
    "blocks of 16, 16k": lambda: graphs.blocks(16_384, 16_384, 16, 0.99, SEED),
}


class Uneven(NamedTuple):
    """A layer whose rows, by ``unevenness``, and columns, by half of that, differ (``synthetic.uneven``)."""

    m: int
    k: int
    sparsity: float
    unevenness: float


Source = str | tuple[int, int, float] | Uneven


@dataclass(frozen=True, slots=True)
class Case:
    """``source`` is where the matrix is from: a file, a graph's name, or the rows, columns and sparsity of a layer."""

    set: str
    name: str  # of the matrix
    source: Source
    n: int
    dtype: str
    device: str

    @property
    def problem(self) -> str:
        return f"{self.name}, n {self.n}, {self.dtype}"

    @property
    def cache(self) -> CacheState:
        return "streamed" if self.set in STREAMED else "cold"


@lru_cache(maxsize=4)
def matrix_of(source: Source) -> SparseMatrix:
    """What takes seconds to draw is kept in the cache. Raises BadRequest for a file that cannot be read."""
    if isinstance(source, Uneven):
        m, k, sparsity, unevenness = source
        seed = SEED + zlib.crc32(repr(tuple(source)).encode()) % 1000
        return uneven(m, k, sparsity, seed, rows=unevenness, columns=unevenness / 2)
    if isinstance(source, tuple):
        return _drawn_matrix(*source)
    return GRAPHS[source]() if source in GRAPHS else readers.read(Path(source)).matrix


def _drawn_matrix(m: int, k: int, sparsity: float) -> SparseMatrix:
    seed = SEED + zlib.crc32(repr((m, k, sparsity)).encode()) % 1000
    if m * k < WORTH_KEEPING:
        return uniform(m, k, sparsity, seed)
    folder = settings().cache_dir / "drawn"
    path = folder / f"{m}-{k}-{sparsity}-{seed}.npz"
    if path.exists():
        with np.load(path) as kept:
            return SparseMatrix(m, k, kept["indptr"], kept["indices"], kept["data"])
    matrix = uniform(m, k, sparsity, seed)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{os.getpid()}-{path.name}")
    np.savez(scratch, indptr=matrix.indptr, indices=matrix.indices, data=matrix.data)
    scratch.replace(path)
    return matrix


def draw(source: Source) -> None:
    """Leave a matrix in the cache that is kept there."""
    if isinstance(source, tuple) and not isinstance(source, Uneven):
        _drawn_matrix(*source)


def problem_of(case: Case) -> Problem:
    return Problem(matrix_of(case.source), case.n, DEVICES[case.device], dtype=DTYPES[case.dtype])


def _drawn(set_name: str, gemm: tuple[int, int, int], sparsity: float, dtype: str, device: str) -> Case:
    m, k, n = gemm
    return Case(set_name, f"{m} x {k}, {sparsity:.0%} zeros", (m, k, sparsity), n, dtype, device)


def shapes(device: str, _layers: Path | None) -> list[Case]:
    """The 41 shapes, at each sparsity in each type."""
    gemms = [shape.gemm for network in read_shapes(SHAPES_FILE).networks for shape in network.shapes]
    return [
        _drawn("shapes", gemm, sparsity, dtype, device)
        for dtypes in (("float16", "tf32"), ("float32", "bfloat16"))
        for sparsity in SHAPE_SPARSITIES
        for dtype in dtypes
        for gemm in gemms
    ]


def llm(device: str, _layers: Path | None) -> list[Case]:
    """Layers of language models, fp16."""
    return [
        _drawn("llm", (m, k, n), sparsity, "float16", device)
        for m, k in LLM_SHAPES
        for n in LLM_COLUMNS
        for sparsity in LLM_SPARSITIES
    ]


def drawn_map(device: str, _layers: Path | None) -> list[Case]:
    """Every cell of the map; a run that is stopped lacks whole columns of it."""
    return [
        _drawn("map", (side, side, n), sparsity, dtype, device)
        for n in MAP_COLUMNS
        for dtype in MAP_DTYPES
        for sparsity in MAP_SPARSITIES
        for side in MAP_SIDES
    ]


def graph_like(device: str, _layers: Path | None) -> list[Case]:
    return [Case("graphs", name, name, n, "float32", device) for name in GRAPHS for n in GRAPH_COLUMNS]


def real(device: str, layers: Path | None) -> list[Case]:
    """Every layer of a folder, in every type but TF32. Raises BadRequest where the folder holds none."""
    if layers is None:
        raise BadRequest("--set real: --layers DIR must name the folder of pruned layers")
    paths = sorted(path for path in layers.rglob("*") if path.suffix in (".smtx", ".npz"))
    if not paths:
        raise BadRequest(f"{layers}: there is no .smtx or .npz file in it")
    pixels = read_pixels(layers)
    return [
        Case("real", path.relative_to(layers).as_posix(), str(path), columns_of(path, pixels), dtype, device)
        for dtype in ("float16", "float32", "bfloat16")
        for path in paths
    ]


#: By name, in the order in which they are run.
SETS: Mapping[str, Callable[[str, Path | None], list[Case]]] = {
    "shapes": shapes,
    "llm": llm,
    "graphs": graph_like,
    "real": real,
    "map": drawn_map,
}
