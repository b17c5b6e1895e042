"""The choice of a finished tuning made again, from its log: without a GPU, and without anything that is timed.

The search is the one of this version, with the times of ``tuning.jsonl`` in place of a clock. That it asks for the same
candidates and ends with the same one says that the log holds all that led to the choice.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lospmm.artifact.artifact import TUNING_FILE, Artifact
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES, Candidate
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import dtype_named
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.families import FamilyTrials
from lospmm.tuning.forecast import beside_dense, contenders, family_plans_for, winner_of
from lospmm.tuning.job import TRIALS
from lospmm.tuning.options import DENSE, LOCKSTEPS, UNROLLED, Options, default_emitter, splits_of
from lospmm.tuning.outcome import axes_of
from lospmm.tuning.prepare import ranked
from lospmm.tuning.race import choose_by_time, race_families
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.search import Choice, search
from lospmm.tuning.trial import Clock

#: The names of a candidate's axes, in a line of the log and in the manifest's ``tile``.
AXES = (
    *("rows", "cols", "prefetch", "fmas_per_load", "column_group", "lockstep", "split_k"),
    *("thread_words", "walks"),
)

#: The other fields of a line: what was forecast and found of it.
FOUND = (
    *("rank", "score", "estimated_micros", "measured_micros", "spread", "max_relative_error", "failure"),
    "final_micros",
)

#: A family, and the axes of a candidate or the fields of a plan.
Named = Mapping[str, int | str | None]


@dataclass(frozen=True, slots=True)
class Replay:
    """``winner`` is what the log leads to, ``built`` what the manifest names: a family, and the axes of its kernel, of
    the family dense those of the kernel in the cubin."""

    winner: Named
    built: Named
    timed: int

    @property
    def agrees(self) -> bool:
        return self.winner == self.built


def replay(kept: Artifact, device: DeviceSpec) -> Replay:
    """Raises BadRequest for a log that another version wrote, or that is damaged."""
    manifest = kept.manifest
    if manifest["device"] != device.name:
        raise BadRequest(f"{manifest['name']} was tuned for {manifest['device']}, not for {device.name}")
    lines = _lines(kept)
    dtype, sums = dtype_named(manifest["dtype"]), dtype_named(manifest["sums"])
    problem = Problem(kept.matrix(), manifest["n"], device, kept.convolution, kept.epilogue(), dtype, sums)
    unrolled = [line for line in lines if line["family"] == UNROLLED]
    rest = [line for line in lines if line["family"] not in (UNROLLED, DENSE)]
    if (forecast := _others_first(manifest)) is None:
        choice = _searched(problem, manifest, unrolled, float("inf")) if unrolled else None
        limit_micros = float("inf") if choice is None else choice.micros
        others = _contested(problem, manifest, rest, limit_micros, is_unrolled=choice is not None)
    else:
        others = _contested(problem, manifest, rest, forecast, is_unrolled=True)
        choice = _searched(problem, manifest, unrolled, others.fastest_micros) if unrolled else None
    timed = (0 if choice is None else len(choice.trials)) + len(others.timed)
    emitter = _emitter(manifest, device)
    winner = winner_of(for_emitter(problem, emitter), choice, others, emitter)
    is_dense = _is_dense(kept, problem, lines, choice, others, winner)
    return Replay({**_named(winner), **({"dense": "chosen"} if is_dense else {})}, _built(manifest), timed)


def _is_dense(
    kept: Artifact,
    problem: Problem,
    lines: Sequence[Mapping[str, Any]],
    choice: Choice | None,
    others: FamilyTrials,
    winner: UnrolledPlan | Candidate,
) -> bool:
    """Whether cuBLAS is faster than the winner, by the times of the log, or by forecast."""
    summary, emitter = kept.manifest["search"], _emitter(kept.manifest, problem.device)
    if not any(family["name"] == DENSE for family in summary["families"]):
        return False
    if not summary["measured"]:
        return beside_dense(for_emitter(problem, emitter), others.field, winner, None, choice).is_chosen
    for line in lines:
        if line["family"] == DENSE and line["failure"] is None:
            micros = line["estimated_micros"] if line["measured_micros"] is None else line["measured_micros"]
            return bool(micros < line["kernel_micros"])
    return False


def _built(manifest: Mapping[str, Any]) -> Named:
    plan, tile = manifest["plan"], manifest["tile"]
    axes = {axis: tile[axis] for axis in AXES} if plan is None else plan["axes"]
    dense = {"dense": "chosen"} if manifest["dense"] is not None else {}
    return {"family": manifest["cubin_family"], **axes, **dense}


def _named(candidate: UnrolledPlan | Candidate) -> Named:
    """All that a line of the log tells a candidate from others by."""
    if isinstance(candidate, Candidate):
        return {"family": candidate.family, **asdict(candidate.plan)}
    return {"family": UNROLLED, **axes_of(candidate)}


def _others_first(manifest: Mapping[str, Any]) -> float | None:
    """What the unrolled family was forecast to take, where others were timed before it."""
    found = (family["forecast_micros"] for family in manifest["search"]["families"] if family["name"] == UNROLLED)
    return next(found, None)


def _contested(
    problem: Problem,
    manifest: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    limit_micros: float,
    *,
    is_unrolled: bool,
) -> FamilyTrials:
    names = [family["name"] for family in manifest["search"]["families"]]
    if unknown := set(names) - {UNROLLED, DENSE, *FAMILIES}:
        raise BadRequest(f"kernel {manifest['name']}: search.families names {min(unknown)[:40]!r}, which there is not")
    cache = manifest["measured"]["cache"] if manifest["measured"] else "cold"
    field = family_plans_for(problem, contenders(names, problem, is_unrolled=is_unrolled), cache)
    if not lines or not manifest["search"]["measured"]:
        return FamilyTrials(field)
    log = _LogRunner(lines)
    clock = Clock(log.trials, log.finals if log.has_finals else None, log.is_over)
    return race_families(field, clock, limit_micros=limit_micros)


def _searched(
    whole: Problem, manifest: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], rival_micros: float
) -> Choice:
    emitter = _emitter(manifest, whole.device)
    own = for_emitter(whole, emitter)
    problem = in_lanes(own)
    summary, locksteps = manifest["search"], LOCKSTEPS[emitter]
    for name, table in (("ranker", RANKERS), ("trials", {**TRIALS, "none": None})):
        if summary[name] not in table:
            raise BadRequest(f"{manifest['name']}: {name} {summary[name]!r:.40} is not in this version")
    ranker = RANKERS[summary["ranker"]](problem.device)
    splits = splits_of(emitter, problem.device.arch)
    size = max(summary["shortlisted"], 1)
    if not summary["measured"]:
        options = Options(emitter=emitter, ranker=summary["ranker"], measure="none", shortlist_size=size)
        return ranked(own, options, Stages())
    choice = search(problem, ranker, size, Stages(), lockstep=locksteps[0], splits=splits)
    log = _LogRunner(lines)
    finals = log.finals if log.has_finals else None
    clock = Clock(log.trials, finals, log.is_over, rival_micros)
    policy = TRIALS[summary["trials"]].policy
    return choose_by_time(problem, choice, ranker, clock, Stages(), locksteps=locksteps, policy=policy)


def _emitter(manifest: Mapping[str, Any], device: DeviceSpec) -> str:
    """Of the unrolled family."""
    named: str = manifest["emitter"]
    return named if manifest["plan"] is None else default_emitter(device.arch)


class _LogRunner:
    """The times of a log, in place of a GPU's."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = {_key(_about(line)): line for line in lines}
        self._asked: set[str] = set()
        self._turns: dict[str, int] = defaultdict(int)
        self.has_finals = any(line["final_micros"] for line in lines)

    def is_over(self) -> bool:
        """As a budget was that left no time for finals: when all that was timed has been asked for."""
        return not self.has_finals and self._is_used_up

    @property
    def _is_used_up(self) -> bool:
        return len(self._asked) == len(self._lines)

    def trials(self, candidates: Sequence[UnrolledPlan | Candidate]) -> Iterator[Measurement]:
        for candidate in candidates:
            if self._is_used_up:
                return
            line = self._line(candidate)
            self._asked.add(_key(_named(candidate)))
            yield _measurement(line["measured_micros"], line)

    def finals(self, candidates: Sequence[UnrolledPlan | Candidate]) -> Iterator[Measurement]:
        for candidate in candidates:
            line, key = self._line(candidate), _key(_named(candidate))
            turn = self._turns[key]
            self._turns[key] += 1
            if turn >= len(line["final_micros"]):
                return
            yield _measurement(line["final_micros"][turn], line)

    def _line(self, candidate: UnrolledPlan | Candidate) -> Mapping[str, Any]:
        named = _named(candidate)
        try:
            return self._lines[_key(named)]
        except KeyError:
            words = ", ".join(f"{name} {value}" for name, value in named.items())
            raise BadRequest(
                f"{TUNING_FILE} has no time of the candidate {words}: another version searched otherwise"
            ) from None


