"""The runner of a job, by the option ``trials``."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import driver_version, own_gpu_id
from lospmm.gpu.messages import CACHE_STATES
from lospmm.toolchain.compilers import compiler_name
from lospmm.tuning.builders import PrefetchedBuilds, builders_for
from lospmm.tuning.history import History, conditions_of
from lospmm.tuning.job import Job
from lospmm.tuning.proxy_runner import ProxyRunner
from lospmm.tuning.runner import GpuRunner

#: Runners of kernels and of proxies (section 5), by the option ``trials``.
RUNNERS: Mapping[str, type[GpuRunner]] = MappingProxyType({"full": GpuRunner, "proxy": ProxyRunner})

#: The language of kernels that read A as data.
TEMPLATE = "template"


def runner_of(job: Job, bench: Bench, prefetched: PrefetchedBuilds) -> GpuRunner:
    """Return the runner that times the candidates of ``job``, built by its builders or by threads."""
    builders = job.session.builders(job.options.emitter)
    return RUNNERS[job.options.trials](
        job.problem,
        job.options.emitter,
        bench,
        store=job.store,
        workers=job.session.workers if builders is None else builders_for(job.problem, builders.size),
        stages=job.stages,
        builders=builders,
        history_of=_history_of(job),
        budget=job.budget,
        prefetched=prefetched,
    )


def _history_of(job: Job) -> Callable[[Candidate], History]:
    @cache
    def history(language: str) -> History:
        compiler = compiler_name(language, job.problem.device.arch)
        machine = {"gpu": own_gpu_id(), "driver": driver_version(), "compiler": compiler}
        cache_state = CACHE_STATES[job.options.cache]
        return History(job.store, conditions_of(job.problem, language, **machine, cache_state=cache_state))

    return lambda candidate: history(job.options.emitter if candidate.is_unrolled else TEMPLATE)
