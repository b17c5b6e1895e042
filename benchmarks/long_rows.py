"""Rows of many products (``lospmm.problem.long_rows``): what it costs to add them up in parts, and by how much that is
more exact.

    python -m benchmarks.long_rows [--out DIR]

needs an H200 or H100. The layers of BERT-base of 768 x 3072 weights, as ``benchmarks.networks`` prunes them to 91 %
zeros in the mean, and two matrices of which every row is long, for 4,096 columns. What the rank model chooses where
rows are added up in parts, and what it chooses where each is one chain, are timed in both forms, twice in turns, where
a block has the registers. Errors are those of every element for B drawn from normal numbers and GELU of it, relative to
the greatest element. Writes ``long_rows.jsonl`` and prints a line for each.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Kernel, Operands, build, record
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem import long_rows as sums
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import runs
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.unrolled import search
from lospmm_datasets.networks import SPREADS, WantedPattern, depth_sparsities, drawn
from lospmm_datasets.synthetic import uniform

M, K, N, SPARSITY = 768, 3072, 4096, 0.9099
LAYERS_OF_BERT, PRUNED_OF_LAYER = 12, 6
TURNS = 2

#: Products of a chain by the name of the form: so many that every row is one chain. In parts are all that are longer,
#: also where they are most of a matrix, of which a tuning makes one chain each.
FORMS = {"in parts": sums.PRODUCTS, "one chain": 1 << 40}


#: B and C by name.
Exact = dict[str, tuple[NDArray[np.float32], NDArray[np.float64]]]


@contextmanager
def chains_of(form: str) -> Iterator[None]:
    before = sums.PRODUCTS, sums.SHARE
    sums.PRODUCTS, sums.SHARE = FORMS[form], 1.0
    try:
        yield
    finally:
        sums.PRODUCTS, sums.SHARE = before


def weights(layer: int) -> SparseMatrix:
    """As ``benchmarks.inference`` prunes the layer; its values are normal numbers here."""
    sparsity = depth_sparsities(SPARSITY, LAYERS_OF_BERT)[layer]
    seed = PRUNED_OF_LAYER * layer + PRUNED_OF_LAYER - 1
    mask = np.asarray(drawn(WantedPattern(M, K, sparsity, 1), SPREADS["learned"], seed).mask).reshape(M, K)
    return from_dense(np.where(mask, np.random.default_rng(seed).normal(size=(M, K)), 0))


#: By name.
LAYERS = {
    **{f"BERT {layer}": partial(weights, layer) for layer in range(LAYERS_OF_BERT)},
    "768 x 3072, 70%": partial(uniform, 768, 3072, 0.7, seed=0),
    "4096 x 4096, 90%": partial(uniform, 4096, 4096, 0.9, seed=0),
}


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    ranker = RANKERS["lambdamart"](device)
    with tempfile.TemporaryDirectory() as directory:
        for layer, matrix in LAYERS.items():
            problem = for_emitter(Problem(matrix(), N, device), "sass")
            chosen: dict[str, UnrolledPlan] = {}
            for form in FORMS:
                with chains_of(form):
                    splits = splits_of("sass")
                    found = search(problem, ranker, 10, Stages(), splits=splits)
                chosen[form] = found.winner.plan
            exact = exact_of(problem.matrix)
            operands = Operands(driver, problem.matrix, N, FLOAT32)
            for chosen_for, candidate in chosen.items():
                for turn in range(TURNS):
                    for form in FORMS:
                        with chains_of(form):
                            if not runs(problem, UnrolledPlans.of([candidate])).all():
                                continue
                            kernel = build(problem, candidate, Store(Path(directory)))
                        errors = {} if turn else errors_of(driver, problem.matrix, kernel, exact)
                        yield {"device": device.name, "layer": layer, "nonzeros": problem.matrix.nnz,
                               "longest_row": int(problem.matrix.row_nnz.max()), "chosen_for": chosen_for,
                               "form": form, "turn": turn, **candidate.tile._asdict(), **asdict(candidate.schedule),
                               **operands.time(kernel), **errors}  # fmt: skip
            operands.close()
    driver.close()


def exact_of(matrix: SparseMatrix) -> Exact:
    """Each kind of B, and C of it."""
    normal = np.random.default_rng(0).standard_normal((matrix.k, N)).astype(np.float32)
    a = matrix.to_scipy().toarray().astype(np.float64)
    return {name: (b, a @ b.astype(np.float64)) for name, b in (("normal", normal), ("gelu", gelu(normal)))}


def errors_of(driver: Driver, matrix: SparseMatrix, kernel: Kernel, exact_by_name: Exact) -> dict[str, float]:
    """The greatest of one run for each kind of B, relative to the greatest element."""
    b, c = driver.allocate(matrix.k * N * 4), driver.allocate(matrix.m * N * 4)
    found = {}
    for name, (elements, exact) in exact_by_name.items():
        driver.upload(b, elements)
        driver.fill(c, 0xFFFFFFFF, matrix.m * N)
        driver.launch(driver.load(kernel.cubin, kernel.entry), kernel.launch, [np.uint64(b), np.uint64(c)])
        stored = np.empty((matrix.m, N), np.float32)
        driver.download(stored, c)
        found[f"greatest_error_{name}"] = float(f"{np.abs(stored - exact).max() / np.abs(exact).max():.3g}")
    driver.free(b)
    driver.free(c)
    return found


def gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """By the approximation with tanh (Hendrycks and Gimpel, 2016)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)


def main() -> None:
    record("long_rows.jsonl", records(), description=__doc__)


if __name__ == "__main__":
    main()
