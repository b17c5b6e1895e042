"""The logs of a tuning: tuning.jsonl, with a line per candidate, and space.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from lospmm.artifact.tile_map import TileMap, map_of
from lospmm.families.candidate import Candidate
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.known import Known
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.trial import Trial, settled

Line = dict[str, object]


def tuning_lines(outcome: Outcome) -> str:
    """Return tuning.jsonl: the unrolled candidates, those of other families, and the dense multiplication."""
    known = outcome.known
    lines = [] if known.choice is None else unrolled_log(outcome.searched_problem, known)
    if known.choice is None or known.other_trials:
        lines += plans_log(known, first=len(lines) + 1)
    if outcome.dense is not None and outcome.measured is not None:
        lines.append(outcome.dense.log_line(len(lines) + 1))
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def unrolled_log(problem: Problem, known: Known) -> list[Line]:
    """Return a line for each unrolled candidate that was timed, in that order, or else for the shortlist.

    ``problem`` is in words (``lanes.in_lanes``).
    """
    assert known.choice is not None, "it was searched for"
    entries: Sequence[Trial | Candidate] = known.unrolled_trials or known.choice.listed
    estimates = estimate_micros(problem, [_candidate(entry).plan for entry in entries]).tolist()
    return [_line(rank, entry, micros) for rank, (entry, micros) in enumerate(zip(entries, estimates, strict=True), 1)]


def plans_log(known: Known, *, first: int) -> list[Line]:
    """Return a line for each plan of the other families that was timed, or else for the best of each."""
    first_of_each = {one.family: one for one in reversed(known.plans)}.values()
    shown: Sequence[Trial | Candidate] = known.other_trials or list(first_of_each)
    return [_line(rank, entry, _candidate(entry).score) for rank, entry in enumerate(shown, start=first)]


def _candidate(entry: Trial | Candidate) -> Candidate:
    return entry.candidate if isinstance(entry, Trial) else entry


def _line(rank: int, entry: Trial | Candidate, estimated_micros: float) -> Line:
    candidate = _candidate(entry)
    return {
        "rank": rank,
        **named(candidate),
        "score": candidate.score,
        "estimated_micros": estimated_micros,
        "measured_micros": None,
        **(_times(entry) if isinstance(entry, Trial) else {}),
    }


def _times(trial: Trial) -> Line:
    timing = trial.measurement.timing
    return {
        "measured_micros": None if timing is None else timing.micros,
        "spread": None if timing is None else timing.spread,
        "max_relative_error": trial.measurement.max_relative_error,
        "failure": trial.measurement.failure,
        "final_micros": [None if one.timing is None else one.timing.micros for one in trial.finals],
    }


def named(candidate: Candidate) -> dict[str, int | str | None]:
    """Return the fields that identify a candidate in a log: its family and the fields of its plan."""
    axes = axes_of(candidate.plan) if candidate.is_unrolled else asdict(candidate.plan)
    return {"family": candidate.family, **axes}


def axes_of(plan: UnrolledPlan) -> dict[str, int | None]:
    """Return the fields that identify an unrolled plan in a search: tile size and schedule."""
    return {"rows": plan.tile.rows, "cols": plan.tile.cols, **asdict(plan.schedule)}


def tile_map(known: Known) -> TileMap:
    """Return the verdict of every tile size, and the best unrolled candidate, by time or else by forecast."""
    assert known.choice is not None, "it was searched for"
    choice, fastest = known.choice, settled(known.unrolled_trials)
    winner = choice.winner if fastest is None else fastest.candidate
    return map_of(choice.space, choice.shortlist, winner)
