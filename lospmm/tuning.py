"""The steps of one tuning, from its problem to what is known in the end: search, choose, build, verify, compare."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from lospmm.baselines import BASELINES, DENSE_OF
from lospmm.behind import why_not_searched
from lospmm.bench import Comparison, compare
from lospmm.budget import Budget
from lospmm.build import Build, PackedBuild, Written, build, source, written
from lospmm.clock import Clock, Trials
from lospmm.contest import Contest, Field, contest
from lospmm.crew import Crew, builders_for
from lospmm.dense_choice import DenseChoice, dense_choice
from lospmm.errors import GpuFault, NothingFits, ToolchainFault, VerificationFailed
from lospmm.estimate import estimate_micros
from lospmm.families import Entrant
from lospmm.families.traits import traits_of
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.messages import CACHE_STATES
from lospmm.measure import AGAIN, BESIDE, BRIEF, CHECKED, Bench, Effort
from lospmm.model import Built, Candidate, Problem
from lospmm.options import DENSE, LOCKSTEPS, UNROLLED, Options
from lospmm.rankers import RANKERS
from lospmm.record import Outcome
from lospmm.runtime.detect import driver_version, own_gpu_id
from lospmm.search import POLICY, Choice, Policy, choose_by_time, spread_over
from lospmm.settings import settings
from lospmm.sought import Sought, ranked_of, sought, tuning_of, unrolled_refusal
from lospmm.stages import Stages
from lospmm.stock import Place, Stock
from lospmm.store import Store
from lospmm.timings import Timings, conditions_of
from lospmm.toolchain.compilers import compiler_name
from lospmm.trials import BuildAndTime, Means
from lospmm.verify import Verification, verify_on_cpu, verify_packed_on_cpu
from lospmm.words import in_words
from lospmm.workshop import Workshop
from lospmm_rank.families import UNTIMED, dense_share, factor, is_learned, sure_share

#: What comes after a search, in microseconds of one core for each nonzero: to build the winner and to write its text;
#: to run it on the CPU.
END_MICROS: Mapping[str, float] = MappingProxyType({"sass": 6.0, "ptx": 20.0, "cuda": 20.0})
VERIFY_MICROS = 50.0

#: The language of packed kernels.
TEMPLATE = "template"

#: Measurements of the winner after a search: to check it, and beside the libraries, which have to be loaded first.
MEASUREMENTS = 4
COMPARE_SECONDS = 2.5
DENSE_SECONDS = 1.0  # beside cuBLAS of the same type alone

#: A budget has to be so many times as long as the comparison for there to be one.
COMPARED_FROM = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """What every step of a tuning needs."""

    problem: Problem
    options: Options  # resolved
    store: Store
    stages: Stages
    workshop: Workshop
    budget: Budget

    @property
    def compare_seconds(self) -> float:
        """For the libraries: all of them, the dense one of the type alone, or none, as the budget leaves time."""
        seconds, takes_dense = self.options.budget_seconds, DENSE in self.options.family_names
        if self.options.measure != "gpu":
            return 0.0
        if seconds is None or seconds >= COMPARED_FROM * COMPARE_SECONDS:
            return COMPARE_SECONDS
        return DENSE_SECONDS if takes_dense and seconds >= COMPARED_FROM * DENSE_SECONDS else 0.0

    @property
    def compared(self) -> tuple[str, ...]:
        """The names of those libraries; of the dense one too where its time is known."""
        own = DENSE_OF[self.problem.dtype.name]
        if self.compare_seconds >= COMPARE_SECONDS:
            return tuple(BASELINES)
        known = self.workshop.known(self.problem, self.options.cache)
        return (own,) if self.compare_seconds or own in known else ()


def tuned(job: Job) -> Callable[[], Outcome]:
    """All of it that takes a GPU; what is returned waits for the text of the kernel, in whatever thread it is called.

    Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported and CancelledError.
    """
    options, problem = job.options, job.problem
    job.budget.reserve_seconds, job.budget.measurements = reserve_seconds(job), MEASUREMENTS
    is_timed = options.measure == "gpu"
    if is_timed:
        job.workshop.crew(options.emitter)  # which starts while this process searches
    found = sought(problem, options, job.workshop, job.stages)
    others = Contest(found.field)
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


def beside_dense(
    problem: Problem, field: Field, winner: Candidate | Entrant, found: Comparison | None, choice: Choice | None
) -> DenseChoice:
    """Whether cuBLAS is faster than the winner: both in one run, or, without a clock, by forecast (``dense_share``).
    ``choice`` is the unrolled family's."""
    assert field.dense_micros is not None, "it was forecast"
    if found is not None:
        return dense_choice(problem, field.dense_micros, found.baselines, kernel_micros=found.micros)
    share = dense_share(problem.device.name) if isinstance(winner, Candidate) else 1.0
    to_beat = share * _forecast_micros(problem, winner, choice)
    return dense_choice(problem, field.dense_micros, {}, kernel_micros=to_beat)


