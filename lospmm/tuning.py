"""The steps of one tuning, from its problem to what is known in the end: search, choose, build, verify, compare."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lospmm.baselines import BASELINES, DENSE_OF
from lospmm.bench import Comparison, compare
from lospmm.budget import Budget
from lospmm.build import Build, PackedBuild, build, build_packed
from lospmm.codegen import EMITTERS, source_of
from lospmm.contest import Contest, Field, contest, field_of
from lospmm.dense_choice import DenseChoice, dense_choice
from lospmm.device import DeviceSpec
from lospmm.dtype import FLOAT32, Dtype
from lospmm.errors import GpuFault, NothingFits, VerificationFailed
from lospmm.estimate import estimate_micros
from lospmm.families import Entrant
from lospmm.families.traits import traits_of
from lospmm.gpu.exclusive import exclusive
from lospmm.measure import AGAIN, BRIEF, Bench, Effort
from lospmm.model import Candidate, Problem
from lospmm.options import DENSE, LOCKSTEPS, UNROLLED, Options, splits_of
from lospmm.ranker import Ranker
from lospmm.record import Outcome
from lospmm.runtime.detect import driver_version, own_gpu_id
from lospmm.search import POLICY, Choice, Clock, Policy, Trials, choose_by_time, explore_problem, search_space
from lospmm.settings import settings
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.timings import Timings, conditions_of
from lospmm.toolchain.compilers import compiler_name
from lospmm.trials import BuildAndTime, Means
from lospmm.verify import Verification, verify_on_cpu, verify_packed_on_cpu
from lospmm.words import PAIRS, SINGLE, in_words, words_of
from lospmm.workshop import Workshop
from lospmm_rank.families import dense_micros, factors

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
        return (own,) if self.compare_seconds or own in self.workshop.known(self.problem) else ()


def tuned(job: Job) -> Outcome:
    """Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported and CancelledError."""
    options, problem = job.options, job.problem
    job.budget.reserve_seconds, job.budget.measurements = reserve_seconds(job), MEASUREMENTS
    is_timed, is_unrolled = options.measure == "gpu", takes_unrolled(job)
    if is_timed and is_unrolled:
        job.workshop.crew(options.emitter)  # which starts while this process searches
    with job.stages.part("constraints"):
        others = Contest(field_for(problem, contenders(options.kernel_names, problem.dtype, is_unrolled=is_unrolled)))
    try:
        choice = searched(job) if is_unrolled else None
    except NothingFits:
        if not others.field.entrants:
            raise
        choice = None
    with ExitStack() as gpu:
        bench = None
        if "gpu" in (options.measure, options.verify):
            with job.budget.paused():
                gpu.enter_context(exclusive(settings().cache_dir, job.stages.cancel, gpu=own_gpu_id()))
            bench = job.workshop.bench(problem, job.stages.cancel)
        if is_timed:
            assert bench is not None
            choice = None if choice is None else _choose(job, choice, bench)
            others = _contest(job, others.field, choice, bench)
        winner = winner_of(problem, choice, others, options.emitter)
        built = _build(job, winner)
        verification = _verify(job, built, bench)
        text = gpu.enter_context(ThreadPoolExecutor(1, thread_name_prefix="text"))
        source = text.submit(_source, built, problem.device.arch)
        found = _compare(job, built, bench)
        with job.stages.stage("emit"):
            written = source.result()
    dense = beside_dense(problem, others.field, winner, found) if DENSE in options.family_names else None
    measured = None if found is None else found.measured()
    return Outcome(problem, options, "stored", None, choice, others, built, written, verification, measured, dense)


def beside_dense(problem: Problem, field: Field, winner: Candidate | Entrant, found: Comparison | None) -> DenseChoice:
    """Whether cuBLAS is faster than the winner: both in one run, or, without a clock, by forecast."""
    assert field.dense_micros is not None, "it was forecast"
    if found is not None:
        return dense_choice(problem, field.dense_micros, found.baselines, kernel_micros=found.micros)
    return dense_choice(problem, field.dense_micros, {}, kernel_micros=_forecast_micros(problem, winner))


def _forecast_micros(problem: Problem, winner: Candidate | Entrant) -> float:
    """As it was corrected by what was measured on such a device."""
    if isinstance(winner, Entrant):
        return winner.forecast_micros
    factor = factors(traits_of(problem), problem.device.name).get(UNROLLED, 1.0)
    return float(estimate_micros(in_words(problem), [winner])[0]) * factor


def field_for(problem: Problem, names: Sequence[str]) -> Field:
    """The plans of these families, their forecasts corrected by what was measured on such a device."""
    traits, device = traits_of(problem), problem.device
    learned = factors(traits, device.name)
    of_dense = 1.0 if traits.is_exact else learned.get(DENSE, 1.0)  # it was not learned in float32
    return field_of(problem, names, learned, dense_micros=dense_micros(traits, device) * of_dense)


#: Families that are not looked at where the unrolled one takes part with float32 or TF32: on an H200 it was
#: faster on all 82 problems that both took (benchmarks/results/families.jsonl), and their forecasts take long to make.
SLOWER_THAN_UNROLLED = ("tensor_core",)


def contenders(names: Sequence[str], dtype: Dtype, *, is_unrolled: bool) -> list[str]:
    """Of the families that are asked for, those that the unrolled one is compared with, or that stand in for it."""
    slower = SLOWER_THAN_UNROLLED if is_unrolled and not dtype.is_16_bit else ()
    return [name for name in names if name != UNROLLED and name not in slower]


def takes_unrolled(job: Job) -> bool:
    """Whether the family with A in its instructions takes part."""
    return UNROLLED in job.options.family_names and unrolled_refusal(job.problem, job.options.emitter) is None


def unrolled_refusal(problem: Problem, emitter: str) -> str | None:
    """Why there is no unrolled kernel by ``emitter``, in a few words; None: there is."""
    words = words_of(problem)
    if words != SINGLE and not EMITTERS[emitter].writes(words, problem.device.arch):
        sums = problem.dtype.name if words == PAIRS else FLOAT32.name
        arch = problem.device.arch
        return f"dtype {problem.dtype.name}, sums {sums}: {emitter} has no unrolled kernels of them for {arch}"
    matrix, limit = problem.matrix, settings().max_nonzeros
    if matrix.nnz + matrix.m > limit:
        return f"{matrix.nnz} nonzeros and {matrix.m} rows: together more than the {limit} of LOSPMM_MAX_NONZEROS"
    return None


def winner_of(problem: Problem, choice: Choice | None, others: Contest, emitter: str) -> Candidate | Entrant:
    """The fastest of all families. Where nothing was timed, of 16-bit types the one of the best forecast, and of others
    the unrolled one if it has a kernel: there it was faster wherever both were timed. ``problem`` is the emitter's."""
    best = others.best
    if choice is None:
        if best is None:
            raise (_nobody_ran(others) if others.timed else NothingFits(_nobody(problem, others.field, emitter)))
        return best
    if best is None:
        return choice.winner
    if not (choice.trials or others.timed) and problem.dtype.is_16_bit:
        is_best = best.forecast_micros < _forecast_micros(problem, choice.winner)
        return best if is_best else choice.winner
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


