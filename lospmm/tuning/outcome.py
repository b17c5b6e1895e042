"""What is written down of a finished tuning: its manifest, its log and its files."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from lospmm.artifact import artifact
from lospmm.artifact.manifest import (
    Added,
    Argument,
    FamilySummary,
    LaunchConfig,
    Manifest,
    Measured,
    PlanSummary,
    SearchSummary,
    Seconds,
    Tile,
    Verified,
)
from lospmm.artifact.tile_map import TileMap, map_of
from lospmm.cpu.verify import Verification
from lospmm.families import Candidate
from lospmm.matrix.npz import write_npz
from lospmm.matrix.readers import Values
from lospmm.problem.accuracy import Accuracy, accuracy_of
from lospmm.problem.lanes import PAIRS, in_lanes
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.build import Build, PackedBuild, WrittenBuild, for_emitter
from lospmm.tuning.dense import DenseChoice, accuracy_of_dense
from lospmm.tuning.families import FamilyPlans, FamilyTrials
from lospmm.tuning.options import DENSE, UNROLLED, Options
from lospmm.tuning.search import Choice
from lospmm.tuning.trial import Scored, Trial

#: Who chooses where nothing is timed, by the ranker; any other is a model.
CHOSEN_BY: Mapping[str, str] = MappingProxyType({"none": "estimate"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a tuning found out."""

    problem: Problem
    options: Options  # resolved
    values: Values
    seed: int | None  # that drew the values
    choice: Choice | None  # of the unrolled family, where it took part
    others: FamilyTrials
    build: Build | PackedBuild | WrittenBuild
    source: str  # what is shipped beside the cubin
    verification: Verification | None
    measured: Measured | None
    dense: DenseChoice | None = None  # None: it was not asked for
    forecast_micros: float | None = None  # of the model that chose an unrolled kernel without a clock


def files_of(outcome: Outcome, seconds: dict[str, float]) -> dict[str, bytes]:
    """The files of the artifact, by name."""
    build, bias, choice = outcome.build, outcome.problem.epilogue.bias, outcome.choice
    return {
        **({} if bias is None else {artifact.BIAS_FILE: _npy(bias)}),
        artifact.CUBIN_FILE: build.binary.cubin,
        artifact.SOURCE_FILES[build.language]: outcome.source.encode(),
        artifact.TUNING_FILE: tuning_lines(outcome).encode(),
        artifact.MATRIX_FILE: write_npz(outcome.problem.matrix),
        **({} if choice is None else {artifact.SPACE_FILE: tile_map(choice).to_json().encode()}),
        artifact.MANIFEST_FILE: manifest(outcome, seconds).to_json().encode(),
    }


def _npy(bias: tuple[float, ...]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.array(bias, dtype="<f4"), version=(1, 0), allow_pickle=False)
    return content.getvalue()


def searched_problem(outcome: Outcome) -> Problem:
    """Of the unrolled family: in its words, and with what its emitter needs of a thread's registers."""
    return in_lanes(for_emitter(outcome.problem, outcome.options.emitter))


def tuning_lines(outcome: Outcome) -> str:
    choice = outcome.choice
    lines = [] if choice is None else tuning_log(searched_problem(outcome), choice)
    if choice is None or outcome.others.timed:
        lines += contest_log(outcome.others, first=len(lines) + 1)
    if outcome.dense is not None and outcome.measured is not None:
        lines.append(outcome.dense.log_line(len(lines) + 1))
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def tuning_log(problem: Problem, choice: Choice) -> list[dict[str, object]]:
    """One line per candidate: those that were timed, in that order, or else the shortlist, best first."""
    entries: Sequence[Scored[UnrolledPlan] | Trial[UnrolledPlan]] = choice.trials or choice.listed
    estimates = estimate_micros(problem, [entry.candidate for entry in entries])
    numbered = zip(entries, estimates.tolist(), strict=True)
    return [_line(rank, entry, micros) for rank, (entry, micros) in enumerate(numbered, start=1)]


def contest_log(others: FamilyTrials, *, first: int) -> list[dict[str, object]]:
    """The same of the other families: those that were timed, or else the first of each."""
    first_of_each = {one.family: one for one in reversed(others.field.entrants)}.values()
    shown: Sequence[Scored[Candidate] | Trial[Candidate]] = others.timed or [
        Scored(one, one.forecast_micros) for one in first_of_each
    ]
    return [_line_of_entrant(rank, entry) for rank, entry in enumerate(shown, start=first)]


def tile_map(choice: Choice) -> TileMap:
    """What became of every tile size. A winner that only timing found after the shortlist has its score too."""
    scored = [(entry.candidate, entry.score) for entry in choice.shortlist]
    found = map_of(choice.space, scored, choice.winner)
    scores = [trial.score for trial in choice.trials if trial.candidate is choice.winner]
    return replace(found, winner=replace(found.winner, score=scores[0])) if scores else found


