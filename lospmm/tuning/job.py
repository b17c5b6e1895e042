"""What every step of one tuning needs, and the time that it sets aside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import driver_version, own_gpu_id
from lospmm.gpu.libraries import BASELINES, DENSE_OF
from lospmm.gpu.messages import CACHE_STATES
from lospmm.gpu.timing import BRIEF, Effort
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compilers import compiler_name
from lospmm.tuning.budget import Budget
from lospmm.tuning.builders import PrefetchedBuilds, builders_for
from lospmm.tuning.history import History, conditions_of
from lospmm.tuning.options import DENSE, Options
from lospmm.tuning.runner import GpuRunner, RunnerSetup
from lospmm.tuning.search import POLICY, Policy
from lospmm.tuning.session import Session
from lospmm.tuning.trial import Trials

#: What comes after a search, in microseconds of one core for each nonzero: to build the winner and to write its text;
#: to run it on the CPU.
END_MICROS: Mapping[str, float] = MappingProxyType({"sass": 6.0, "ptx": 20.0, "cuda": 20.0})

VERIFY_MICROS = 50.0

#: The language of packed kernels.
TEMPLATE = "template"

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
    workshop: Session
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


def reserve_seconds(job: Job) -> float:
    """What comes after the search takes, by forecast, beside MEASUREMENTS."""
    nonzeros, options = job.problem.matrix.nnz, job.options
    micros = END_MICROS[options.emitter] + (VERIFY_MICROS if options.verify == "cpu" else 0.0)
    return micros * 1e-6 * nonzeros + job.compare_seconds


def _timings(job: Job, language: str) -> History:
    """What is known of kernels in this language."""
    compiler = compiler_name(language, job.problem.device.arch)
    machine = {"gpu": own_gpu_id(), "driver": driver_version(), "compiler": compiler}
    conditions = conditions_of(job.problem, language, **machine, cache_state=CACHE_STATES[job.options.cache])
    return History(job.store, conditions)


def _whole(job: Job, bench: Bench, timings: History, stock: PrefetchedBuilds, *, effort: Effort = BRIEF) -> Trials:
    """The kernels themselves."""
    emitter = job.options.emitter
    means = RunnerSetup(job.workshop.crew(emitter), timings, effort, job.budget, stock)
    return _trials(GpuRunner, job, bench, emitter, means)


def _trials(kind: type[GpuRunner], job: Job, bench: Bench, language: str, means: RunnerSetup) -> GpuRunner:
    """Built by the crew where there is one, else by threads of this process."""
    workers = job.workshop.workers if means.crew is None else builders_for(job.problem, means.crew.size)
    return kind(job.problem, language, bench, store=job.store, workers=workers, stages=job.stages, means=means)


def _proxies(job: Job, bench: Bench, _timings: History, _stock: PrefetchedBuilds) -> Trials:
    """Section 5: what stands for them. Proxies of machine code are made in no time, and are not kept."""
    from lospmm.tuning.proxy_runner import ProxyRunner

    emitter = job.options.emitter
    return _trials(ProxyRunner, job, bench, emitter, RunnerSetup(job.workshop.crew(emitter), None, BRIEF, job.budget))


@dataclass(frozen=True, slots=True)
class TrialKind:
    """What is timed of a candidate, and how a search goes by it."""

    trials: Callable[[Job, Bench, History, PrefetchedBuilds], Trials]
    policy: Policy


#: By the name that the option takes. Of proxies, more of the fastest are timed themselves.
TRIALS: Mapping[str, TrialKind] = MappingProxyType(
    {
        "full": TrialKind(_whole, POLICY),
        "proxy": TrialKind(_proxies, replace(POLICY, finals=(20, 12, 6, 4, 3), walked=0, doubled=0)),
    }
)
