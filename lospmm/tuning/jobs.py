"""One tuning job from request to artifact: search, build, verify, compare, keep.

The same request is done once: its artifact lies in the store under the request's digest, and a later run, another
process or the service finds it there.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.codegen import check_target
from lospmm.errors import BadRequest, ToolchainFault
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.stages import Progress, Stages, silent
from lospmm.store import Store
from lospmm.toolchain.discover import check_arch, find_toolkit
from lospmm.tuning import tuner as tuning
from lospmm.tuning.budget import Budget
from lospmm.tuning.forecast import unrolled_refusal
from lospmm.tuning.job import Job
from lospmm.tuning.options import UNROLLED, Options
from lospmm.tuning.outcome import files_of
from lospmm.tuning.prepare import search_ahead as search_ahead_of
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session

#: What of a request's artifact lies in the store, by this name.
KERNELS = "kernel"


def _check_size(problem: Problem, options: Options) -> None:
    """An unrolled kernel has an instruction for each nonzero and each row, the empty ones too."""
    if options.kernel_names == (UNROLLED,) and (why := unrolled_refusal(problem, options.emitter)) is not None:
        raise BadRequest(f"{why}; other families may have a kernel for it")


def open_store() -> Store:
    return Store(settings().cache_dir)


def find(digest: str, store: Store) -> Artifact | None:
    """The finished artifact of a request, from the store."""
    files = store.get(KERNELS, digest)
    return None if files is None else artifact.from_files(files, f"the store's entry {digest}")


def keep(made: Artifact, digest: str, store: Store) -> None:
    """Have the artifact of a request in ``store``. Raises ToolchainFault where the disk fails."""
    store.put(KERNELS, digest, made.files)


def tune(
    request: Request,
    *,
    store: Store,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    workers: int | None = None,
    workshop: Session | None = None,
) -> Artifact:
    """The artifact of ``request``: the one in the store, or a new one, which is then kept there if the disk lets it.

    ``workers`` is the most compilers at a time, where that is less than LOSPMM_WORKERS. ``workshop`` is for several
    tunings, one after the other.

    Raises NothingFits, ToolchainFault, GpuFault, VerificationFailed, Unsupported, BadRequest, and CancelledError once
    ``cancel`` is set; nothing is kept then but compiled units, and what was measured.
    """
    return chosen(request, store=store, progress=progress, cancel=cancel, workers=workers, workshop=workshop)()


def chosen(
    request: Request,
    *,
    store: Store,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
    workers: int | None = None,
    workshop: Session | None = None,
) -> Callable[[], Artifact]:
    """``tune`` as far as it takes a GPU or the workshop. What is returned does the rest, once, in whatever thread it is
    called, and raises ToolchainFault."""
    digest = request.digest
    if (kept := find(digest, store)) is not None:
        return lambda: kept
    budget = Budget(request.resolved.budget_seconds)
    options, problem = request.resolved, request.searched
    _check_size(problem, request.resolved)
    check_arch(find_toolkit(), problem.device.arch)
    check_target(options.emitter, problem.device.arch)
    most = settings().workers if workers is None else min(workers, settings().workers)
    with ExitStack() as stack:
        shop = stack.enter_context(Session(most)) if workshop is None else workshop
        job = Job(problem, options, store, Stages(progress, cancel), shop, budget)
        found = tuning.tuned(job)
        known = found() if workshop is None else None  # the processes of one that is its own end here

    def finished() -> Artifact:
        seed = request.seed if request.values == "drawn" else None
        outcome = replace(known or found(), problem=request.problem, values=request.values, seed=seed)
        made = artifact.from_files(files_of(outcome, job.stages.seconds()), "the new kernel")
        with suppress(ToolchainFault):  # of a disk that is full: the kernel is there all the same
            keep(made, digest, store)
            # Another process may have been first: both then give the same artifact, its times included.
            return find(digest, store) or made
        return made

    return finished


def search_ahead(request: Request, *, store: Store, workshop: Session) -> None:
    """Begin with a request while another has the GPU, as far as that is of use."""
    options = request.resolved
    if find(request.digest, store) is None:
        search_ahead_of(request.searched, options, workshop)


def tune_to_folder(
    request: Request,
    directory: Path,
    *,
    store: Store,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
) -> Artifact:
    """``tune``, and the artifact's files in ``directory``: all of them, or what was there before."""
    artifact.check_target(directory)
    finished = tune(request, store=store, progress=progress, cancel=cancel)
    artifact.write(finished, directory)
    return finished
