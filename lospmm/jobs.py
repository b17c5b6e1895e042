"""One tuning job from request to artifact: search, lower, emit, compile, verify, keep.

The same request is done once: its artifact lies in the store under the request's digest, and a later run, another
process or the service finds it there.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lospmm import __version__, artifact
from lospmm.artifact import Artifact, Manifest
from lospmm.codegen import EMITTERS, check_target, emit
from lospmm.codegen.emission import Emission
from lospmm.errors import BadRequest, Unsupported
from lospmm.estimate import estimate_micros
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem
from lospmm.readers import Values
from lospmm.search import Choice, search
from lospmm.settings import settings
from lospmm.stages import Progress, Stages, silent
from lospmm.store import Store
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm.toolchain.compilers import compiler_name
from lospmm.toolchain.discover import check_arch, find_toolkit
from lospmm.verify import Verification, verify_on_cpu

#: What of a request's artifact lies in the store, by this name.
KERNELS = "kernel"

#: What each option may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "emitter": tuple(EMITTERS),
    "ranker": ("none",),
    "measure": ("auto", "none"),
    "verify": ("cpu", "none"),
    "dtype": ("float32",),
}

#: What the interface names but this version does not do, and what to use meanwhile.
COMING: Mapping[str, str] = {
    "lambdamart": "no model has been trained yet; 'none' orders by the analytic estimate",
    "gpu": "this version runs nothing on a GPU; use measure 'none' and verify 'cpu'",
    "sass": "this version has no machine code emitter; use 'ptx' or 'cuda'",
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to tune; docs/cli.md says what each means. Raises BadRequest or Unsupported for what there is not."""

    emitter: str = "ptx"
    ranker: str = "none"
    measure: str = "auto"
    verify: str = "cpu"
    dtype: str = "float32"
    shortlist_size: int = 10

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value in COMING:
                raise Unsupported(f"{name} {value}: {COMING[value]}")
            if value not in choices:
                raise BadRequest(f"{name} {value!r}: choose one of {', '.join(choices)}")
        if self.shortlist_size < 1:
            raise BadRequest(f"shortlist {self.shortlist_size}: at least 1")


