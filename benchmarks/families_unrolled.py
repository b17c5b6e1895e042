"""The paper's kernels of 16-bit types for ``benchmarks.families``: with sums in float32, and with sums as B and C are.

Of each the candidates that the rank model puts first are built, every other one without barriers, as a search times
them first.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.families_table import ROUNDED
from lospmm.build import build, for_emitter
from lospmm.errors import LospmmError
from lospmm.model import Candidate, Compiled, Problem
from lospmm.options import LOCKSTEPS, Options, splits_of
from lospmm.search import search
from lospmm.settings import settings
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning import RANKERS, unrolled_refusal, with_ranker
from lospmm.words import in_words

EMITTER = "sass"

EXACT = "unrolled"


class Unrolled(NamedTuple):
    """A kernel, or why there is none."""

    family: str
    plan: str
    forecast: float | None
    kernel: Compiled | None
    failure: str | None = None


def kernels(problem: Problem, count: int) -> Iterator[Unrolled]:
    """Of a problem of a 16-bit type, up to ``count`` of each kind that its device has."""
    for name, sums in ((EXACT, problem.sums), (ROUNDED, problem.dtype)):
        asked = replace(problem, sums=sums)
        if unrolled_refusal(asked, EMITTER) is None:
            yield from _built(name, for_emitter(asked, EMITTER), count)


def _built(name: str, problem: Problem, count: int) -> Iterator[Unrolled]:
    try:
        chosen = _shortlist(problem, count)
    except LospmmError as error:
        yield Unrolled(name, "", None, None, f"{type(error).__name__}: {error}")
        return
    store = Store(settings().cache_dir / "families")
    for place, (candidate, score) in enumerate(chosen):
        schedule = replace(candidate.schedule, lockstep=LOCKSTEPS[EMITTER][place % len(LOCKSTEPS[EMITTER])])
        one = replace(candidate, schedule=schedule)
        plan = f"{one.tile}, {schedule}"
        try:
            kernel = build(problem, one, EMITTER, store=store, workers=1).compiled
        except LospmmError as error:
            yield Unrolled(name, plan, score, None, " ".join(f"{type(error).__name__}: {error}".split()))
        else:
            yield Unrolled(name, plan, score, kernel)


def _shortlist(problem: Problem, count: int) -> list[tuple[Candidate, float]]:
    words, device = in_words(problem), problem.device
    options = with_ranker(Options(emitter=EMITTER), device)
    found = search(
        words,
        RANKERS[options.ranker](device),
        count,
        Stages(),
        lockstep=LOCKSTEPS[EMITTER][0],
        splits=splits_of(EMITTER, device.arch),
    )
    return [(one.candidate, one.score) for one in found.shortlist]
