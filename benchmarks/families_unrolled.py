"""The paper's kernels for ``benchmarks.families``; of 16-bit types with sums in float32, and with sums as B and C are.

Of each the candidates that a search would time first are built: what it chooses without a clock, then those that the
rank model puts first and, of 16-bit types, as many of two columns to a thread, every other one without barriers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.families_table import ROUNDED
from lospmm.errors import LospmmError
from lospmm.families.candidate import unrolled
from lospmm.problem.lanes import NARROW, PAIRS, SINGLE, in_lanes, lanes_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.log import axes_of
from lospmm.tuning.options import Options, splits_of
from lospmm.tuning.rankers import RANKERS, with_ranker
from lospmm.tuning.refusal import unrolled_refusal
from lospmm.tuning.unrolled import search

EMITTER = "sass"

EXACT = "unrolled"

#: Candidates of each kind: a search times some eighty.
CANDIDATES = 12


class Unrolled(NamedTuple):
    """A kernel, or why there is none."""

    family: str
    plan: str
    forecast: float | None
    kernel: Compiled | None
    failure: str | None = None


def kernels(problem: Problem, count: int = CANDIDATES) -> Iterator[Unrolled]:
    """Up to ``count`` tilings of each kind that its device has."""
    kinds = ((EXACT, NARROW), (ROUNDED, PAIRS)) if problem.dtype.is_16_bit else ((EXACT, SINGLE),)
    for name, words in kinds:
        asked = replace(problem, sums=problem.dtype) if name == ROUNDED else problem
        if lanes_of(asked) == words and unrolled_refusal(asked, EMITTER) is None:
            yield from _built(name, for_emitter(asked, EMITTER), count)


def _built(name: str, problem: Problem, count: int) -> Iterator[Unrolled]:
    try:
        chosen = shortlist(problem, count)
    except LospmmError as error:
        yield Unrolled(name, "", None, None, f"{type(error).__name__}: {error}")
        return
    store = Store(settings().cache_dir / "families")
    for candidate, forecast in zip(chosen, estimate_micros(in_lanes(problem), chosen).tolist(), strict=True):
        plan, failure, kernel = f"{candidate.tile}, {candidate.schedule}", None, None
        try:
            kernel = build(problem, unrolled(candidate), EMITTER, store=store, workers=1).compiled
        except LospmmError as error:
            failure = " ".join(f"{type(error).__name__}: {error}".split())
        yield Unrolled(name, plan, forecast, kernel, failure)


def shortlist(problem: Problem, count: int) -> list[UnrolledPlan]:
    """What the rank model puts first."""
    words, device = in_lanes(problem), problem.device
    options = with_ranker(Options(emitter=EMITTER), device)
    splits = splits_of(EMITTER)
    found = search(words, RANKERS[options.ranker](device), count, Stages(), splits=splits)
    singles = found.shortlist[: count - len(found.wide[: count // 2])]
    others = [one.plan for one in (*singles, *found.wide[: count // 2])]
    winner = found.winner.plan
    return [winner, *(one for one in others if axes_of(one) != axes_of(winner))][:count]