def searched(job: Job) -> Choice:
    """Without a GPU: what the ranker puts first. Raises NothingFits."""
    problem, options = in_words(job.problem), job.options
    splits = splits_of(options.emitter, problem.device.arch)
    with job.stages.part("constraints"):
        space = job.workshop.explored(problem, splits)
    return search_space(
        problem,
        explore_problem(problem, job.stages, splits=splits) if space is None else space,
        RANKERS[options.ranker](problem.device),
        options.shortlist_size,
        job.stages,
        lockstep=LOCKSTEPS[options.emitter][0],
    )


def search_ahead(problem: Problem, options: Options, workshop: Workshop) -> None:
    """Have the space of a tuning to come explored while another has the GPU, where that takes nothing from it."""
    if options.measure == "gpu":
        workshop.explore_ahead(in_words(problem), options.emitter, splits_of(options.emitter, problem.device.arch))


def _choose(job: Job, choice: Choice, bench: Bench) -> Choice:
    """The fastest of what is timed."""
    problem, options, stages = in_words(job.problem), job.options, job.stages
    timings = _timings(job, options.emitter)
    way = TRIALS[options.trials]
    clock = Clock(
        trials=way.trials(job, bench, timings),
        finals=_whole(job, bench, timings, effort=AGAIN),
        is_over=lambda: job.budget.is_over,
    )
    ranker = RANKERS[options.ranker](problem.device)
    locksteps = LOCKSTEPS[options.emitter]
    chosen = choose_by_time(problem, choice, ranker, clock, stages, locksteps=locksteps, policy=way.policy)
    for name in ("compile_trials", "measure_trials"):
        stages.progress(name, 1, 1)
    return chosen


def _contest(job: Job, field: Field, choice: Choice | None, bench: Bench) -> Contest:
    """The other families, timed after the unrolled one."""
    if not field.entrants or (choice is not None and job.budget.is_over):
        return Contest(field)
    timings = _timings(job, TEMPLATE)
    trials, finals = (
        _trials(BuildAndTime, job, bench, TEMPLATE, Means(None, timings, effort, job.budget))
        for effort in (BRIEF, AGAIN)
    )
    clock = Clock(trials, finals, lambda: job.budget.is_over)
    return contest(field, clock, limit_micros=float("inf") if choice is None else choice.micros)


def _timings(job: Job, language: str) -> Timings:
    """What is known of kernels in this language."""
    compiler = compiler_name(language, job.problem.device.arch)
    conditions = conditions_of(job.problem, language, gpu=own_gpu_id(), driver=driver_version(), compiler=compiler)
    return Timings(job.store, conditions)


