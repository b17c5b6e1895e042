"""What several benchmarks share: files of results, the command that records lines, and kernels that are checked."""

import argparse
import gzip
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import launch
from lospmm.codegen.lower import lower
from lospmm.errors import BadRequest
from lospmm.gpu.bench import AGAIN, Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.gpu.timing import FULL, Effort, copies_beyond_l2, time_rotating
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled, compile_kernel
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform

Row = dict[str, Any]
Key = TypeVar("Key")

SAMPLED_COLUMNS = 98  # even: both halves of a word

#: How often each of several kernels is timed.
TURNS = 5


def read_lines(path: Path) -> list[Row]:
    """The lines of a file of results; a ``.gz`` is unpacked."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def open_lines(path: Path, mode: Literal["w", "a"]) -> TextIO:
    """A file of results to write or append lines to; a ``.gz`` is packed."""
    return cast(TextIO, gzip.open(path, f"{mode}t") if path.suffix == ".gz" else path.open(mode))


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """The whole file or the old one, whenever this process ends; the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    scratch = path.with_suffix(".part")
    scratch.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    scratch.replace(path)


def read_results(path: Path, key_of: Callable[[Row], Key]) -> dict[Key, Row]:
    """The lines of a file by key; none where there is no file. Raises BadRequest for what is not such a file."""
    try:
        return {key_of(record): record for record in read_lines(path)}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"{path}: not the lines of this benchmark ({error!r}); name another --out") from None


def write_results(path: Path, results: Mapping[Any, Row]) -> None:
    """As ``write_lines``; the keys are not written."""
    write_lines(path, results.values())


def problem_of(gemm: tuple[int, int, int], sparsity: float) -> Problem:
    """A drawn matrix of (m, k, n) for kernels of machine code, on this machine's GPU."""
    m, k, n = gemm
    return for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, detect_device()), "sass")


def part(text: str) -> slice:
    """Of "I/COUNT", what a GPU of COUNT takes of a list: every COUNTth, from the Ith on."""
    first, step = map(int, text.split("/"))
    return slice(first, None, step)


def values(row: Row) -> str:
    """All of a line but the device."""
    return " ".join(str(value) for name, value in row.items() if name != "device")


def record(
    name: str,
    rows: Iterable[Row],
    shown: Callable[[Row], str] = values,
    *,
    description: str | None,
    folder: Path = Path("benchmarks/results"),
) -> None:
    """The command ``[--out DIR]``: writes DIR/``name``, a line as soon as it is known, and shows it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=folder)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with open_lines(out / name, "w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)
            print(shown(row), flush=True)


def best_of_kinds(candidates: UnrolledPlans, scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of as many tiles, columns and blocks to a tile, the index of the lowest score; by score."""
    tiles = candidates.by_tiling(lambda tiling: tiling.count)
    kinds = np.stack((tiles, candidates.cols, candidates.split_k), axis=1)
    order = np.argsort(scores, kind="stable")
    _, first = np.unique(kinds[order], axis=0, return_index=True)
    return order[np.sort(first)].astype(np.int64)


def micros_in_turns(bench: Bench, kernels: Mapping[Key, "Compiled | Kernel"]) -> dict[Key, float | None]:
    """The median microseconds of each, timed one after the other TURNS times; None where it never ran."""
    bench.kernel_seconds, times = None, {key: list[float]() for key in kernels}
    for key, one in [pair for _ in range(TURNS) for pair in kernels.items()]:
        timing = bench.measure(one.cubin, one.entry, one.launch, effort=AGAIN).timing
        times[key] += [] if timing is None else [timing.micros]
    return {key: round(statistics.median(found), 3) if found else None for key, found in times.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    cubin: bytes
    entry: str
    launch: Launch
    code_bytes: int


def build(problem: Problem, candidate: UnrolledPlan, store: Store) -> Kernel:
    """The kernel of machine code of a candidate."""
    program = lower(problem, candidate)
    arch = problem.device.arch
    binary = compile_kernel(emit(program, "sass", arch), arch=arch, registers=program.registers, store=store, workers=1)
    return Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)


class Operands:
    """B and C of a number, in copies that the L2 cache does not hold, and what some columns of C should be."""

    def __init__(self, driver: Driver, matrix: SparseMatrix, n: int, dtype: Dtype, computed: int | None = None) -> None:
        """``computed`` columns of C are looked at, the first ones; None: all ``n``."""
        self.driver, self.m, self.n, self.dtype = driver, matrix.m, n, dtype
        sizes = dtype.element_bytes * matrix.k * n, dtype.element_bytes * matrix.m * n
        count = copies_beyond_l2(sum(sizes), driver.l2_bytes())
        self.places = [tuple(driver.allocate(one) for one in sizes) for _ in range(count)]
        values = np.random.default_rng(0).uniform(-1, 1, size=(matrix.k, n)).astype(np.float32)
        stored = dtype.to_storage(values)
        for b, _ in self.places:
            driver.upload(b, stored)
        self.columns = np.linspace(0, (computed or n) - 1, SAMPLED_COLUMNS).astype(int)
        rows = np.repeat(np.arange(matrix.m), np.diff(matrix.indptr))
        dense = np.zeros((matrix.m, matrix.k))
        dense[rows, matrix.indices] = dtype.rounded(matrix.data)
        few = dtype.from_storage(stored[:, self.columns]).astype(np.float64)
        self.expected, self.magnitude = dense @ few, np.abs(dense) @ np.abs(few)

    def time(self, kernel: Kernel, extra: Sequence[np.generic] = (), effort: Effort = FULL) -> dict[str, Any]:
        """Microseconds with B from memory, and errors relative to |A||B|, of a kernel of B, C and what is ``extra``."""
        run = self._launcher(kernel, extra)
        relative = self._errors(run)
        micros = time_rotating(self.driver, run, copies=len(self.places), effort=effort).micros
        return {"micros": round(micros, 2), "max_relative_error": float(f"{relative.max():.3g}"),
                "rms_relative_error": float(f"{np.sqrt(np.mean(relative**2)):.3g}")}  # fmt: skip

    def _launcher(self, kernel: Kernel, extra: Sequence[np.generic]) -> Callable[[int], None]:
        driver, function = self.driver, self.driver.load(kernel.cubin, kernel.entry)

        def run(copy: int) -> None:
            driver.launch(function, kernel.launch, [*(np.uint64(place) for place in self.places[copy]), *extra])

        return run

    def _errors(self, run: Callable[[int], None]) -> NDArray[np.float64]:
        """Of one launch, relative to |A||B|; an element that is not written is not a number."""
        c = self.places[0][1]
        found = np.zeros((self.m, self.n), self.dtype.to_storage(np.zeros(1, np.float32)).dtype)
        self.driver.fill(c, 0xFFFFFFFF, found.nbytes // 4)
        run(0)
        self.driver.download(found, c)
        error = np.abs(self.dtype.from_storage(found[:, self.columns]).astype(np.float64) - self.expected)
        relative: NDArray[np.float64] = error / np.maximum(self.magnitude, np.finfo(np.float32).tiny)
        return relative

    def close(self) -> None:
        for place in self.places:
            for address in place:
                self.driver.free(address)
