"""The kernels of ``benchmarks.families``: built on all cores, ahead of the GPU, and left in files."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import families_unrolled
from benchmarks.families_cases import Case, draw, problem_of
from lospmm.families import FAMILIES, ONE_COPY, Family
from lospmm.families.candidate import CODED_FAMILIES
from lospmm.families.traits import traits_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from lospmm_rank.predict.corrections import DENSE, corrected, dense_micros, factor

PLANS = 12

#: A family is left out whose best forecast is so many times that of another, or of the dense multiplication.
FAR = 4.0

#: The paper's kernel has 16 bytes of code per nonzero; larger ones are not built here.
UNROLLED = "unrolled"
MAX_UNROLLED_NONZEROS = 900_000
LEAST_UNROLLED_COLUMNS = 16  # with fewer most of a warp's threads have nothing to do

#: Problems that are built ahead of the one that is timed; a dozen kernels of a large one take gigabytes of disk.
AHEAD = 20


class Shortlist(NamedTuple):
    """What of each family's plans is built, and of which families; () are all."""

    plans: int = PLANS
    far: float = FAR
    families: tuple[str, ...] = ()
    memory: str = "fast"
    values: str = "dtype"

    def takes(self, family: str) -> bool:
        return not self.families or family in self.families

    def of(self, problem: Problem) -> tuple[Problem, Mapping[str, Family]]:
        """The problem with these values, and the families that have them."""
        rows = FAMILIES if self.memory == "fast" else ONE_COPY
        if self.values == "dtype":
            return problem, rows
        coded = {name: family for name, family in rows.items() if name in CODED_FAMILIES}
        return replace(problem, values=VALUE_TYPES[self.values]), coded


class Kernel(NamedTuple):
    """A file, for A may be in it with tens of megabytes."""

    cubin: Path
    entry: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class Built:
    """One plan: a kernel, or why there is none."""

    family: str
    plan: str
    forecast: float | None
    kernel: Kernel | None
    failure: str | None = None


class Prepared(NamedTuple):
    problem: Problem
    built: list[Built]
    refused: dict[str, str]  # why a family has no plan, by its name
    seconds: float


def prepare(case: Case, shortlist: Shortlist, folder: Path) -> Prepared:
    """The kernels of a problem, in files of ``folder``; in a builder."""
    started = time.monotonic()
    problem, families = shortlist.of(problem_of(case))
    chosen: dict[str, list[tuple[Any, float]]] = {}
    refused = {}
    for name, family in families.items():
        why = family.refusal(problem)
        plans = [] if why else list(family.plans(problem))
        if not plans:
            refused[name] = why or "no plan"
            continue
        micros = family.forecast(problem, plans)
        chosen[name] = [(plans[at], float(micros[at])) for at in np.argsort(micros, kind="stable")[: shortlist.plans]]
    expected = _corrected(problem, chosen, is_streamed=case.cache == "streamed")
    nearest = min(chosen, key=lambda name: expected[name], default=None)
    limit = shortlist.far * min(expected.values())
    built = []
    for name, found in chosen.items():
        if expected[name] > limit and name != nearest and case.set != "real":
            refused[name] = f"a forecast of {expected[name]:.1f} us"
        elif shortlist.takes(name):
            built += [build_plan(problem, name, plan, forecast, folder) for plan, forecast in found]
    takes_unrolled = 0 < problem.matrix.nnz <= MAX_UNROLLED_NONZEROS and problem.n >= LEAST_UNROLLED_COLUMNS
    if takes_unrolled and shortlist.takes(UNROLLED):
        own = islice(families_unrolled.kernels(problem), shortlist.plans if case.set == "map" else None)
        built += [_in_file(one, folder) for one in own]  # those with sums in float32 come first
    return Prepared(problem, built, refused, time.monotonic() - started)


def _corrected(
    problem: Problem, chosen: Mapping[str, Sequence[tuple[Any, float]]], *, is_streamed: bool
) -> dict[str, float]:
    """Microseconds of each family, and of the dense multiplication, as far as times have taught them."""
    traits, device = traits_of(problem, is_streamed=is_streamed), problem.device
    dense = dense_micros(traits, problem.device)
    found = {DENSE: dense * factor(DENSE, dense, traits=traits, device=device)}
    for name, plans in chosen.items():
        forecasts = np.array([micros for _, micros in plans])
        found[name] = float(corrected(name, [plan for plan, _ in plans], forecasts, traits=traits, device=device).min())
    return found


def build_plan(problem: Problem, name: str, plan: Any, forecast: float, folder: Path) -> Built:
    """The kernel of a family's plan, its cubin in a file of ``folder``."""
    try:
        packed = FAMILIES[name].pack(problem, plan)
        store = Store(settings().cache_dir)
        binary = compile_kernel(
            emission_of(packed), arch=problem.device.arch, registers=packed.registers, store=store, workers=1
        )
    except Exception as error:  # a fault of one plan is told in its line
        return Built(name, str(plan), forecast, None, " ".join(f"{type(error).__name__}: {error}".split()))
    return Built(name, str(plan), forecast, Kernel(kept(binary.cubin, folder), packed.entry, packed.launch))


def kept(cubin: bytes, folder: Path) -> Path:
    """The cubin in a new file of ``folder``."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".cubin", delete=False) as file:
        file.write(cubin)
    return Path(file.name)


def _in_file(one: families_unrolled.Unrolled, folder: Path) -> Built:
    made = one.kernel
    kernel = None if made is None else Kernel(kept(made.cubin, folder), made.entry, made.launch)
    return Built(one.family, one.plan, one.forecast, kernel, one.failure)


def built_ahead(
    pool: ProcessPoolExecutor, cases: Sequence[Case], shortlist: Shortlist, folder: Path
) -> Iterator[tuple[Case, Prepared]]:
    """The cases as they are ready, about in their order, the next being built meanwhile. A case that cannot be drawn
    is told."""
    drawn = [pool.submit(draw, source) for source in dict.fromkeys(case.source for case in cases)]
    wait(drawn)  # once each, and not by several builders at a time; what fails does so again below
    waiting: dict[Future[Prepared], Case] = {}
    left = iter(cases)
    for case in left:
        waiting[pool.submit(prepare, case, shortlist, folder)] = case
        if len(waiting) >= AHEAD:
            break
    while waiting:
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            case = waiting.pop(future)
            following = next(left, None)
            if following is not None:
                waiting[pool.submit(prepare, following, shortlist, folder)] = following
            try:
                prepared = future.result()
            except Exception as error:
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
            else:
                yield case, prepared


def compile_all(cases: Sequence[Case], shortlist: Shortlist, workers: int) -> int:
    """Fill the cache. Gives the exit code: 1 where a plan does not build."""
    failures: set[str] = set()
    started = time.monotonic()
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for case, prepared in built_ahead(pool, cases, shortlist, folder):
            failures |= {f"{case.problem}: {one.family} {one.failure}" for one in prepared.built if one.kernel is None}
            for one in prepared.built:
                if one.kernel is not None:
                    one.kernel.cubin.unlink()
    print(*sorted(failures), sep="\n")
    print(f"{len(cases)} problems built in {time.monotonic() - started:.0f} s, {len(failures)} kernels failed")
    return int(bool(failures))