def _line_of_entrant(rank: int, entry: Scored[Candidate] | Trial[Candidate]) -> dict[str, object]:
    entrant = entry.candidate
    return {
        "rank": rank,
        "family": entrant.family,
        **asdict(entrant.plan),
        "score": entry.score,
        "estimated_micros": entrant.forecast_micros,
        "measured_micros": None,
        **(_times(entry) if isinstance(entry, Trial) else {}),
    }


def _line(rank: int, entry: Scored[UnrolledPlan] | Trial[UnrolledPlan], estimated_micros: float) -> dict[str, object]:
    return {
        "rank": rank,
        "family": UNROLLED,
        **axes_of(entry.candidate),
        "score": entry.score,
        "estimated_micros": estimated_micros,
        "measured_micros": None,
        **(_times(entry) if isinstance(entry, Trial) else {}),
    }


def _times(entry: Trial[Any]) -> dict[str, object]:
    timing = entry.measurement.timing
    return {
        "measured_micros": None if timing is None else timing.micros,
        "spread": None if timing is None else timing.spread,
        "max_relative_error": entry.measurement.max_relative_error,
        "failure": entry.measurement.failure,
        "final_micros": [None if one.timing is None else one.timing.micros for one in entry.finals],
    }


def axes_of(candidate: UnrolledPlan) -> dict[str, int | None]:
    """What tells a candidate from the others of a search."""
    return {"rows": candidate.tile.rows, "cols": candidate.tile.cols, **asdict(candidate.schedule)}


def manifest(outcome: Outcome, seconds: dict[str, float]) -> Manifest:
    problem, matrix = outcome.problem, outcome.problem.matrix
    build, verification = outcome.build, outcome.verification
    binary, shape = build.binary, build.launch
    family = build.entrant.family if isinstance(build, PackedBuild) else UNROLLED
    dense = None if outcome.dense is None else outcome.dense.in_manifest()
    return Manifest(
        name=build.compiled.entry,
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        nnz=matrix.nnz,
        dtype=problem.dtype.name,
        fingerprint=matrix.fingerprint,
        values=outcome.values,
        seed=outcome.seed,
        device=problem.device.name,
        arch=problem.device.arch,
        emitter=build.language,
        toolchain=binary.toolchain,
        tile=None if outcome.choice is None or isinstance(build, PackedBuild) else _tile(outcome.choice.winner, build),
        launch=LaunchConfig(shape.grid, shape.block, shape.shared_bytes),
        arguments=_arguments(problem, build),
        registers=binary.registers,
        spill_bytes=binary.spill_bytes,
        code_bytes=binary.code_bytes,
        cubin_sha256=hashlib.sha256(binary.cubin).hexdigest(),
        source_sha256=hashlib.sha256(outcome.source.encode()).hexdigest(),
        bias_sha256=None if problem.epilogue.bias is None else hashlib.sha256(_npy(problem.epilogue.bias)).hexdigest(),
        search=_summary(
            outcome.choice,
            outcome.others,
            outcome.options,
            estimated_micros=_estimated_micros(outcome),
            dense=outcome.dense,
        ),
        seconds=Seconds(**seconds),
        verified=None
        if verification is None
        else Verified(verification.on, verification.max_relative_error, verification.columns),
        measured=outcome.measured,
        convolution=problem.convolution,
        epilogue=Added(
            bias=problem.epilogue.bias is not None, relu=problem.epilogue.relu, residual=problem.epilogue.residual
        ),
        family=family if dense is None else DENSE,
        plan=_plan(build) if isinstance(build, PackedBuild) else None,
        accuracy=_accuracy(problem, build) if dense is None else accuracy_of_dense(problem.dtype),
        sums=problem.sums.name,
        cubin_family=family,
        dense=dense,
    )


def _accuracy(problem: Problem, build: Build | PackedBuild | WrittenBuild) -> Accuracy:
    """Of what was built, which may be more exact than it has to be."""
    if isinstance(build, PackedBuild):
        a_floor, b_floor = build.kernel.floors
        return replace(accuracy_of(problem.dtype), a_floor=a_floor, b_floor=b_floor)
    return accuracy_of(build.dtype, problem.rounded_sums if build.words == PAIRS else 0)


def _plan(build: PackedBuild) -> PlanSummary:
    return PlanSummary(asdict(build.entrant.plan), build.kernel.cols, len(build.kernel.data))


