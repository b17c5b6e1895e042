"""One kernel for several numbers of columns: started for the first of them alone, beside a kernel made for so many.

    python -m benchmarks.fewer_columns [--out DIR]

needs an H200 or H100. Writes ``fewer_columns.jsonl`` and prints a line for each.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Operands, build, record
from lospmm.codegen.ir import narrowed
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.unrolled import search
from lospmm_datasets.synthetic import uniform

#: (m, k, sparsity), n of the kernel, and the columns that it is started for.
LAYERS = ((768, 768, 0.9), (3072, 768, 0.9))
N = 4096
COLUMNS = (256, 512, 1024, 2048, 3072, 4096)
LOCKSTEP = 128


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    ranker, splits = RANKERS["lambdamart"](device), splits_of("sass", device.arch)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for m, k, sparsity in LAYERS:
            matrix = uniform(m, k, sparsity, seed=0)
            found = {}
            for n in COLUMNS:
                problem = for_emitter(Problem(matrix, n, device), "sass")
                chosen = search(problem, ranker, 10, Stages(), lockstep=LOCKSTEP, splits=splits).winner.plan
                found[n] = chosen, build(problem, chosen, store)
            for columns in COLUMNS:
                for n in sorted({N, columns}):
                    candidate, kernel = found[n]
                    kernel = replace(kernel, launch=narrowed(kernel.launch, columns))
                    operands = Operands(driver, matrix, n, FLOAT32, computed=columns)
                    yield {"device": device.name, "m": m, "k": k, "sparsity": sparsity, "columns": columns, "n": n,
                           **candidate.tile._asdict(), **asdict(candidate.schedule),
                           **operands.time(kernel)}  # fmt: skip
                    operands.close()
    driver.close()


def main() -> None:
    record("fewer_columns.jsonl", records(), description=__doc__)


if __name__ == "__main__":
    main()