def _forecast_micros(problem: Problem, winner: Candidate | Entrant, choice: Choice | None) -> float:
    """As it was corrected by what was measured on such a device."""
    if isinstance(winner, Entrant):
        return winner.forecast_micros
    name, forecast = UNTIMED, None if choice is None else choice.forecast_micros
    if forecast is None:
        name, forecast = UNROLLED, float(estimate_micros(in_words(problem), [winner])[0])
    return forecast * factor(name, forecast, traits=traits_of(problem), device=problem.device.name)


def winner_of(problem: Problem, choice: Choice | None, others: Contest, emitter: str) -> Candidate | Entrant:
    """The fastest of all families. Where nothing was timed, the one of the best forecast: the unrolled one, if it has a
    kernel, unless another is surely better; and of float32 and TF32 anyway on a GPU of which nothing was learned, and
    of an A without nonzeros. ``problem`` is the emitter's."""
    best = others.best
    if choice is None:
        if best is None:
            raise (_nobody_ran(others) if others.timed else NothingFits(_nobody(problem, others.field, emitter)))
        return best
    if best is None:
        return choice.winner
    if not (choice.trials or others.timed):
        may_be = problem.dtype.is_16_bit or (problem.matrix.nnz > 0 and is_learned(problem.device.name))
        least = sure_share(type(best.plan).__name__) * _forecast_micros(problem, choice.winner, choice)
        return best if may_be and best.forecast_micros < least else choice.winner
    fastest = others.fastest
    return best if fastest is not None and fastest.settled_micros < choice.micros else choice.winner


def _nobody(problem: Problem, field: Field, emitter: str) -> str:
    refusals = {UNROLLED: unrolled_refusal(problem, emitter) or "not asked for", **field.refusals}
    return f"no family has a kernel for this: {'; '.join(f'{name}: {why}' for name, why in refusals.items())}"


def _nobody_ran(others: Contest) -> GpuFault:
    return GpuFault(f"none of {len(others.timed)} kernels ran: {others.timed[0].measurement.failure}")


def reserve_seconds(job: Job) -> float:
    """What comes after the search takes, by forecast, beside MEASUREMENTS."""
    nonzeros, options = job.problem.matrix.nnz, job.options
    micros = END_MICROS[options.emitter] + (VERIFY_MICROS if options.verify == "cpu" else 0.0)
    return micros * 1e-6 * nonzeros + job.compare_seconds


def _stock_ahead(job: Job) -> None:
    """Have the first kernels of the next tuning built, now that the builders have no more to do for this one."""
    for name, begun in islice(job.workshop.done_ahead(), 1):
        found, (problem, options) = begun.found(), begun.arguments
        assert isinstance(problem, Problem) and isinstance(options, Options)
        crew = job.workshop.crew(options.emitter)
        if isinstance(found, Sought) and found.choice is not None and options.trials == "full" and crew is not None:
            first = [one.candidate for one in spread_over(found.choice.shortlist, LOCKSTEPS[options.emitter])]
            built = partial(_built_ahead, crew, problem, options.emitter, job.store)
            job.workshop.stock_ahead(name).begin(first, built, crew.size)


def _built_ahead(crew: Crew, problem: Problem, emitter: str, store: Store, candidate: Candidate, at: Place) -> Built:
    return crew.build(problem, candidate, emitter, store, at.stop, folder=at.folder)


def _choose(job: Job, found: Sought, others: Contest, bench: Bench, stock: Stock) -> Choice:
    """The fastest of what is timed; ``others`` may have been before."""
    problem, options, stages = in_words(job.problem), job.options, job.stages
    timings, choice, pool = _timings(job, options.emitter), found.choice, found.pool
    assert choice is not None
    way = TRIALS[options.trials]
    clock = Clock(
        trials=way.trials(job, bench, timings, stock),
        finals=_whole(job, bench, timings, stock, effort=AGAIN),
        is_over=lambda: job.budget.is_over,
        rival_micros=others.fastest_micros,
    )
    ranker = RANKERS[options.ranker](problem.device)
    locksteps = LOCKSTEPS[options.emitter]
    return choose_by_time(problem, choice, ranker, clock, stages, locksteps=locksteps, policy=way.policy, pool=pool)


def _others_first(job: Job, found: Sought, bench: Bench, stock: Stock) -> tuple[Sought, Contest]:
    """The other families, timed; and then, unless it is far behind the fastest of them, the unrolled one to search."""
    field = found.field
    assert field.unrolled_micros is not None, "it was forecast"
    others = _contest(job, field, bench, stock, limit_micros=field.unrolled_micros)
    if (why := why_not_searched(others, is_over=job.budget.is_over)) is not None:
        refused = replace(field, refusals={**field.refusals, UNROLLED: why})
        return replace(found, choice=None), replace(others, field=refused)
    choice = found.choice or ranked_of(job.problem, job.options, field, job.stages)
    return replace(found, choice=choice), others


