"""The steps of one tuning, from its problem to what is known in the end: search, choose, build, verify, compare."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from lospmm.cpu.verify import Verification, verify_on_cpu, verify_packed_on_cpu
from lospmm.errors import ToolchainFault, VerificationFailed
from lospmm.families import Candidate
from lospmm.gpu.bench import BESIDE, CHECKED, Bench
from lospmm.gpu.compare import Comparison, compare
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import Built
from lospmm.tuning.build import Build, PackedBuild, WrittenBuild, build, source, written
from lospmm.tuning.builders import BuilderPool, BuildPlace, PrefetchedBuilds
from lospmm.tuning.families import FamilyTrials
from lospmm.tuning.forecast import _forecast_micros, beside_dense, winner_of
from lospmm.tuning.job import Job, reserve_seconds
from lospmm.tuning.options import DENSE, LOCKSTEPS, Options
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.prepare import Prepared, prepared, tuning_of
from lospmm.tuning.race import _choose, _others_first, _others_last
from lospmm.tuning.search import spread_over

#: Measurements of the winner after a search: to check it, and beside the libraries, which have to be loaded first.
MEASUREMENTS = 4


def tuned(job: Job) -> Callable[[], Outcome]:
    """All of it that takes a GPU; what is returned waits for the text of the kernel, in whatever thread it is called.

    Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported and CancelledError.
    """
    options, problem = job.options, job.problem
    job.budget.reserve_seconds, job.budget.measurements = reserve_seconds(job), MEASUREMENTS
    is_timed = options.measure == "gpu"
    if is_timed:
        job.workshop.crew(options.emitter)  # which starts while this process searches
    found = prepared(problem, options, job.workshop, job.stages)
    others = FamilyTrials(found.field)
    with ExitStack() as gpu:
        bench = stock = None
        if "gpu" in (options.measure, options.verify):
            with job.budget.paused():
                gpu.enter_context(exclusive(settings().cache_dir, job.stages.cancel, gpu=own_gpu_id()))
            bench = job.workshop.bench(problem, job.stages.cancel, options.cache)
        if is_timed:
            assert bench is not None
            stock = gpu.enter_context(job.workshop.stock(tuning_of(problem, options)))
            if found.field.unrolled_micros is not None:
                found, others = _others_first(job, found, bench, stock)
            if found.choice is not None:
                found = replace(found, choice=_choose(job, found, others, bench, stock))
            _stock_ahead(job)
            others = others if others.timed else _others_last(job, others.field, found.choice, bench, stock)
            for name in ("compile_trials", "measure_trials"):
                job.stages.progress(name, 1, 1)
        choice = found.choice
        winner = winner_of(problem, choice, others, options.emitter)
        made = _made(job, winner, stock)
        verification = _verify(job, made, bench)
        compared = _compare(job, made, bench)
    dense = beside_dense(problem, others.field, winner, compared, choice) if DENSE in options.family_names else None
    measured = None if compared is None else compared.measured()
    is_of_model = choice is not None and choice.forecast_micros is not None and not (choice.trials or others.timed)
    forecast = _forecast_micros(problem, winner, choice) if is_of_model else None

    def outcome() -> Outcome:
        with job.stages.part("emit"):
            built, text = made.shipped()
        made_of = (choice, others, built, text, verification, measured)
        return Outcome(problem, options, "stored", None, *made_of, dense=dense, forecast_micros=forecast)

    return outcome


def _stock_ahead(job: Job) -> None:
    """Have the first kernels of the next tuning built, now that the builders have no more to do for this one."""
    for name, begun in islice(job.workshop.done_ahead(), 1):
        found, (problem, options) = begun.found(), begun.arguments
        assert isinstance(problem, Problem) and isinstance(options, Options)
        crew = job.workshop.crew(options.emitter)
        if isinstance(found, Prepared) and found.choice is not None and options.trials == "full" and crew is not None:
            first = [one.candidate for one in spread_over(found.choice.shortlist, LOCKSTEPS[options.emitter])]
            built = partial(_built_ahead, crew, problem, options.emitter, job.store)
            job.workshop.stock_ahead(name).begin(first, built, crew.size)


def _built_ahead(
    crew: BuilderPool, problem: Problem, emitter: str, store: Store, candidate: UnrolledPlan, at: BuildPlace
) -> Built:
    return crew.build(problem, candidate, emitter, store, at.stop, folder=at.folder)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltWinner:
    """The winner. ``runs`` is what is checked and timed; ``shipped`` waits for what is shipped, and for its text."""

    runs: Built
    shipped: Callable[[], tuple[Build | PackedBuild | WrittenBuild, str]]
    build: Build | PackedBuild | None = None  # where this process has built it


def _made(job: Job, winner: UnrolledPlan | Candidate, stock: PrefetchedBuilds | None) -> BuiltWinner:
    """The winner, built again with all that is shipped, by another process where its code is in stock."""
    runs = None if stock is None else stock.kept(winner)
    crew = None if runs is None else job.workshop.crew(job.options.emitter)
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(1, thread_name_prefix="text")
        stack.callback(threads.shutdown, wait=False)
        if runs is None or crew is None or job.options.verify == "cpu":
            built = _build(job, winner)
            text = threads.submit(source, built, job.problem.device.arch)
            return BuiltWinner(built.compiled, lambda: (built, text.result()), built)
        arguments = job.problem, winner, job.options.emitter, job.store
        code = runs.cubin if isinstance(runs.cubin, bytes) else runs.cubin.read_bytes()
        coming = threads.submit(crew.call, written, *arguments, cancel=job.stages.cancel, who_built=winner)
    for name in ("emit", "compile"):  # what is left of them nobody waits for
        job.stages.progress(name, 1, 1)

    def shipped() -> tuple[WrittenBuild | PackedBuild, str]:
        made = coming.result()
        assert isinstance(made, WrittenBuild | PackedBuild)
        if made.binary.cubin != code:
            raise ToolchainFault(f"{made.compiled.entry}: built twice, and its code differs; run it again")
        return made, made.source

    return BuiltWinner(runs, shipped)


def _build(job: Job, winner: UnrolledPlan | Candidate) -> Build | PackedBuild:
    stages = job.stages
    return build(
        job.problem,
        winner,
        job.options.emitter,
        store=job.store,
        workers=job.workshop.workers,
        stage=stages.stage,
        progress=lambda done, total: stages.progress("compile", done, total),
        cancel=stages.cancel,
    )


def _verify(job: Job, made: BuiltWinner, bench: Bench | None) -> Verification | None:
    if job.options.verify == "none":
        return None
    with job.stages.stage("verify"):
        if job.options.verify == "cpu":
            built, progress = made.build, partial(job.stages.progress, "verify")
            assert built is not None, "its text is at hand"
            if isinstance(built, PackedBuild):
                return verify_packed_on_cpu(job.problem, built.kernel, progress=progress)
            return verify_on_cpu(job.problem, built.program, built.emission, progress=progress)
        assert bench is not None
        bench.kernel_seconds = None
        kernel = made.runs
        measurement = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=CHECKED)
        if measurement.max_relative_error is None or measurement.failure is not None:
            raise VerificationFailed(f"on the GPU: {measurement.failure}")
        return Verification("gpu", measurement.max_relative_error, job.problem.n)


def _compare(job: Job, made: BuiltWinner, bench: Bench | None) -> Comparison | None:
    """The kernel beside the libraries, in the same run; by itself where the budget leaves no time for them."""
    if job.options.measure != "gpu":
        return None
    assert bench is not None
    shop = job.workshop
    bench.kernel_seconds = None
    with job.stages.stage("compare"):
        found = compare(
            bench,
            made.runs,
            effort=BESIDE,
            names=job.compared,
            known=shop.known(job.problem, job.options.cache),
            sputnik=settings().sputnik,
            progress=job.stages.progress,
        )
    shop.learn(job.problem, job.options.cache, found.baselines)
    return found
