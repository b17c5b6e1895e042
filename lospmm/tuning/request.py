"""A tuning request: a problem with options, its digest, and its JSON for another process."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lospmm.artifact.artifact import MATRIX_FILE
from lospmm.errors import BadMatrix, BadRequest
from lospmm.gpu.detect import own_gpu
from lospmm.matrix import npz as npy
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.npz import write_npz
from lospmm.matrix.readers import Values
from lospmm.problem.convolution import Convolution, convolution_of
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import dtype_named
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem, layer_fields
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compilers import compiler_name
from lospmm.tuning.build import for_emitter
from lospmm.tuning.forecast import unrolled_refusal
from lospmm.tuning.options import UNROLLED, Options, decisive_fields
from lospmm.tuning.rankers import ranker_digest, with_ranker
from lospmm.tuning.untimed import model_digest
from lospmm.version import __version__
from lospmm_rank.predict.corrections import corrections_digest

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
