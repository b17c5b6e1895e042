"""One tuning job from request to artifact: search, build, verify, compare, keep.

The same request is done once: its artifact lies in the store under the request's digest, and a later run, another
process or the service finds it there.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lospmm import __version__, artifact, npy, tuning
from lospmm.artifact import MATRIX_FILE, Artifact
from lospmm.budget import Budget
from lospmm.build import for_emitter
from lospmm.codegen import check_target
from lospmm.convolution import Convolution, convolution_of
from lospmm.device import DeviceSpec
from lospmm.dtype import dtype_named
from lospmm.epilogue import Epilogue
from lospmm.errors import BadMatrix, BadRequest, ToolchainFault
from lospmm.matrix import SparseMatrix
from lospmm.model import Problem, layer_fields
from lospmm.npz import write_npz
from lospmm.options import UNROLLED, Options, decisive_fields
from lospmm.rankers import ranker_digest, with_ranker
from lospmm.readers import Values
from lospmm.record import files_of
from lospmm.runtime.detect import own_gpu
from lospmm.settings import settings
from lospmm.sought import search_ahead as search_ahead_of
from lospmm.sought import unrolled_refusal
from lospmm.stages import Progress, Stages, silent
from lospmm.store import Store
from lospmm.toolchain.compilers import compiler_name
from lospmm.toolchain.discover import check_arch, find_toolkit
from lospmm.tuning import Job
from lospmm.workshop import Workshop
from lospmm_rank.families import corrections_digest
from lospmm_rank.untimed import model_digest

#: What of a request's artifact lies in the store, by this name.
KERNELS = "kernel"

#: The matrix of a request that somebody else is to work on, by its fingerprint.
MATRICES = "matrix"

#: Part of every request's digest: raise it when a request gives another artifact than before.
ARTIFACT_FORMAT = 16


@dataclass(frozen=True)
class Request:
    problem: Problem
    options: Options
    values: Values = "stored"
    seed: int = 0  # that drew the values of a pattern
    is_settled: bool = False  # the options were resolved for the machine that is to do the work

    def __post_init__(self) -> None:
        """The problem is of the types that the options name. Raises BadMatrix where A is too large for them."""
        dtype, sums = dtype_named(self.options.dtype), dtype_named(self.options.sums)
        if (self.problem.dtype, self.problem.sums) != (dtype, sums):
            object.__setattr__(self, "problem", replace(self.problem, dtype=dtype, sums=sums))

    @cached_property
    def resolved(self) -> Options:
        """The options with nothing left to decide on this machine. Raises BadRequest for a GPU that it lacks."""
        return self.options if self.is_settled else self._resolved(own_gpu())

    def settled(self, gpu: str | None = None) -> "Request":
        """For a machine whose GPU is ``gpu``, or like this one's, to tune. Raises BadRequest as ``resolved``."""
        options = self.resolved if gpu is None else self._resolved(gpu)
        return replace(self, options=options, is_settled=True)

    def _resolved(self, gpu: str | None) -> Options:
        device = self.problem.device
        return with_ranker(self.options.resolved(device, gpu), device)

    @cached_property
    def searched(self) -> Problem:
        """The problem with what the emitter needs of a thread's registers. Raises BadRequest as ``resolved`` does."""
        return for_emitter(self.problem, self.resolved.emitter)

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that decides the artifact; the name of the artifact in the store and in URLs.

        Raises BadRequest as ``resolved`` does, ToolchainFault where there is no toolkit.
        """
        decisive = {
            "version": __version__,
            "format": ARTIFACT_FORMAT,
            "fingerprint": self.problem.matrix.fingerprint,
            "n": self.problem.n,
            "device": asdict(self.problem.device),
            "values": self.values,
            "seed": self.seed if self.values == "drawn" else None,
            "options": decisive_fields(self.resolved),
            "ranker": ranker_digest(self.resolved, self.problem.device),
            "forecasts": corrections_digest(self.problem.device.name),
            "compiler": compiler_name(self.resolved.emitter, self.problem.device.arch),
            **layer_fields(self.problem),
        }
        if (untimed := model_digest(self.problem, self.resolved)) is not None:
            decisive["untimed"] = untimed
        if UNROLLED in self.resolved.kernel_names and unrolled_refusal(self.searched, self.resolved.emitter):
            decisive["unrolled"] = False  # the limits are settings
        if not settings().fetch_code:
            decisive["fetch_code"] = False
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """All of a settled request but the matrix, of which the fingerprint is named; ``from_json`` reads it."""
        assert self.is_settled
        matrix = self.problem.matrix
        return {
            "fingerprint": matrix.fingerprint,
            "m": matrix.m,
            "k": matrix.k,
            "nnz": matrix.nnz,
            "n": self.problem.n,
            "device": asdict(self.problem.device),
            "options": decisive_fields(self.options),
            "values": self.values,
            "seed": self.seed,
            **layer_fields(self.problem),
        }


def _layer_of(content: Mapping[str, Any]) -> tuple[Convolution | None, Epilogue]:
    """What ``layer_fields`` wrote. Raises TypeError for fields that there are not."""
    window, epilogue = content.get("convolution"), dict(content.get("epilogue", {}))
    if epilogue.get("bias") is not None:
        epilogue["bias"] = tuple(epilogue["bias"])
    return None if window is None else convolution_of(window), Epilogue(**epilogue)


def from_json(content: Mapping[str, Any], store: Store) -> Request:
    """The request of ``to_json``, with the matrix from ``store``.

    Raises BadRequest where the matrix is not there any more, or where another version wrote the request.
    """
    try:
        device, options = DeviceSpec(**content["device"]), Options(**content["options"])
        fingerprint, n, values, seed = (content[name] for name in ("fingerprint", "n", "values", "seed"))
        convolution, epilogue = _layer_of(content)
    except (KeyError, TypeError) as error:
        raise BadRequest(f"the request was accepted by another version of lospmm ({error}); post it again") from None
    matrix = _kept_matrix(fingerprint, store)
    if matrix is None:
        raise BadRequest("the matrix of the request is no longer in the store, or damaged; post it again")
    return Request(Problem(matrix, n, device, convolution, epilogue), options, values, seed, is_settled=True)


def keep_matrix(matrix: SparseMatrix, store: Store, staged: Store | None = None) -> None:
    """Have the matrix in ``store``, whole, for ``from_json``; or in ``staged``, from where ``store`` is to take it.

    Raises ToolchainFault where the disk fails.
    """
    if store.get(MATRICES, matrix.fingerprint) is None:  # which removes a damaged one
        (staged or store).put(MATRICES, matrix.fingerprint, {MATRIX_FILE: write_npz(matrix)})


def _kept_matrix(fingerprint: str, store: Store) -> SparseMatrix | None:
    files = store.get(MATRICES, fingerprint)
    try:
        matrix = None if files is None else npy.read_npz(files[MATRIX_FILE])
    except (KeyError, BadMatrix):
        return None
    return matrix if matrix is not None and matrix.fingerprint == fingerprint else None


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
    workshop: Workshop | None = None,
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
    workshop: Workshop | None = None,
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
        shop = stack.enter_context(Workshop(most)) if workshop is None else workshop
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


def search_ahead(request: Request, *, store: Store, workshop: Workshop) -> None:
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