def _check_is_made(line: dict[str, Any], where: str) -> None:
    """Take from a ``line`` the axes that only earlier versions have: several tiles to a block, and whether rows are
    stored early. Raises BadRequest where its kernel is not what is made now."""
    is_timed = line.get("measured_micros") is not None
    if line.pop("tiles_per_block", 1) != 1 or (line.pop("stores_early", False) and is_timed):
        raise BadRequest(f"{where} has kernels that only an earlier version makes; tune it again")


def _about(line: Mapping[str, Any]) -> Named:
    """A line without what became of its candidate."""
    return {name: value for name, value in line.items() if name not in FOUND}


def _key(named: Named) -> str:
    return json.dumps(named, sort_keys=True)


def _measurement(micros: float | None, line: Mapping[str, Any]) -> Measurement:
    error = line["max_relative_error"]
    if micros is None:
        return Measurement(None, error, line["failure"] or "failed")
    return Measurement(Timing(micros, line["spread"] or 0.0, 0), error, None)


def _lines(kept: Artifact) -> list[dict[str, Any]]:
    where = f"kernel {kept.manifest['name']}: {TUNING_FILE}"
    try:
        lines = [dict(json.loads(line)) for line in kept.files[TUNING_FILE].splitlines()]
        _check_is_made(dict(kept.manifest["tile"] or {}), where)
        for line in lines:
            if line.setdefault("family", UNROLLED) == UNROLLED:  # logs of before there were families name none
                line.setdefault("thread_words", 1)  # ... nor words
                line.setdefault("walks", 1)
                _check_is_made(line, where)
                [line[axis] for axis in AXES]
            if kept.manifest["search"]["measured"]:
                line["final_micros"], line["measured_micros"], line["max_relative_error"], line["failure"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadRequest(f"{where} is damaged, or of an earlier version; tune it again") from None
    if not lines:
        raise BadRequest(f"{where} is empty")
    return lines