def _others_last(job: Job, field: Field, choice: Choice | None, bench: Bench, stock: Stock) -> Contest:
    """The other families, timed after the unrolled one."""
    if choice is not None and job.budget.is_over:
        return Contest(field)
    return _contest(job, field, bench, stock, limit_micros=float("inf") if choice is None else choice.micros)


def _contest(job: Job, field: Field, bench: Bench, stock: Stock, *, limit_micros: float) -> Contest:
    if not field.entrants:
        return Contest(field)
    timings, crew = _timings(job, TEMPLATE), job.workshop.crew(job.options.emitter)
    kept = None if crew is None else stock  # in files: in memory ten kernels of large layers would take a gigabyte
    trials, finals = (
        _trials(BuildAndTime, job, bench, TEMPLATE, Means(crew, timings, effort, job.budget, kept))
        for effort in (BRIEF, AGAIN)
    )
    return contest(field, Clock(trials, finals, lambda: job.budget.is_over), limit_micros=limit_micros)


def _timings(job: Job, language: str) -> Timings:
    """What is known of kernels in this language."""
    compiler = compiler_name(language, job.problem.device.arch)
    machine = {"gpu": own_gpu_id(), "driver": driver_version(), "compiler": compiler}
    conditions = conditions_of(job.problem, language, **machine, cache_state=CACHE_STATES[job.options.cache])
    return Timings(job.store, conditions)


def _whole(job: Job, bench: Bench, timings: Timings, stock: Stock, *, effort: Effort = BRIEF) -> Trials:
    """The kernels themselves."""
    emitter = job.options.emitter
    means = Means(job.workshop.crew(emitter), timings, effort, job.budget, stock)
    return _trials(BuildAndTime, job, bench, emitter, means)


def _trials(kind: type[BuildAndTime], job: Job, bench: Bench, language: str, means: Means) -> BuildAndTime:
    """Built by the crew where there is one, else by threads of this process."""
    workers = job.workshop.workers if means.crew is None else builders_for(job.problem, means.crew.size)
    return kind(job.problem, language, bench, store=job.store, workers=workers, stages=job.stages, means=means)


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The winner. ``runs`` is what is checked and timed; ``shipped`` waits for what is shipped, and for its text."""

    runs: Built
    shipped: Callable[[], tuple[Build | PackedBuild | Written, str]]
    build: Build | PackedBuild | None = None  # where this process has built it


def _made(job: Job, winner: Candidate | Entrant, stock: Stock | None) -> Made:
    """The winner, built again with all that is shipped, by another process where its code is in stock."""
    runs = None if stock is None else stock.kept(winner)
    crew = None if runs is None else job.workshop.crew(job.options.emitter)
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(1, thread_name_prefix="text")
        stack.callback(threads.shutdown, wait=False)
        if runs is None or crew is None or job.options.verify == "cpu":
            built = _build(job, winner)
            text = threads.submit(source, built, job.problem.device.arch)
            return Made(built.compiled, lambda: (built, text.result()), built)
        arguments = job.problem, winner, job.options.emitter, job.store
        code = runs.cubin if isinstance(runs.cubin, bytes) else runs.cubin.read_bytes()
        coming = threads.submit(crew.call, written, *arguments, cancel=job.stages.cancel, who_built=winner)
    for name in ("emit", "compile"):  # what is left of them nobody waits for
        job.stages.progress(name, 1, 1)

    def shipped() -> tuple[Written | PackedBuild, str]:
        made = coming.result()
        assert isinstance(made, Written | PackedBuild)
        if made.binary.cubin != code:
            raise ToolchainFault(f"{made.compiled.entry}: built twice, and its code differs; run it again")
        return made, made.source

    return Made(runs, shipped)


def _build(job: Job, winner: Candidate | Entrant) -> Build | PackedBuild:
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


def _verify(job: Job, made: Made, bench: Bench | None) -> Verification | None:
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


def _compare(job: Job, made: Made, bench: Bench | None) -> Comparison | None:
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


def _proxies(job: Job, bench: Bench, _timings: Timings, _stock: Stock) -> Trials:
    """Section 5: what stands for them. Proxies of machine code are made in no time, and are not kept."""
    from lospmm.proxy_trials import ProxyTrials

    emitter = job.options.emitter
    return _trials(ProxyTrials, job, bench, emitter, Means(job.workshop.crew(emitter), None, BRIEF, job.budget))


@dataclass(frozen=True, slots=True)
class Way:
    """What is timed of a candidate, and how a search goes by it."""

    trials: Callable[[Job, Bench, Timings, Stock], Trials]
    policy: Policy


#: By the name that the option takes. Of proxies, more of the fastest are timed themselves.
TRIALS: Mapping[str, Way] = MappingProxyType(
    {
        "full": Way(_whole, POLICY),
        "proxy": Way(_proxies, replace(POLICY, finals=(20, 12, 6, 4, 3), walked=0, doubled=0)),
    }
)
