"""Kernels that lines of ``kernels.jsonl`` chose, built again and timed beside the libraries.

A line has the tile and schedule of an unrolled kernel, and the launch of another family's plan: of the plans with that
launch the one that the forecast puts first is taken.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

from benchmarks.emission_pool import EmissionPool
from benchmarks.kernels_table import Record, measured_of
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES
from lospmm.families.candidate import UNROLLED, unrolled
from lospmm.gpu.bench import BESIDE
from lospmm.gpu.compare import compare
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.plans import plans_for
from lospmm.tuning.session import Session

EMITTER = "sass"


@contextmanager
def recorded(lines: Iterable[Record], problems: Iterable[Problem]) -> Iterator[Callable[..., Mapping[str, Any]]]:
    """Yield what ``benchmarks.kernels`` takes for a tuner; processes build its kernels meanwhile."""
    chosen = {(line["fingerprint"], line["n"]): line for line in measured_of(lines)}
    lock = exclusive(settings().cache_dir, gpu=own_gpu_id())
    with EmissionPool(settings().workers) as pool, Session(1) as session, lock:
        coming = {}
        for problem in (for_emitter(one, EMITTER) for one in problems):
            key = problem.matrix.fingerprint, problem.n
            if key in chosen and key not in coming:
                coming[key] = problem, pool.submit(built, problem, chosen[key])

        def tune(matrix: SparseMatrix, _values: object, n: int) -> Mapping[str, Any]:
            if (key := (matrix.fingerprint, n)) not in coming:
                raise BadRequest("no line has a kernel of this matrix")
            (problem, building), line = coming[key], chosen[key]
            about, kernel = building.result()
            bench = session.bench(problem, None)
            found = compare(bench, kernel, effort=BESIDE, sputnik=settings().sputnik)
            measured = {**asdict(found.measured()), "chosen": [line["machine"]["device"], line["commit"]]}
            verified = {"max_relative_error": found.max_relative_error}
            return {**line, **about, "measured": measured, "verified": verified, "seconds": {}}

        yield tune


def built(problem: Problem, line: Record) -> tuple[Record, Compiled]:
    """What a manifest says of the kernel of a line, and the kernel."""
    family = line.get("family", UNROLLED)
    if family == UNROLLED:
        rows, cols, *axes = (line["tile"][name] for name in ("rows", "cols", *(axis.name for axis in fields(Schedule))))
        tiling = regroup(problem.matrix, [rows])[rows]
        candidate = unrolled(UnrolledPlan(TileSize(rows, cols), Schedule(*axes), tiling))
    else:
        plans = plans_for(problem, (family,)).plans
        same = (one for one in plans if shape(FAMILIES[family].pack(problem, one.plan).launch) == line["launch"])
        candidate = next(same, plans[0])
    kernel = build(problem, candidate, emitter=EMITTER, store=Store(settings().cache_dir), workers=1)
    about = {
        **{name: getattr(kernel.binary, name) for name in ("toolchain", "registers", "code_bytes")},
        "cubin_family": family,
        "emitter": kernel.language,
        "launch": shape(kernel.compiled.launch),
    }
    return about, kernel.compiled


def shape(launch: Launch) -> Record:
    """As in a line."""
    return {**asdict(launch), "grid": [*launch.grid]}