def _whole(job: Job, bench: Bench, timings: Timings, *, effort: Effort = BRIEF) -> Trials:
    """The kernels themselves."""
    emitter = job.options.emitter
    return _trials(BuildAndTime, job, bench, emitter, Means(job.workshop.crew(emitter), timings, effort, job.budget))


def _trials(kind: type[BuildAndTime], job: Job, bench: Bench, language: str, means: Means) -> BuildAndTime:
    """Built by the crew where there is one, else by threads of this process."""
    workers = job.workshop.workers if means.crew is None else means.crew.size
    return kind(job.problem, language, bench, store=job.store, workers=workers, stages=job.stages, means=means)


def _build(job: Job, winner: Candidate | Entrant) -> Build | PackedBuild:
    stages = job.stages
    common: dict[str, Any] = {
        "store": job.store,
        "workers": job.workshop.workers,
        "stage": stages.stage,
        "progress": lambda done, total: stages.progress("compile", done, total),
        "cancel": stages.cancel,
    }
    if isinstance(winner, Entrant):
        return build_packed(job.problem, winner, **common)
    return build(job.problem, winner, job.options.emitter, **common)


def _source(built: Build | PackedBuild, arch: str) -> str:
    return built.kernel.source if isinstance(built, PackedBuild) else source_of(built.program, built.emission, arch)


def _verify(job: Job, built: Build | PackedBuild, bench: Bench | None) -> Verification | None:
    if job.options.verify == "none":
        return None
    with job.stages.stage("verify"):
        if job.options.verify == "cpu":
            if isinstance(built, PackedBuild):
                return verify_packed_on_cpu(job.problem, built.kernel)
            return verify_on_cpu(job.problem, built.program, built.emission)
        assert bench is not None
        bench.kernel_seconds = None
        kernel = built.compiled
        measurement = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=BRIEF)
        if measurement.max_relative_error is None or measurement.failure is not None:
            raise VerificationFailed(f"on the GPU: {measurement.failure}")
        return Verification("gpu", measurement.max_relative_error, job.problem.n)


def _compare(job: Job, built: Build | PackedBuild, bench: Bench | None) -> Comparison | None:
    """The kernel beside the libraries, in the same run; by itself where the budget leaves no time for them."""
    if job.options.measure != "gpu":
        return None
    assert bench is not None
    shop = job.workshop
    bench.kernel_seconds = None
    with job.stages.stage("compare"):
        found = compare(
            bench,
            built.compiled,
            names=job.compared,
            known=shop.known(job.problem),
            sputnik=settings().sputnik,
            progress=job.stages.progress,
        )
    shop.learn(job.problem, found.baselines)
    return found


def _estimate(_device: DeviceSpec) -> Ranker:
    return estimate_micros


def _lambdamart(device: DeviceSpec) -> Ranker:
    from lospmm_rank.lambdamart import ranker_for  # LightGBM takes a while to import

    return ranker_for(device)


#: By the name that the option takes: who orders candidates for a device.
RANKERS: Mapping[str, Callable[[DeviceSpec], Ranker]] = MappingProxyType({"none": _estimate, "lambdamart": _lambdamart})


def _proxies(job: Job, bench: Bench, _timings: Timings) -> Trials:
    """Section 5: what stands for them. Proxies of machine code are made in no time, and are not kept."""
    from lospmm.proxy_trials import ProxyTrials

    emitter = job.options.emitter
    return _trials(ProxyTrials, job, bench, emitter, Means(job.workshop.crew(emitter), None, BRIEF, job.budget))


def with_ranker(options: Options, device: DeviceSpec) -> Options:
    """``options`` with the ranker that "auto" stands for: the model of the GPU, for machine code, of which it learned;
    none for what there is no model of. Raises Unsupported where a model is asked for and there is none."""
    if options.ranker == "none":
        return options
    from lospmm_rank.lambdamart import find_model, model_path

    if options.ranker == "auto":
        is_known = options.emitter == "sass" and find_model(device) is not None
        return replace(options, ranker="lambdamart" if is_known else "none")
    model_path(device)
    return options


def ranker_digest(options: Options, device: DeviceSpec) -> str | None:
    """What tells a ranker's model from others; None where it has none. Raises Unsupported as the ranker does."""
    if options.ranker != "lambdamart":
        return None
    from lospmm_rank.lambdamart import model_digest

    return model_digest(device)


@dataclass(frozen=True, slots=True)
class Way:
    """What is timed of a candidate, and how a search goes by it."""

    trials: Callable[[Job, Bench, Timings], Trials]
    policy: Policy


#: By the name that the option takes. Of proxies, more of the fastest are timed themselves.
TRIALS: Mapping[str, Way] = MappingProxyType(
    {"full": Way(_whole, POLICY), "proxy": Way(_proxies, replace(POLICY, finalists=12, turns=3))}
)
