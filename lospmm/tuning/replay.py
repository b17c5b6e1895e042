"""Replay of a finished tuning from its log, without a GPU.

This version's search runs with the times of ``tuning.jsonl``. If it asks for the same candidates and chooses the same
one, the log holds everything that led to the choice.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lospmm.artifact.artifact import TUNING_FILE, Artifact
from lospmm.errors import BadRequest
from lospmm.families.candidate import UNROLLED, Candidate
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.forecast import beside_dense, winner_of
from lospmm.tuning.known import Known
from lospmm.tuning.log import named
from lospmm.tuning.log_runner import LogRunner
from lospmm.tuning.options import DENSE, Options, default_emitter
from lospmm.tuning.prepare import plans_of_families, ranked
from lospmm.tuning.race import race

#: The axes of an unrolled candidate, as named in the log and in the manifest's ``tile``.
AXES = ("rows", "cols", "prefetch", "column_group", "split_k", "thread_words", "walks")

#: The fields that identify a candidate: its family, and its axes or the fields of its plan.
Named = Mapping[str, int | str | None]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay: the candidate that the log leads to, and the one in the manifest.

    If dense multiplication was chosen, both name the kernel in the cubin, with ``"dense": "chosen"``.
    """

    winner: Named
    built: Named
    timed: int  # trials of the replay

    @property
    def agrees(self) -> bool:
        """Whether the log leads to the kernel of the manifest."""
        return self.winner == self.built


def replay(kept: Artifact, device: DeviceSpec) -> Replay:
    """Replay the tuning of an artifact. Raises BadRequest for a log that is damaged or of another version."""
    manifest = kept.manifest
    emitter, lines = emitter_of(manifest, device), _lines(kept)
    problem, options = for_emitter(kept.problem(device), emitter), _options(manifest, emitter)
    timed = [line for line in lines if line["family"] != DENSE]
    known = _prepared(problem, options, manifest, timed)
    if options.measure == "gpu":
        known = race(problem, known, options, LogRunner(timed), Stages())
    winner = winner_of(problem, known, emitter)
    is_dense = _is_dense(problem, manifest, lines, known, winner)
    built = {**named(winner), **({"dense": "chosen"} if is_dense else {})}
    return Replay(built, _built(manifest), len(known.trials))


def _options(manifest: Mapping[str, Any], emitter: str) -> Options:
    """Return the options of the tuning, as far as they decide a race."""
    summary, names = manifest["search"], [family["name"] for family in manifest["search"]["families"]]
    try:
        return Options(
            emitter=emitter,
            ranker=summary["ranker"],
            measure="gpu" if summary["measured"] else "none",
            trials=summary["trials"] if summary["measured"] else "full",
            shortlist_size=max(summary["shortlisted"], 1),
            families=",".join([UNROLLED, *names]),
            cache=manifest["measured"]["cache"] if manifest["measured"] else "cold",
            memory=summary["memory"],
            values=manifest["weights"],
        )
    except BadRequest as error:
        raise BadRequest(f"kernel {manifest['name']} comes from another version: {error}") from None


def _prepared(
    problem: Problem, options: Options, manifest: Mapping[str, Any], timed: Sequence[Mapping[str, Any]]
) -> Known:
    """Return what was known before anything was timed. With a large A, other families may come first."""
    is_unrolled = any(line["family"] == UNROLLED for line in timed)
    families = manifest["search"]["families"]
    first = next((family["forecast_micros"] for family in families if family["name"] == UNROLLED), None)
    known = plans_of_families(problem, options)
    known = replace(known, unrolled_micros=first, like=manifest["search"]["like"])
    if known.like is not None:
        plans = (one for one in known.plans if any(named(one).items() <= line.items() for line in timed))
        known = replace(known, plans=tuple(plans))
    return replace(known, choice=ranked(problem, options, Stages())) if is_unrolled else known


def _is_dense(
    problem: Problem,
    manifest: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    known: Known,
    winner: Candidate,
) -> bool:
    """Return whether cuBLAS is faster than the winner, by the times of the log, or by forecast."""
    summary = manifest["search"]
    if not any(family["name"] == DENSE for family in summary["families"]):
        return False
    if not summary["measured"]:
        return beside_dense(problem, known, winner).is_chosen
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


def emitter_of(manifest: Mapping[str, Any], device: DeviceSpec) -> str:
    """Return the emitter of the unrolled candidates. Raises BadRequest if the kernel is for another device."""
    if manifest["device"] != device.name:
        raise BadRequest(f"{manifest['name']} was tuned for {manifest['device']}, not for {device.name}")
    named: str = manifest["emitter"]
    return named if manifest["plan"] is None else default_emitter(device.arch)


def _lines(kept: Artifact) -> list[dict[str, Any]]:
    where = f"kernel {kept.manifest['name']}: {TUNING_FILE}"
    try:
        lines = [dict(json.loads(line)) for line in kept.files[TUNING_FILE].splitlines()]
        for line in lines:
            if line["family"] == UNROLLED:
                [line[axis] for axis in AXES]
            if kept.manifest["search"]["measured"]:
                line["final_micros"], line["measured_micros"], line["max_relative_error"], line["failure"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadRequest(f"{where} is damaged, or of an earlier version; tune it again") from None
    if not lines:
        raise BadRequest(f"{where} is empty")
    return lines
