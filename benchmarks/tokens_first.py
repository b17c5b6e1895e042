"""A linear layer's product from tokens to tokens: turned over, and by kernels that read and write tokens first.

    python -m benchmarks.tokens_first [--out DIR] [--quick]

needs an H200 or H100. The layers are BERT-base's at its sparsity in the paper, for 4,096 tokens, B from memory. Writes
``tokens_first.jsonl``: the tuned kernel, features first; what turning its operands over takes; and, of each shape of
kernel, microseconds and its greatest error relative to |A| |B|, of some tokens. ``--quick`` has fewer shapes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import lospmm
from benchmarks.kernels import commit_of
from benchmarks.tokens_kernel import NAME, Kernel, Tokens, build
from lospmm.gpu.driver import Driver, open_driver
from lospmm.gpu.timing import copies_beyond_l2, time_rotating
from lospmm.matrix import SparseMatrix
from lospmm.model import Launch
from lospmm.nn.transpose import _BLOCKS as BLOCKS
from lospmm.nn.transpose import ENTRIES, compiled
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm_datasets.synthetic import uniform

ROOT = Path(__file__).parents[1]
TOKENS = 4096
SPARSITY = 0.9099
PROBLEMS = ((768, 768), (3072, 768), (768, 3072))
SHAPES = (
    Tokens(32, 512, 32, 3),
    Tokens(48, 512, 32, 3),
    Tokens(48, 512, 16, 4),
    Tokens(48, 256, 32, 3),
    Tokens(64, 512, 32, 3),
    Tokens(64, 512, 32, 3, tile_fastest=True),
    Tokens(64, 512, 32, 2),
    Tokens(96, 512, 32, 3),
    Tokens(48, 512, 32, 3, writes_first=True),
    Tokens(48, 512, 32, 3, without="copies"),
    Tokens(48, 512, 32, 3, without="multiply-adds"),
)
QUICK = SHAPES[1:2]

#: Tokens whose results are checked.
CHECKED = 128


def timed(driver: Driver, run: Callable[[int], None], copies: int) -> dict[str, float]:
    found = time_rotating(driver, run, copies=copies)
    return {"micros": round(found.micros, 2), "spread": round(found.spread, 4)}


def error(matrix: SparseMatrix, x: np.ndarray, y: np.ndarray) -> float:
    """Of the first tokens: y (tokens, m) against x (tokens, k) times A transposed."""
    a = matrix.to_scipy().astype(np.float64)
    wanted, scale = a @ x.T.astype(np.float64), abs(a) @ abs(x.T.astype(np.float64))
    return float((abs(wanted.T - y) / scale.T).max())


def records(shapes: tuple[Tokens, ...]) -> Iterator[dict[str, Any]]:
    device = detect_device()
    random = np.random.default_rng(0)
    for m, k in PROBLEMS:
        matrix = uniform(m, k, SPARSITY, seed=0)
        head = {"device": device.name, "m": m, "k": k, "n": TOKENS, "sparsity": SPARSITY}
        tuned = lospmm.tune(matrix, n=TOKENS, device=device.name, verify="none")
        yield {**head, "what": "features first, tuned", "micros": tuned.manifest["measured"]["micros"]}
        driver = open_driver()
        try:
            with tempfile.TemporaryDirectory() as directory:
                for row in rows(driver, matrix, shapes, random, Store(Path(directory))):
                    yield {**head, **row}
        finally:
            driver.close()


def rows(
    driver: Driver, matrix: SparseMatrix, shapes: tuple[Tokens, ...], random: np.random.Generator, store: Store
) -> Iterator[dict[str, Any]]:
    sizes = 4 * matrix.k * TOKENS, 4 * matrix.m * TOKENS
    copies = copies_beyond_l2(sum(sizes), driver.l2_bytes())
    places = [tuple(driver.allocate(size) for size in sizes) for _ in range(copies)]
    x = random.uniform(-1, 1, size=(TOKENS, matrix.k)).astype(np.float32)
    for place, _ in places:
        driver.upload(place, x)
    turn, launch = driver.load(compiled("sm_90"), ENTRIES[4]), Launch((BLOCKS * 132, 1, 1), 256)
    for which, columns in enumerate((matrix.k, matrix.m)):
        other = driver.allocate(sizes[which])

        def turned(copy: int, which: int = which, columns: int = columns, other: int = other) -> None:
            given = np.uint64(places[copy][which]), np.uint64(other), np.uint64(TOKENS | columns << 32)
            driver.launch(turn, launch, given)

        yield {"what": f"turning {columns} features over", **timed(driver, turned, copies)}
        driver.free(other)
    for shape in shapes:
        row = {"what": "tokens first", **asdict(shape)}
        try:
            yield {**row, **measured(driver, build(matrix, TOKENS, shape, store), matrix, x, places, shape)}
        except AssertionError:
            continue  # not for this problem
    for one in places:
        for address in one:
            driver.free(address)


def measured(
    driver: Driver, kernel: Kernel, matrix: SparseMatrix, x: np.ndarray, places: list[tuple[int, ...]], shape: Tokens
) -> dict[str, Any]:
    function = driver.load(kernel.cubin, NAME)
    driver.fill(places[0][1], 0xFFFFFFFF, matrix.m * TOKENS)

    def run(copy: int) -> None:
        driver.launch(function, kernel.launch, [np.uint64(place) for place in places[copy]])

    found = timed(driver, run, len(places))
    y = np.empty((matrix.m, TOKENS) if shape.writes_first else (TOKENS, matrix.m), np.float32)
    driver.download(y, places[0][1])
    y = y.T if shape.writes_first else y
    wrong = None if shape.without else error(matrix, x[:CHECKED], y[:CHECKED])
    assert wrong is None or wrong < 1e-5, f"{shape}: an error of {wrong}"
    return {**found, "error": wrong, "registers": kernel.registers, "code_bytes": kernel.code_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit, started = arguments.commit or commit_of(ROOT), time.monotonic()
    with (arguments.out / "tokens_first.jsonl").open("w") as file:
        for row in records(QUICK if arguments.quick else SHAPES):
            print(json.dumps({**row, "commit": commit}), file=file, flush=True)
            shape = "" if "rows" not in row else f"{row['rows']} x {row['tokens']}, {row['stages']} x {row['slab']}"
            rest = " ".join(str(row[name]) for name in ("writes_first", "tile_fastest", "without") if row.get(name))
            print(f"{row['m']} x {row['k']}: {row['what']:28} {shape:20} {rest:16} {row['micros']:8.2f} us", flush=True)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
