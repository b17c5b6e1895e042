"""The manifest of a finished tuning: the request, the search, and the kernel."""

import hashlib
from dataclasses import asdict, replace
from typing import Any

from lospmm.artifact.manifest import (
    Added,
    Argument,
    FamilySummary,
    Manifest,
    PlanSummary,
    SearchSummary,
    Seconds,
    Tile,
)
from lospmm.families.candidate import UNROLLED, Candidate
from lospmm.problem.accuracy import Accuracy, accuracy_of
from lospmm.problem.lanes import PAIRS
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.build import Build
from lospmm.tuning.dense import DenseChoice, accuracy_of_dense
from lospmm.tuning.known import Known
from lospmm.tuning.options import DENSE, Options
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.trial import settled
from lospmm.version import __version__


def manifest(outcome: Outcome, seconds: dict[str, float]) -> Manifest:
    """Return the manifest of a tuning; ``seconds`` are those of its stages, by name."""
    problem, matrix = outcome.problem, outcome.problem.matrix
    build, winner = outcome.build, outcome.winner
    dense = None if outcome.dense is None else outcome.dense.in_manifest()
    bias = problem.epilogue.bias_file
    return Manifest(
        **record_of(problem, build),
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        nnz=matrix.nnz,
        dtype=problem.dtype.name,
        fingerprint=matrix.fingerprint,
        values=outcome.values,
        seed=outcome.seed,
        device=problem.device.name,
        tile=_tile(build) if winner.is_unrolled else None,
        bias_sha256=None if bias is None else hashlib.sha256(bias).hexdigest(),
        search=search_summary(
            outcome.known, outcome.options, estimated_micros=_estimated_micros(outcome), dense=outcome.dense
        ),
        seconds=Seconds(**seconds),
        verified=outcome.verified,
        measured=outcome.measured,
        convolution=problem.convolution,
        epilogue=Added(
            bias=problem.epilogue.bias is not None, relu=problem.epilogue.relu, residual=problem.epilogue.residual
        ),
        family=winner.family if dense is None else DENSE,
        plan=_plan(winner, build),
        accuracy=_accuracy(problem, build) if dense is None else accuracy_of_dense(problem.dtype),
        sums=problem.sums.name,
        weights="dtype" if problem.values is None else problem.values.name,
        cubin_family=winner.family,
        dense=dense,
    )


def record_of(problem: Problem, build: Build) -> dict[str, Any]:
    """Return the fields of the manifest that a build decides, whatever the search was."""
    binary = build.binary
    return {
        "version": __version__,
        "name": build.compiled.entry,
        "arch": problem.device.arch,
        "emitter": build.language,
        "toolchain": binary.toolchain,
        "launch": build.compiled.launch,
        "arguments": _arguments(problem, build),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "code_bytes": binary.code_bytes,
        "cubin_sha256": hashlib.sha256(binary.cubin).hexdigest(),
        "source_sha256": hashlib.sha256(shipped_text(build)).hexdigest(),
    }


def shipped_text(build: Build) -> bytes:
    """Return the source text that is shipped with the cubin."""
    assert build.source is not None, "it is written"
    return build.source.encode()


def _accuracy(problem: Problem, build: Build) -> Accuracy:
    """Return the accuracy of the built kernel, which may be better than required."""
    if build.kernel is not None:
        a_floor, b_floor = build.kernel.floors
        own = accuracy_of(problem.dtype, values=problem.values)
        return replace(own, a_floor=max(own.a_floor, a_floor), b_floor=b_floor)
    return accuracy_of(build.dtype, problem.rounded_sums if build.words == PAIRS else 0)


def _plan(winner: Candidate, build: Build) -> PlanSummary | None:
    if build.kernel is None:
        return None
    return PlanSummary(asdict(winner.plan), build.kernel.cols, len(build.kernel.data))


