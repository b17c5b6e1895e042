"""What is written down of a finished tuning: its manifest, its log and its files."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np

from lospmm import artifact
from lospmm.artifact import Manifest, Measured
from lospmm.build import Build, for_emitter
from lospmm.estimate import estimate_micros
from lospmm.model import Candidate, Problem
from lospmm.npz import write_npz
from lospmm.options import Options
from lospmm.readers import Values
from lospmm.search import Choice, Scored, Trialled
from lospmm.tile_map import TileMap, map_of
from lospmm.verify import Verification

#: Who chooses where nothing is timed, by the ranker; any other is a model.
CHOSEN_BY: Mapping[str, str] = MappingProxyType({"none": "estimate"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a tuning found out."""

    problem: Problem
    options: Options  # resolved
    values: Values
    seed: int | None  # that drew the values
    choice: Choice
    build: Build
    source: str  # what is shipped beside the cubin
    verification: Verification | None
    measured: Measured | None


def files_of(outcome: Outcome, seconds: dict[str, float]) -> dict[str, bytes]:
    """The files of the artifact, by name."""
    build, bias = outcome.build, outcome.problem.epilogue.bias
    return {
        **({} if bias is None else {artifact.BIAS_FILE: _npy(bias)}),
        artifact.CUBIN_FILE: build.binary.cubin,
        artifact.SOURCE_FILES[build.emission.language]: outcome.source.encode(),
        artifact.TUNING_FILE: tuning_lines(outcome).encode(),
        artifact.MATRIX_FILE: write_npz(outcome.problem.matrix),
        artifact.SPACE_FILE: tile_map(outcome.choice).to_json().encode(),
        artifact.MANIFEST_FILE: manifest(outcome, seconds).to_json().encode(),
    }


def _npy(bias: tuple[float, ...]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.array(bias, dtype="<f4"), version=(1, 0), allow_pickle=False)
    return content.getvalue()


def searched_problem(outcome: Outcome) -> Problem:
    """With what its emitter needs of a thread's registers."""
    return for_emitter(outcome.problem, outcome.options.emitter)


def tuning_lines(outcome: Outcome) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in tuning_log(searched_problem(outcome), outcome.choice))


def tuning_log(problem: Problem, choice: Choice) -> list[dict[str, object]]:
    """One line per candidate: those that were timed, in that order, or else the shortlist, best first."""
    entries: Sequence[Scored | Trialled] = choice.trials or choice.shortlist
    estimates = estimate_micros(problem, [entry.candidate for entry in entries])
    numbered = zip(entries, estimates.tolist(), strict=True)
    return [_line(rank, entry, micros) for rank, (entry, micros) in enumerate(numbered, start=1)]


def tile_map(choice: Choice) -> TileMap:
    """What became of every tile size. A winner that only timing found after the shortlist has its score too."""
    scored = [(entry.candidate, entry.score) for entry in choice.shortlist]
    found = map_of(choice.space, scored, choice.winner)
    scores = [trial.score for trial in choice.trials if trial.candidate is choice.winner]
    return replace(found, winner=replace(found.winner, score=scores[0])) if scores else found


def _line(rank: int, entry: Scored | Trialled, estimated_micros: float) -> dict[str, object]:
    line: dict[str, object] = {
        "rank": rank,
        **axes_of(entry.candidate),
        "score": entry.score,
        "estimated_micros": estimated_micros,
        "measured_micros": None,
    }
    if isinstance(entry, Trialled):
        timing = entry.measurement.timing
        line |= {
            "measured_micros": None if timing is None else timing.micros,
            "spread": None if timing is None else timing.spread,
            "max_relative_error": entry.measurement.max_relative_error,
            "failure": entry.measurement.failure,
            "final_micros": [None if one.timing is None else one.timing.micros for one in entry.finals],
        }
    return line


def axes_of(candidate: Candidate) -> dict[str, int | None]:
    """What tells a candidate from the others of a search."""
    return {"rows": candidate.tile.rows, "cols": candidate.tile.cols, **asdict(candidate.schedule)}


def manifest(outcome: Outcome, seconds: dict[str, float]) -> Manifest:
    problem, options, matrix = outcome.problem, outcome.options, outcome.problem.matrix
    program, binary, shape = outcome.build.program, outcome.build.binary, outcome.build.launch
    verification = outcome.verification
    return Manifest(
        name=program.name,
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        nnz=matrix.nnz,
        dtype=options.dtype,
        fingerprint=matrix.fingerprint,
        values=outcome.values,
        seed=outcome.seed,
        device=problem.device.name,
        arch=problem.device.arch,
        emitter=options.emitter,
        toolchain=binary.toolchain,
        tile=_tile(outcome.choice.winner),
        launch=artifact.LaunchConfig(shape.grid, shape.block, shape.shared_bytes),
        arguments=_arguments(problem),
        registers=binary.registers,
        spill_bytes=binary.spill_bytes,
        code_bytes=binary.code_bytes,
        cubin_sha256=hashlib.sha256(binary.cubin).hexdigest(),
        search=_summary(searched_problem(outcome), outcome.choice, options),
        seconds=artifact.Seconds(**seconds),
        verified=None
        if verification is None
        else artifact.Verified(verification.on, verification.max_relative_error, verification.columns),
        measured=outcome.measured,
        convolution=problem.convolution,
        epilogue=artifact.Added(
            bias=problem.epilogue.bias is not None, relu=problem.epilogue.relu, residual=problem.epilogue.residual
        ),
    )


def _arguments(problem: Problem) -> tuple[artifact.Argument, ...]:
    """In the order in which a launch passes them."""
    matrix, convolution = problem.matrix, problem.convolution
    if convolution is None:
        b, c = f"row-major, {matrix.k} x {problem.n}", f"row-major, {matrix.m} x {problem.n}"
    else:
        b, c = (f"NCHW, {_shape(shape)}" for shape in (convolution.input_shape, convolution.output_shape(matrix.m)))
    residual = artifact.Argument("residual", "const float *", f"{c}, 4-byte aligned")
    return (
        artifact.Argument("b", "const float *", f"{b}, 4-byte aligned"),
        artifact.Argument("c", "float *", f"{c}, written whole"),
        *((residual,) if problem.epilogue.residual else ()),
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _tile(winner: Candidate) -> artifact.Tile:
    tiling, schedule = winner.tiling, winner.schedule
    return artifact.Tile(
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
    )


def _summary(problem: Problem, choice: Choice, options: Options) -> artifact.SearchSummary:
    space = choice.space
    return artifact.SearchSummary(
        space=space.size,
        after_registers=space.after("registers"),
        after_utilization=space.after("utilization"),
        after_balance=space.after("balance"),
        shortlisted=len(choice.shortlist),
        measured=len(choice.trials),
        ranker=options.ranker,
        trials=options.trials if choice.trials else "none",
        relaxed=space.relaxed,
        chosen_by="measurement" if choice.trials else CHOSEN_BY.get(options.ranker, "model"),
        estimated_micros=float(estimate_micros(problem, [choice.winner])[0]),
    )
