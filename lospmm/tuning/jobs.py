"""Tuning from request to artifact: a cache hit, or a new tuning whose artifact is cached.

The artifact is stored under the request's digest, where a later run, another process or the service finds it.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

from lospmm.artifact.artifact import Artifact
from lospmm.artifact.kept import KERNELS, find, keep
from lospmm.errors import ToolchainFault
from lospmm.settings import settings
from lospmm.stages import Progress, Stages, silent
from lospmm.store import Store
from lospmm.tuning.budget import Budget
from lospmm.tuning.files import artifact_of
from lospmm.tuning.job import Job, check_job
from lospmm.tuning.prepare import prepare_with_pool
from lospmm.tuning.request import Request
from lospmm.tuning.runner import build_elsewhere
from lospmm.tuning.session import Session
from lospmm.tuning.tuner import tuned


def tune(
    request: Request,
    *,
    store: Store,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    session: Session | None = None,
) -> Artifact:
    """Return the artifact of ``request``: the one in the store, or a new one, which is then stored.

    ``session`` is shared by several tunings, one after the other; without one, LOSPMM_WORKERS compilers run at a time.

    Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported, BadRequest, and CancelledError once
    ``cancel`` is set. Only compiled units and measurements are then kept.
    """
    return chosen(request, store=store, progress=progress, cancel=cancel, session=session)()


def chosen(
    request: Request,
    *,
    store: Store,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    session: Session | None = None,
) -> Callable[[], Artifact]:
    """Run the part of ``tune`` that needs the GPU or the session; return a function for the rest.

    Call that function once, in any thread. It returns the artifact, and raises ToolchainFault.
    """
    digest = request.digest
    options, problem = request.resolved, request.searched
    if (kept := (session and session.taken(digest)) or find(digest, store)) is not None:
        if session is not None:
            session.layers.add_stored(problem, options, kept.manifest)
        return lambda: kept
    budget = Budget(options.budget_seconds)
    check_job(problem, options)
    with ExitStack() as stack:
        shop = stack.enter_context(Session(settings().workers)) if session is None else session
        job = Job(problem, options, store, Stages(progress, cancel), shop, budget)
        found = tuned(job)
        known = found() if session is None else None  # a session of its own ends with this block

    def finished() -> Artifact:
        seed = request.seed if request.values == "drawn" else None
        outcome = replace(known or found(), problem=request.problem, values=request.values, seed=seed)
        made = artifact_of(outcome, job.stages.seconds())
        try:
            made, shop.stored = keep(made, digest, store, shop.stored), digest
        except ToolchainFault as error:  # if the disk is full, the kernel is returned all the same
            _say_once(f"note: kernels are not cached: {error}")
        return made

    return finished


@cache
def _say_once(line: str) -> None:
    """Log a warning, which is a line on stderr unless the program has set up its logs, once in this process."""
    logging.getLogger(__name__).warning(line)


def search_ahead(request: Request, *, store: Store, session: Session) -> None:
    """Start to search for a request while another uses the GPU, and to build the plan of an alike layer.

    Reads the artifact instead if that is in the store, and does nothing else if nothing will be timed.
    """
    problem, options = request.searched, request.resolved
    if store.directory(KERNELS, request.digest).exists():
        session.read_ahead(request.digest, partial(find, request.digest, store))
        return
    if options.measure != "gpu":
        return
    builders, builds = session.builders(options.emitter), session.begin_ahead(problem, options, prepare_with_pool)
    layer = session.layers.alike(problem, options)
    if builders is None or builds is None or layer is None or layer.plan is None or options.each:
        return
    builds.begin(layer.plan, partial(build_elsewhere, builders, problem, options.emitter, store))
