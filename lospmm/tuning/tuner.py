"""The steps of one tuning, in order: prepare, race, build, verify, compare."""

from collections.abc import Callable
from contextlib import ExitStack

from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.settings import settings
from lospmm.tuning.builders import PrefetchedBuilds
from lospmm.tuning.forecast import beside_dense, forecast_micros, winner_of
from lospmm.tuning.job import MEASUREMENTS, Job, reserve_seconds
from lospmm.tuning.known import Known
from lospmm.tuning.options import DENSE
from lospmm.tuning.outcome import Outcome
from lospmm.tuning.prepare import prepare
from lospmm.tuning.race import race
from lospmm.tuning.runners import runner_of
from lospmm.tuning.winner import build_winner, compare_winner, verify_winner


def tuned(job: Job) -> Callable[[], Outcome]:
    """Run the steps of a tuning that need the GPU; return a function for the rest.

    That function waits for the kernel's source text and returns the outcome, in any thread. Raises NothingFits,
    ToolchainFault, GpuFault, VerificationFailed, Unsupported and CancelledError.
    """
    problem, options = job.problem, job.options
    job.budget.reserve_seconds, job.budget.measurements = reserve_seconds(job), MEASUREMENTS
    if options.measure == "gpu":
        job.session.builders(options.emitter)  # they start while this process searches
    with ExitStack() as stack:
        bench = _bench(job, stack)  # it starts while this process searches
        with job.stages.part("constraints"):
            found, prefetched = job.session.begun_ahead(problem, options)
        stack.enter_context(prefetched)
        known = found if isinstance(found, Known) else prepare(problem, options, job.stages)
        if options.measure == "gpu":
            assert bench is not None
            known = _raced(job, known, bench, prefetched)
        winner = winner_of(problem, known, options.emitter)
        made = build_winner(job, winner, prefetched)
        compared = compare_winner(job, made, bench, known.trials[-1].measurement if known.like else None)
        verified = verify_winner(job, made, bench, compared)
    if compared is not None:
        job.session.layers.add(problem, options, winner, compared.baselines)
    times = () if compared is None else (compared.baselines, compared.micros)
    dense = beside_dense(problem, known, winner, *times) if DENSE in options.family_names else None
    forecast = None if known.trials else forecast_micros(problem, winner, known.choice)
    measured = None if compared is None else compared.measured()

    def outcome() -> Outcome:
        with job.stages.part("emit"):
            built = made.shipped()
        made_of = known, winner, built, verified, measured, dense, forecast
        return Outcome(problem, options, "stored", None, *made_of)

    return outcome


def _bench(job: Job, stack: ExitStack) -> Bench | None:
    """Lock the GPU until ``stack`` ends and return its worker; None if no GPU is used.

    The wait for the lock is not part of the budget.
    """
    if "gpu" not in (job.options.measure, job.options.verify):
        return None
    with job.budget.paused():
        stack.enter_context(exclusive(settings().cache_dir, job.stages.cancel, gpu=own_gpu_id()))
    return job.session.bench(job.problem, job.stages.cancel, job.options.cache)


def _raced(job: Job, known: Known, bench: Bench, prefetched: PrefetchedBuilds) -> Known:
    """Race the candidates, or the plan of an alike layer alone; all of them if that one does not run."""
    narrowed = job.session.layers.narrowed(job.problem, job.options, known)
    with runner_of(job, bench, prefetched) as runner:
        raced = race(job.problem, narrowed, job.options, runner, job.stages)
        if narrowed is not known and not any(trial.has_run for trial in raced.trials):
            raced = race(job.problem, known, job.options, runner, job.stages)
    for name in ("compile_trials", "measure_trials"):
        job.stages.progress(name, 1, 1)
    return raced
