"""The steps of one tuning, from its problem to what is known in the end: search, choose, build, verify, compare."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

from lospmm.artifact import Measured
from lospmm.baselines import BASELINES
from lospmm.bench import compare
from lospmm.budget import Budget
from lospmm.build import Build, build
from lospmm.codegen import source_of
from lospmm.device import DeviceSpec
from lospmm.errors import VerificationFailed
from lospmm.estimate import estimate_micros
from lospmm.gpu.exclusive import exclusive
from lospmm.measure import AGAIN, BRIEF, Bench, Effort
from lospmm.model import Problem
from lospmm.options import LOCKSTEPS, Options, splits_of
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
from lospmm.verify import Verification, verify_on_cpu
from lospmm.workshop import Workshop

#: What comes after a search, in microseconds of one core for each nonzero: to build the winner and to write its text;
#: to run it on the CPU.
END_MICROS: Mapping[str, float] = MappingProxyType({"sass": 6.0, "ptx": 20.0, "cuda": 20.0})
VERIFY_MICROS = 50.0

#: Measurements of the winner after a search: to check it, and beside the libraries, which have to be loaded first.
MEASUREMENTS = 4
COMPARE_SECONDS = 2.5

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
    def is_compared(self) -> bool:
        """Whether the budget leaves time for the libraries."""
        seconds = self.options.budget_seconds
        return self.options.measure == "gpu" and (seconds is None or seconds >= COMPARED_FROM * COMPARE_SECONDS)


def tuned(job: Job) -> Outcome:
    """Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported and CancelledError."""
    options, problem = job.options, job.problem
    job.budget.reserve_seconds, job.budget.measurements = reserve_seconds(job), MEASUREMENTS
    if options.measure == "gpu":
        job.workshop.crew(options.emitter)  # which starts while this process searches
    choice = searched(job)
    with ExitStack() as gpu:
        bench = None
        if "gpu" in (options.measure, options.verify):
            with job.budget.paused():
                gpu.enter_context(exclusive(settings().cache_dir, job.stages.cancel, gpu=own_gpu_id()))
            bench = job.workshop.bench(problem, job.stages.cancel)
        if options.measure == "gpu":
            assert bench is not None
            choice = _choose(job, choice, bench)
        built = _build(job, choice)
        verification = _verify(job, built, bench)
        text = gpu.enter_context(ThreadPoolExecutor(1, thread_name_prefix="text"))
        source = text.submit(source_of, built.program, built.emission, problem.device.arch)
        measured = _compare(job, built, bench)
        with job.stages.stage("emit"):
            written = source.result()
    return Outcome(problem, options, "stored", None, choice, built, written, verification, measured)


def reserve_seconds(job: Job) -> float:
    """What comes after the search takes, by forecast, beside MEASUREMENTS."""
    nonzeros, options = job.problem.matrix.nnz, job.options
    micros = END_MICROS[options.emitter] + (VERIFY_MICROS if options.verify == "cpu" else 0.0)
    return micros * 1e-6 * nonzeros + (COMPARE_SECONDS if job.is_compared else 0.0)


def searched(job: Job) -> Choice:
    """Without a GPU: what the ranker puts first. Raises NothingFits."""
    problem, options = job.problem, job.options
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
        workshop.explore_ahead(problem, options.emitter, splits_of(options.emitter, problem.device.arch))


def _choose(job: Job, choice: Choice, bench: Bench) -> Choice:
    """The fastest of what is timed."""
    problem, options, stages = job.problem, job.options, job.stages
    compiler = compiler_name(options.emitter, problem.device.arch)
    conditions = conditions_of(problem, options.emitter, gpu=own_gpu_id(), driver=driver_version(), compiler=compiler)
    timings = Timings(job.store, conditions)
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


def _whole(job: Job, bench: Bench, timings: Timings, *, effort: Effort = BRIEF) -> Trials:
    """The kernels themselves."""
    crew = job.workshop.crew(job.options.emitter)
    return BuildAndTime(
        job.problem,
        job.options.emitter,
        bench,
        store=job.store,
        workers=job.workshop.workers if crew is None else crew.size,
        stages=job.stages,
        means=Means(crew, timings, effort, job.budget),
    )


def _build(job: Job, choice: Choice) -> Build:
    stages = job.stages
    return build(
        job.problem,
        choice.winner,
        job.options.emitter,
        store=job.store,
        workers=job.workshop.workers,
        stage=stages.stage,
        progress=lambda done, total: stages.progress("compile", done, total),
        cancel=stages.cancel,
    )


def _verify(job: Job, built: Build, bench: Bench | None) -> Verification | None:
    if job.options.verify == "none":
        return None
    with job.stages.stage("verify"):
        if job.options.verify == "cpu":
            return verify_on_cpu(job.problem, built.program, built.emission)
        assert bench is not None
        bench.kernel_seconds = None
        kernel = built.compiled
        measurement = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=BRIEF)
        if measurement.max_relative_error is None or measurement.failure is not None:
            raise VerificationFailed(f"on the GPU: {measurement.failure}")
        return Verification("gpu", measurement.max_relative_error, job.problem.n)


def _compare(job: Job, built: Build, bench: Bench | None) -> Measured | None:
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
            names=tuple(BASELINES) if job.is_compared else (),
            known=shop.known(job.problem),
            sputnik=settings().sputnik,
            progress=job.stages.progress,
        )
    shop.learn(job.problem, found.baselines)
    return found.measured()


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

    crew = job.workshop.crew(job.options.emitter)
    return ProxyTrials(
        job.problem,
        job.options.emitter,
        bench,
        store=job.store,
        workers=job.workshop.workers if crew is None else crew.size,
        stages=job.stages,
        means=Means(crew, None, BRIEF, job.budget),
    )


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