def _arguments(problem: Problem, build: Build | PackedBuild | WrittenBuild) -> tuple[Argument, ...]:
    """In the order in which a launch passes them. Templates load and store up to 16 bytes at a time."""
    matrix, convolution = problem.matrix, problem.convolution
    if convolution is None:
        b, c = f"row-major, {matrix.k} x {problem.n}", f"row-major, {matrix.m} x {problem.n}"
    else:
        b, c = (f"NCHW, {_shape(shape)}" for shape in (convolution.input_shape, convolution.output_shape(matrix.m)))
    step = 16 if isinstance(build, PackedBuild) else build.words.stored_bytes
    kind, aligned = problem.dtype.c_type, f"{step}-byte aligned"
    residual = Argument("residual", f"const {kind} *", f"{c}, {aligned}")
    return (
        Argument("b", f"const {kind} *", f"{b}, {aligned}"),
        Argument("c", f"{kind} *", f"{c}, {f'{aligned}, ' if step > problem.dtype.element_bytes else ''}written whole"),
        *((residual,) if problem.epilogue.residual else ()),
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _tile(winner: UnrolledPlan, build: Build | WrittenBuild) -> Tile:
    tiling, schedule = winner.tiling, winner.schedule
    return Tile(
        rows=winner.tile.rows,
        cols=winner.tile.cols,
        prefetch=schedule.prefetch,
        fmas_per_load=schedule.fmas_per_load,
        column_group=schedule.column_group,
        lockstep=schedule.lockstep,
        count=len(tiling.tiles),
        zero_blocks=tiling.block_rows - len(tiling.tiles),
        nnc_sum=int(tiling.nnc.sum()),
        nnc_max=int(tiling.nnc.max(initial=0)),
        split_k=schedule.split_k,
        thread_columns=build.words.columns,
        thread_words=schedule.thread_words,
        walks=schedule.walks,
    )


def _summary(
    choice: Choice | None,
    others: FamilyTrials,
    options: Options,
    *,
    estimated_micros: float,
    dense: DenseChoice | None = None,
) -> SearchSummary:
    """``estimated_micros`` is of what was built."""
    trials = () if choice is None else choice.trials
    is_timed = bool(trials or others.timed)
    space = None if choice is None else choice.space
    return SearchSummary(
        space=0 if space is None else space.size,
        after_registers=0 if space is None else space.after("registers"),
        after_utilization=0 if space is None else space.after("utilization"),
        after_balance=0 if space is None else space.after("balance"),
        shortlisted=0 if choice is None else len(choice.shortlist),
        measured=len(trials) + len(others.timed),
        ranker=options.ranker,
        trials=options.trials if is_timed else "none",
        relaxed=() if space is None else space.relaxed,
        chosen_by="measurement"
        if is_timed
        else "estimate"
        if choice is None
        else CHOSEN_BY.get(options.ranker, "model"),
        estimated_micros=estimated_micros,
        families=(*_of_unrolled(choice, others.field), *_families(others, options), *_of_dense(dense)),
        dense_forecast_micros=others.field.dense_micros,
    )


def _estimated_micros(outcome: Outcome) -> float:
    """Of what was built."""
    if isinstance(outcome.build, PackedBuild):
        return outcome.build.entrant.forecast_micros
    if outcome.forecast_micros is not None:
        return outcome.forecast_micros
    assert outcome.choice is not None, "an unrolled kernel was searched for"
    return float(estimate_micros(searched_problem(outcome), [outcome.choice.winner])[0])


def _families(others: FamilyTrials, options: Options) -> tuple[FamilySummary, ...]:
    """Those that were asked for, the unrolled one apart: the rest of the summary is about it."""
    field, timed = others.field, others.timed
    found = []
    for name in options.kernel_names:
        if name == UNROLLED:
            continue
        entrants = field.of(name)
        own = [trial for trial in timed if trial.candidate.family == name]
        ran = [trial.settled_micros for trial in own if trial.measurement.timing is not None]
        found.append(
            FamilySummary(
                name=name,
                plans=len(entrants),
                timed=len(own),
                micros=min(ran, default=None),
                forecast_micros=entrants[0].forecast_micros if entrants else None,
                refusal=field.refusals.get(name),
            )
        )
    return tuple(found)


def _of_unrolled(choice: Choice | None, field: FamilyPlans) -> tuple[FamilySummary, ...]:
    """Where other families were timed first."""
    if field.unrolled_micros is None:
        return ()
    trials, plans = ((), 0) if choice is None else (choice.trials, choice.space.size)
    micros = None if choice is None else choice.micros
    return (FamilySummary(UNROLLED, plans, len(trials), micros, field.unrolled_micros, field.refusals.get(UNROLLED)),)


def _of_dense(dense: DenseChoice | None) -> tuple[FamilySummary, ...]:
    if dense is None:
        return ()
    plans, timed = int(dense.why_not is None), int(dense.micros is not None)
    return (FamilySummary(DENSE, plans, timed, dense.micros, dense.forecast_micros, dense.why_not),)