@dataclass(frozen=True, slots=True)
class Request:
    problem: Problem
    options: Options
    values: Values = "stored"
    seed: int = 0  # that drew the values of a pattern

    @property
    def digest(self) -> str:
        """sha256 over everything that decides the artifact; the name of the artifact in the store and in URLs.

        Raises ToolchainFault where there is no toolkit.
        """
        decisive = {
            "version": __version__,
            "fingerprint": self.problem.matrix.fingerprint,
            "n": self.problem.n,
            "device": asdict(self.problem.device),
            "values": self.values,
            "seed": self.seed if self.values == "drawn" else None,
            "options": {name: value for name, value in asdict(self.options).items() if name != "measure"},
            "compiler": compiler_name(self.options.emitter, self.problem.device.arch),
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _check_size(problem: Problem) -> None:
    """A kernel has an instruction for each nonzero and each row, the empty ones too."""
    matrix, limit = problem.matrix, settings().max_nonzeros
    if matrix.nnz + matrix.m > limit:
        raise BadRequest(
            f"{matrix.nnz} nonzeros and {matrix.m} rows: together more than the {limit} of LOSPMM_MAX_NONZEROS"
        )


def open_store() -> Store:
    return Store(settings().cache_dir)


def find(digest: str, store: Store) -> Artifact | None:
    """The finished artifact of a request, from the store."""
    files = store.get(KERNELS, digest)
    return None if files is None else artifact.from_files(files, f"the store's entry {digest}")


def tune(
    request: Request, *, store: Store, progress: Progress = silent, cancel: threading.Event | None = None
) -> Artifact:
    """The artifact of ``request``: the one in the store, or a new one, which is then kept there.

    Raises NothingFits, ToolchainFault, VerificationFailed, Unsupported, and CancelledError once ``cancel`` is set;
    nothing is kept then but compiled units.
    """
    problem, options, digest = request.problem, request.options, request.digest
    if (kept := find(digest, store)) is not None:
        return kept
    _check_size(problem)
    check_arch(find_toolkit(), problem.device.arch)
    check_target(options.emitter, problem.device.arch)
    stages = Stages(progress, cancel)
    workers = settings().workers
    choice = search(problem, estimate_micros, options.shortlist_size, stages, workers=workers)
    with stages.stage("emit"):
        program = lower(problem, choice.winner)
        emission = emit(program, options.emitter, problem.device.arch)
    with stages.stage("compile"):
        binary = compile_kernel(
            emission,
            arch=problem.device.arch,
            registers=program.registers,
            store=store,
            workers=workers,
            progress=lambda done, total: progress("compile", done, total),
            cancel=cancel,
        )
    verification = None
    if options.verify == "cpu":
        with stages.stage("verify"):
            verification = verify_on_cpu(problem, program, emission)
    manifest = _manifest(request, choice, program, binary, verification, stages.seconds())
    finished = artifact.from_files(_files(manifest, choice, emission, binary), "the new kernel")
    store.put(KERNELS, digest, finished.files)
    # Another process may have been first: both then give the same artifact, its times included.
    return find(digest, store) or finished


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


def _files(manifest: Manifest, choice: Choice, emission: Emission, binary: Binary) -> dict[str, bytes]:
    return {
        artifact.CUBIN_FILE: binary.cubin,
        artifact.SOURCE_FILES[emission.language]: emission.source.encode(),
        artifact.TUNING_FILE: "".join(f"{json.dumps(line)}\n" for line in _tuning_log(choice)).encode(),
        artifact.MANIFEST_FILE: manifest.to_json().encode(),
    }


def _tuning_log(choice: Choice) -> list[dict[str, object]]:
    """One line per candidate of the shortlist, best first."""
    return [
        {
            "rank": rank,
            "rows": scored.candidate.tile.rows,
            "cols": scored.candidate.tile.cols,
            **asdict(scored.candidate.schedule),
            "estimated_micros": scored.score,
            "measured_micros": None,
        }
        for rank, scored in enumerate(choice.shortlist, start=1)
    ]


def _manifest(
    request: Request,
    choice: Choice,
    program: KernelProgram,
    binary: Binary,
    verification: Verification | None,
    seconds: dict[str, float],
) -> Manifest:
    problem, options, matrix = request.problem, request.options, request.problem.matrix
    shape = launch(program)
    return Manifest(
        name=program.name,
        m=matrix.m,
        k=matrix.k,
        n=problem.n,
        nnz=matrix.nnz,
        dtype=options.dtype,
        fingerprint=matrix.fingerprint,
        values=request.values,
        seed=request.seed if request.values == "drawn" else None,
        device=problem.device.name,
        arch=problem.device.arch,
        emitter=options.emitter,
        toolchain=binary.toolchain,
        tile=_tile(choice.winner),
        launch=artifact.LaunchConfig(shape.grid, shape.block, shape.shared_bytes),
        arguments=(
            artifact.Argument("b", "const float *", f"row-major, {matrix.k} x {problem.n}, 4-byte aligned"),
            artifact.Argument("c", "float *", f"row-major, {matrix.m} x {problem.n}, written whole"),
        ),
        registers=binary.registers,
        spill_bytes=binary.spill_bytes,
        code_bytes=binary.code_bytes,
        cubin_sha256=hashlib.sha256(binary.cubin).hexdigest(),
        search=_summary(choice, options),
        seconds=artifact.Seconds(**seconds),
        verified=None
        if verification is None
        else artifact.Verified(verification.on, verification.max_relative_error, verification.columns),
    )


def _tile(winner: Candidate) -> artifact.Tile:
    tiling, schedule = winner.tiling, winner.schedule
    return artifact.Tile(
        rows=winner.tile.rows,
        cols=winner.tile.cols,
        prefetch=schedule.prefetch,
        fmas_per_load=schedule.fmas_per_load,
        order=schedule.order,
        count=len(tiling.tiles),
        zero_blocks=tiling.block_rows - len(tiling.tiles),
        nnc_sum=int(tiling.nnc.sum()),
        nnc_max=int(tiling.nnc.max(initial=0)),
    )


def _summary(choice: Choice, options: Options) -> artifact.SearchSummary:
    space = choice.space
    return artifact.SearchSummary(
        space=space.size,
        after_registers=space.after("registers"),
        after_utilization=space.after("utilization"),
        after_balance=space.after("balance"),
        shortlisted=len(choice.shortlist),
        measured=0,
        ranker=options.ranker,
        trials="none",
        relaxed=space.relaxed,
        chosen_by="estimate",
        estimated_micros=choice.shortlist[0].score,
    )
