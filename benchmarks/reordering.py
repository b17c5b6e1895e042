"""Section 4.3: Algorithm 1, swaps, no reordering and a hypergraph partitioner, and how long they take.

    python -m benchmarks.reordering [--out DIR] [--layers DIR [--times N]]

writes ``reordering.jsonl``, one record a line. A record with ``"measure": "tiles"`` is one method on one matrix of
``paired_blocks`` (``benchmarks.paper`` times their kernels: Figure 6); ``"layers"``, Algorithm 1 over no reordering on
a .smtx or .npz file of ``--layers``, and total nnc with swaps over that of Algorithm 1; ``"seconds"``, ``regroup`` for
every M1 from 1 to 240. The partitioner, Mt-KaHyPar, is left out where it is not installed. ``--times`` writes
``swaps_N.jsonl`` instead: kernels of the layers with and without swaps, in turns, which needs a GPU.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Kernel, build, micros_in_turns, open_lines
from benchmarks.kernels import Case, real
from lospmm.codegen.lower import with_swaps
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem, ceil_div
from lospmm.settings import settings
from lospmm.space.candidates import Tiling
from lospmm.space.reorder import natural_order, nonempty_rows, regroup
from lospmm.space.reorder import tiling_of as regrouped
from lospmm.space.swaps import swapped
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.unrolled import search
from lospmm_datasets.synthetic import paired_blocks, uniform

Record = dict[str, Any]
#: The tiles of a matrix for an M1.
Method = Callable[[SparseMatrix, int], Tiling]

SIZE_LIMIT = 32
LAYER_SIZE_LIMITS = [8, 32, 128]
SIMILARITIES = [step / 10 for step in range(10)]
LOAD_RATIOS = [1, 2, 3]
#: (m, k, sparsity): a layer of a Transformer, a wide convolution, and a vocabulary.
TIMED_SHAPES = [(3072, 768, 0.9), (2048, 4608, 0.9), (33708, 512, 0.9)]


def tiling_of(matrix: SparseMatrix, placement: NDArray[np.int64]) -> Tiling:
    """The tiling of ``placement``, (m,), the tile of each row; its M1 is what the largest tile has."""
    rows = nonempty_rows(matrix)
    _, own = np.unique(placement[rows.index], return_inverse=True)
    return regrouped(rows, own, int(np.bincount(own).max()), np.flatnonzero(matrix.row_nnz == 0).astype(np.int32))


def kahypar_method() -> Method | None:
    """Rows are nodes that weigh their nnz, columns hyperedges; the objective is connectivity (km1), epsilon 0.03."""
    try:
        import mtkahypar
    except ImportError:
        return None
    library = mtkahypar.initialize(1, print_warnings=False)

    def partition(matrix: SparseMatrix, size_limit: int) -> Tiling:
        mtkahypar.set_seed(0)
        context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC_QUALITY)
        context.set_partitioning_parameters(ceil_div(matrix.m, size_limit), 0.03, mtkahypar.Objective.KM1)
        context.logging = False
        by_column = matrix.to_scipy().tocsc()
        columns = [rows.tolist() for rows in np.split(by_column.indices, by_column.indptr[1:-1]) if len(rows)]
        weights = matrix.row_nnz.tolist()
        hypergraph = library.create_hypergraph(context, matrix.m, len(columns), columns, weights, [1] * len(columns))
        return tiling_of(matrix, np.array(hypergraph.partition(context).get_partition()))

    return partition


@cache
def methods() -> dict[str, Method]:
    found: dict[str, Method] = {
        "no reordering": natural_order,
        "Algorithm 1": lambda matrix, limit: regroup(matrix, [limit])[limit],
        "with swaps": lambda matrix, limit: swapped(matrix, regroup(matrix, [limit])[limit]),
    }
    partitioner = kahypar_method()
    if partitioner is None:
        print("mtkahypar cannot be imported: the hypergraph partitioner is left out")
    else:
        found["Mt-KaHyPar"] = partitioner
    return found


def tile_figures(tiling: Tiling) -> Record:
    """What a grouping asks of thread blocks."""
    return {
        "max_nnc": int(tiling.nnc.max()),
        "total_nnc": int(tiling.nnc.sum()),
        "max_nnz": int(tiling.nnz.max()),
        "nnz_variation": round(float(tiling.nnz.std() / tiling.nnz.mean()), 4),
        "max_rows": int(tiling.sizes.max()),
    }


def measure_tiles(similarities: list[float], load_ratios: list[int]) -> Iterator[Record]:
    compared = methods()
    for load_ratio in load_ratios:
        for similarity in similarities:
            matrix = paired_blocks(similarity, load_ratio, seed=0)
            for name, method in compared.items():
                started = time.perf_counter()
                tiling = method(matrix, SIZE_LIMIT)
                seconds = round(time.perf_counter() - started, 4)
                setting = {"method": name, "load_ratio": load_ratio, "similarity": similarity}
                yield {"measure": "tiles", **setting, **tile_figures(tiling), "seconds": seconds}


def measure_layers(folder: Path) -> Iterator[Record]:
    """Figures after over those before: below 1 is better."""
    for case in real(folder):
        matrix, _ = case.matrix()
        for limit, tiling in regroup(matrix, LAYER_SIZE_LIMITS).items():
            before, after = map(tile_figures, (natural_order(matrix, limit), tiling))
            ratios = {name: round(after[name] / before[name], 3) for name in ("max_nnc", "total_nnc", "max_nnz")}
            ratios["swapped_nnc"] = round(int(swapped(matrix, tiling).nnc.sum()) / after["total_nnc"], 3)
            yield {"measure": "layers", "layer": case.labels["layer"], "size_limit": limit, **ratios}


def measure_seconds(shapes: list[tuple[int, int, float]]) -> Iterator[Record]:
    cores = len(os.sched_getaffinity(0))
    for m, k, sparsity in shapes:
        matrix = uniform(m, k, sparsity, seed=0)
        for workers in sorted({1, cores}):
            started, cpu_started = time.perf_counter(), time.process_time()
            regroup(matrix, range(1, 241), workers=workers)
            spent = round(time.perf_counter() - started, 2), round(time.process_time() - cpu_started, 2)
            shape = {"m": m, "k": k, "sparsity": sparsity, "size_limits": "1 to 240"}
            spent_on = {"workers": workers, "cores": cores, "seconds": spent[0], "cpu_seconds": spent[1]}
            yield {"measure": "seconds", **shape, **spent_on}


def kernels_of(device: DeviceSpec, case: Case) -> tuple[Problem, dict[str, Kernel]]:
    """A layer, and the plan that is ranked first for it as a kernel with either tiles."""
    problem = for_emitter(Problem(case.matrix()[0], case.n, device), "sass")
    splits = splits_of("sass")
    plan = search(problem, RANKERS["lambdamart"](device), 1, Stages(), splits=splits).winner.plan
    with tempfile.TemporaryDirectory() as store:
        compared = {"micros": plan, "swapped_micros": with_swaps(problem, plan)}
        return problem, {name: build(problem, one, Store(Path(store))) for name, one in compared.items()}


def measure_micros(folder: Path, n: int) -> Iterator[Record]:
    """Microseconds of the kernels of each layer on this GPU, in turns."""
    device, bench, cases = detect_device(), None, real(folder, [n])
    with ProcessPoolExecutor(settings().workers, mp_context=get_context("spawn")) as pool:
        for case, (problem, kernels) in zip(cases, pool.map(partial(kernels_of, device), cases), strict=True):
            bench = bench or Bench(problem)
            bench.turn_to(problem)
            found = micros_in_turns(bench, kernels)
            yield {"measure": "micros", "layer": case.labels["layer"], "n": n, "device": device.name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Section 4.3: what reordering does to the tiles, and how fast it is.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers to regroup too")
    parser.add_argument("--times", type=int, metavar="N", help="only time the kernels of --layers for N columns")
    options = parser.parse_args()
    records: Iterable[Record]
    if options.times:
        name, records = f"swaps_{options.times}.jsonl", measure_micros(options.layers, options.times)
    else:
        layers = () if options.layers is None else measure_layers(options.layers)
        tiles, seconds = measure_tiles(SIMILARITIES, LOAD_RATIOS), measure_seconds(TIMED_SHAPES)
        name, records = "reordering.jsonl", chain(tiles, layers, seconds)
    with open_lines(options.out / name, "w") as file:
        for record in records:
            print(*record.values(), flush=True)
            print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main()