def _arguments(problem: Problem, build: Build) -> tuple[Argument, ...]:
    """Return the kernel's arguments in the order of a launch.

    Templates load and store up to 16 bytes at a time, hence the alignment.
    """
    matrix, convolution = problem.matrix, problem.convolution
    if convolution is None:
        b, c = f"row-major, {matrix.k} x {problem.n}", f"row-major, {matrix.m} x {problem.n}"
    else:
        b, c = (f"NCHW, {_shape(shape)}" for shape in (convolution.input_shape, convolution.output_shape(matrix.m)))
    step = 16 if build.words is None else build.words.stored_bytes
    kind, aligned = problem.dtype.c_type, f"{step}-byte aligned"
    residual = Argument("residual", f"const {kind} *", f"{c}, {aligned}")
    return (
        Argument("b", f"const {kind} *", f"{b}, {aligned}"),
        Argument("c", f"{kind} *", f"{c}, {f'{aligned}, ' if step > problem.dtype.element_bytes else ''}written whole"),
        *((residual,) if problem.epilogue.residual else ()),
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _tile(build: Build) -> Tile:
    assert build.words is not None and build.candidate is not None, "it is unrolled"
    built: UnrolledPlan = build.candidate.plan
    tiling = built.tiling
    return Tile(
        rows=built.tile.rows,
        cols=built.tile.cols,
        count=tiling.count,
        zero_blocks=tiling.block_rows - tiling.count,
        nnc_sum=int(tiling.nnc.sum()),
        nnc_max=int(tiling.nnc.max(initial=0)),
        thread_columns=build.words.columns,
        **asdict(built.schedule),
    )


def search_summary(
    known: Known, options: Options, *, estimated_micros: float, dense: DenseChoice | None = None
) -> SearchSummary:
    """Return the summary of the search. ``estimated_micros`` is the estimate of the built kernel."""
    choice = known.choice
    space = None if choice is None else choice.space
    by_ranker = "estimate" if choice is None or options.ranker == "none" else "model"
    return SearchSummary(
        space=0 if space is None else space.size,
        after_registers=0 if space is None else space.after("registers"),
        after_utilization=0 if space is None else space.after("utilization"),
        after_balance=0 if space is None else space.after("balance"),
        shortlisted=0 if choice is None else len(choice.shortlist),
        measured=len(known.trials),
        ranker=options.ranker,
        trials=_trials(known, options),
        relaxed=() if space is None else space.relaxed,
        chosen_by="measurement" if known.trials else by_ranker,
        estimated_micros=estimated_micros,
        families=(*_of_unrolled(known), *_families(known, options), *_of_dense(dense)),
        dense_forecast_micros=known.dense_micros,
        memory=options.memory,
        like=known.like,
    )


def _trials(known: Known, options: Options) -> str:
    """Return what was timed: only unrolled kernels have proxies."""
    if not known.trials:
        return "none"
    return options.trials if known.unrolled_trials else "full"


def _estimated_micros(outcome: Outcome) -> float:
    """Return the forecast by which the built kernel was chosen, or, where kernels were timed, its estimate."""
    if outcome.forecast_micros is not None:
        return outcome.forecast_micros
    if not outcome.winner.is_unrolled:
        return outcome.winner.score
    built = outcome.build.candidate
    assert built is not None, "it is unrolled"
    return float(estimate_micros(outcome.searched_problem, [built.plan])[0])


def _families(known: Known, options: Options) -> tuple[FamilySummary, ...]:
    """Return summaries of the families asked for, without the unrolled one, which the other fields cover."""
    found = []
    for name in options.kernel_names:
        if name == UNROLLED:
            continue
        plans, own = known.plans_of(name), [trial for trial in known.trials if trial.candidate.family == name]
        found.append(
            FamilySummary(
                name=name,
                plans=len(plans),
                timed=len(own),
                micros=min((trial.settled_micros for trial in own if trial.has_run), default=None),
                forecast_micros=plans[0].score if plans else None,
                refusal=known.refusals.get(name),
            )
        )
    return tuple(found)


def _of_unrolled(known: Known) -> tuple[FamilySummary, ...]:
    """Return the summary of the unrolled family if other families were timed first, or it was refused; else none."""
    if known.unrolled_micros is None and UNROLLED not in known.refusals:
        return ()
    trials, plans = known.unrolled_trials, 0 if known.choice is None else known.choice.space.size
    fastest = settled(trials)
    micros = None if fastest is None else fastest.settled_micros
    return (FamilySummary(UNROLLED, plans, len(trials), micros, known.unrolled_micros, known.refusals.get(UNROLLED)),)


def _of_dense(dense: DenseChoice | None) -> tuple[FamilySummary, ...]:
    if dense is None:
        return ()
    plans, timed = int(dense.why_not is None), int(dense.micros is not None)
    return (FamilySummary(DENSE, plans, timed, dense.micros, dense.forecast_micros, dense.why_not),)
