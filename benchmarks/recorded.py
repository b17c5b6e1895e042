"""Kernels that lines of ``kernels.jsonl`` chose, built again and timed beside the libraries and restricted searches.

A line has the tile and schedule of an unrolled kernel, and the launch of another family's plan: of the plans with that
launch the one that the forecast puts first is taken.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from benchmarks.emission_pool import EmissionPool
from benchmarks.kernels_table import Record, measured_of
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES
from lospmm.families.candidate import UNROLLED, unrolled
from lospmm.gpu.bench import AGAIN, BESIDE
from lospmm.gpu.compare import compare
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Launch, Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.plans import plans_for
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.session import Session
from lospmm.tuning.unrolled import search

EMITTER = "sass"

#: Tile sizes of a restricted search, the first by the estimate: K of EC-SpMM in section 7.4.
TOP = 10


def regrouped(matrix: SparseMatrix, rows: int) -> Tiling:
    return regroup(matrix, [rows])[rows]


#: Restricted searches, of kernels with constants in the code and one load in flight, by the field of the fastest one's
#: time: rows in order, as in SparTA, and regrouped as in EC-SpMM, by Algorithm 1 in place of a hypergraph partitioner.
RESTRICTED: Mapping[str, Callable[[SparseMatrix, int], Tiling]] = {
    "like_sparta_micros": natural_order,
    "like_ec_spmm_micros": regrouped,
}


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
            about, kernel, restricted = building.result()
            bench = session.bench(problem, None)
            found = compare(bench, kernel, effort=BESIDE, sputnik=settings().sputnik)
            measured = {**asdict(found.measured()), "chosen": [line["machine"]["device"], line["commit"]]}
            for name, kernels in restricted.items():
                times = [bench.measure(one.cubin, one.entry, one.launch, effort=AGAIN).timing for one in kernels]
                measured[name] = min((one.micros for one in times if one is not None), default=None)
            verified = {"max_relative_error": found.max_relative_error}
            return {**line, **about, "measured": measured, "verified": verified, "seconds": {}}

        yield tune


def built(problem: Problem, line: Record) -> tuple[Record, Compiled, dict[str, list[Compiled]]]:
    """What a manifest says of the kernel of a line, the kernel, and those of the restricted searches."""
    family = line.get("family", UNROLLED)
    make = partial(build, problem, emitter=EMITTER, store=Store(settings().cache_dir), workers=1)
    if family == UNROLLED:
        rows, cols, *axes = (line["tile"][name] for name in ("rows", "cols", *(axis.name for axis in fields(Schedule))))
        candidate = unrolled(UnrolledPlan(TileSize(rows, cols), Schedule(*axes), regrouped(problem.matrix, rows)))
    else:
        plans = plans_for(problem, (family,)).plans
        same = (one for one in plans if shape(FAMILIES[family].pack(problem, one.plan).launch) == line["launch"])
        candidate = next(same, plans[0])
    listed = search(problem, RANKERS["none"](problem.device), TOP, Stages()).shortlist
    sizes = dict.fromkeys(one.plan.tile for one in listed)
    restricted = {
        name: [
            make(unrolled(UnrolledPlan(one, Schedule(1), order(problem.matrix, one.rows)))).compiled for one in sizes
        ]
        for name, order in RESTRICTED.items()
    }
    kernel = make(candidate)
    about = {
        **{name: getattr(kernel.binary, name) for name in ("toolchain", "registers", "code_bytes")},
        "cubin_family": family,
        "emitter": kernel.language,
        "launch": shape(kernel.launch),
    }
    return about, kernel.compiled, restricted


def shape(launch: Launch) -> Record:
    """As in a line."""
    return {**asdict(launch), "grid": [*launch.grid]}
