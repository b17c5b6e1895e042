"""The choice of a finished tuning made again, from its log: without a GPU, and without anything that is timed.

The search is the one of this version, with the times of ``tuning.jsonl`` in place of a clock. That it asks for the same
candidates and ends with the same one says that the log holds all that led to the choice.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lospmm.artifact import TUNING_FILE, Artifact
from lospmm.build import for_emitter
from lospmm.device import DeviceSpec
from lospmm.errors import BadRequest
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.model import Candidate, Problem
from lospmm.options import LOCKSTEPS, UNROLLED, splits_of
from lospmm.record import axes_of
from lospmm.search import Choice, Clock, choose_by_time, search
from lospmm.stages import Stages
from lospmm.tuning import RANKERS, TRIALS

#: The names of a candidate's axes, in a line of the log and in the manifest's ``tile``.
AXES = ("rows", "cols", "prefetch", "fmas_per_load", "column_group", "lockstep", "split_k")

Axes = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """``winner`` is what the log leads to, ``built`` what the manifest names."""

    winner: Mapping[str, int | None]
    built: Mapping[str, int | None]
    timed: int

    @property
    def agrees(self) -> bool:
        return self.winner == self.built


def replay(kept: Artifact, device: DeviceSpec) -> Replay:
    """Raises BadRequest for a log that another version wrote, or that is damaged."""
    manifest = kept.manifest
    if manifest["device"] != device.name:
        raise BadRequest(f"{manifest['name']} was tuned for {manifest['device']}, not for {device.name}")
    if manifest["plan"] is not None:
        raise BadRequest(f"{manifest['name']}: only a search of unrolled kernels can be replayed")
    lines = _lines(kept)
    problem = for_emitter(Problem(kept.matrix(), manifest["n"], device), manifest["emitter"])
    choice = _searched(problem, manifest, lines)
    tile = manifest["tile"]
    built = {axis: tile[axis] for axis in AXES}
    return Replay(axes_of(choice.winner), built, len(choice.trials))


def _searched(problem: Problem, manifest: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Choice:
    summary, locksteps = manifest["search"], LOCKSTEPS[manifest["emitter"]]
    for name, table in (("ranker", RANKERS), ("trials", {**TRIALS, "none": None})):
        if summary[name] not in table:
            raise BadRequest(f"{manifest['name']}: {name} {summary[name]!r:.40} is not in this version")
    ranker = RANKERS[summary["ranker"]](problem.device)
    splits = splits_of(manifest["emitter"], problem.device.arch)
    size = max(summary["shortlisted"], 1)
    choice = search(problem, ranker, size, Stages(), lockstep=locksteps[0], splits=splits)
    if not summary["measured"]:
        return choice
    log = _Log(lines)
    finals = log.finals if log.has_finals else None
    clock, policy = Clock(log.trials, finals, log.is_over), TRIALS[summary["trials"]].policy
    return choose_by_time(problem, choice, ranker, clock, Stages(), locksteps=locksteps, policy=policy)


class _Log:
    """The times of a log, in place of a GPU's."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = {_axes(line): line for line in lines}
        self._asked: set[Axes] = set()
        self._turns: dict[Axes, int] = defaultdict(int)
        self.has_finals = any(line["final_micros"] for line in lines)

    def is_over(self) -> bool:
        """As a budget was that left no time for finals: when all that was timed has been asked for."""
        return not self.has_finals and self._is_used_up

    @property
    def _is_used_up(self) -> bool:
        return len(self._asked) == len(self._lines)

    def trials(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        for candidate in candidates:
            if self._is_used_up:
                return
            line = self._line(candidate)
            self._asked.add(_axes(axes_of(candidate)))
            yield _measurement(line["measured_micros"], line)

    def finals(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        for candidate in candidates:
            line, axes = self._line(candidate), _axes(axes_of(candidate))
            turn = self._turns[axes]
            self._turns[axes] += 1
            if turn >= len(line["final_micros"]):
                return
            yield _measurement(line["final_micros"][turn], line)

    def _line(self, candidate: Candidate) -> Mapping[str, Any]:
        axes = axes_of(candidate)
        try:
            return self._lines[_axes(axes)]
        except KeyError:
            named = ", ".join(f"{name} {value}" for name, value in axes.items())
            raise BadRequest(
                f"{TUNING_FILE} has no time of the candidate {named}: another version searched otherwise"
            ) from None


def _axes(line: Mapping[str, Any]) -> Axes:
    return tuple(line[axis] for axis in AXES)


def _measurement(micros: float | None, line: Mapping[str, Any]) -> Measurement:
    error = line["max_relative_error"]
    if micros is None:
        return Measurement(None, error, line["failure"] or "failed")
    return Measurement(Timing(micros, line["spread"] or 0.0, 0), error, None)


def _lines(kept: Artifact) -> list[dict[str, Any]]:
    where = f"kernel {kept.manifest['name']}: {TUNING_FILE}"
    try:
        lines = [json.loads(line) for line in kept.files[TUNING_FILE].splitlines()]
        lines = [line for line in lines if line.get("family", UNROLLED) == UNROLLED]
        for line in lines:
            _axes(line)
            if kept.manifest["search"]["measured"]:
                line["final_micros"], line["measured_micros"], line["max_relative_error"], line["failure"]
    except (ValueError, KeyError, TypeError):
        raise BadRequest(f"{where} is damaged, or of an earlier version; tune it again") from None
    if not lines:
        raise BadRequest(f"{where} is empty")
    return lines
