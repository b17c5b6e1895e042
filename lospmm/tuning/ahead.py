"""Work for the next tuning while another uses the GPU: its search, and the build of an alike layer's plan."""

from collections.abc import Hashable
from functools import partial

from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning.job import Job
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import prepare, prepare_with_pool
from lospmm.tuning.runner import build_elsewhere
from lospmm.tuning.session import Session


def tuning_of(problem: Problem, options: Options) -> Hashable:
    """Return a key that identifies a tuning in this process."""
    layer = problem.convolution, problem.epilogue, problem.dtype, problem.sums, problem.values
    return problem.matrix.fingerprint, problem.n, problem.device, layer, options


def search_ahead(problem: Problem, options: Options, store: Store, session: Session) -> None:
    """Start to search for a later tuning while another uses the GPU, and to build the plan of an alike layer."""
    builders = session.builders(options.emitter) if options.measure == "gpu" else None
    if builders is None:
        return
    name, layer = tuning_of(problem, options), session.layers.alike(problem, options)
    is_new = session.begin_ahead(name, options.emitter, prepare_with_pool, problem, options)
    if is_new and layer is not None and layer.plan is not None and not options.each:
        built = partial(build_elsewhere, builders, problem, options.emitter, store)
        session.prefetch(name).begin(layer.plan, built)


def prepared(job: Job) -> Known:
    """Return what is known before anything is timed: the search made ahead, or one made now."""
    with job.stages.part("constraints"):
        ahead = job.session.begun_ahead(tuning_of(job.problem, job.options))
    return ahead if isinstance(ahead, Known) else prepare(job.problem, job.options, job.stages)
