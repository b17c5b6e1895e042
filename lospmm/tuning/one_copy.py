"""Kernels of one matrix for several N in one cubin, in which A stands once (``Options.memory`` low)."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lospmm.artifact.artifact import CUBIN_FILE, Artifact
from lospmm.artifact.manifest import MANIFEST_FILE, parse
from lospmm.errors import BadRequest, DiskFault, ToolchainFault, system_errors
from lospmm.families.warpgroups import ARCH
from lospmm.gpu.detect import detect_device, own_gpu, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.matrix.csr import SparseMatrix
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm.toolchain.data import data_of, has_data
from lospmm.toolchain.template import joined_emission
from lospmm.tuning.session import Session

#: Kind of the store's entries with the errors of a cubin's kernels that ran on a GPU, and their file.
JOINED, ERRORS_FILE = "joined", "errors.json"

#: Registers of a thread that a limit is a multiple of, and the most.
_REGISTER_UNIT, _MOST_REGISTERS = 8, 255


def joined(
    kernels: Sequence[Artifact], *, store: Store, session: Session | None = None, matrix: SparseMatrix | None = None
) -> list[Artifact]:
    """Return ``kernels``, in their order, with one cubin that has the code of all, and A once.

    Each keeps its name, launch and source. What was verified on a GPU is verified again on this machine's, unless the
    store knows this cubin, and is unverified where it has none like it. ``session`` is shared by several joins, one
    after the other; ``matrix`` is A if it is in memory.

    Raises BadRequest for kernels that differ in A's layout or have the same N, ToolchainFault, GpuFault and
    VerificationFailed.
    """
    if all(one.cubin == kernels[0].cubin for one in kernels):
        return list(kernels)
    data = _shared_data(kernels)
    parts = [(one.manifest["name"], one.source.decode(), _limit(one.manifest["registers"])) for one in kernels]
    arch = kernels[0].manifest["arch"]
    emission = joined_emission(parts, data, is_specific=arch == f"sm_{ARCH}")
    binary = compile_kernel(emission, arch=arch, registers=_MOST_REGISTERS, store=store, workers=1)
    on_gpu = [one for one in kernels if _is_verified_on_gpu(one)]
    digest = hashlib.sha256(binary.cubin).hexdigest()
    key = hashlib.sha256(" ".join([digest, *(one.manifest["name"] for one in on_gpu)]).encode()).hexdigest()
    if (known := store.get(JOINED, key)) is not None:
        errors = json.loads(known[ERRORS_FILE])
    elif errors := _errors(on_gpu, binary.cubin, store, session, matrix):
        with suppress(ToolchainFault):  # if the disk is full, it is verified again
            store.put(JOINED, key, {ERRORS_FILE: json.dumps(errors).encode()})
    return [_with_cubin(one, binary, digest, errors) for one in kernels]


def _limit(registers: int) -> int:
    return min(_MOST_REGISTERS, -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT)


def _shared_data(kernels: Sequence[Artifact]) -> bytes:
    """Return the data that all ``kernels`` read. Raises BadRequest."""
    names = [one.manifest["name"] for one in kernels]
    if len(set(names)) < len(names):
        raise BadRequest(f"{max(names, key=names.count)} is given twice: give one kernel for each N")
    for field in ("arch", "dtype", "fingerprint", "epilogue"):
        if len(found := {json.dumps(one.manifest[field]) for one in kernels}) > 1:
            raise BadRequest(f"the kernels differ in {field}: {' and '.join(sorted(found))}")
    with suppress(ToolchainFault):  # A is in the instructions
        data = data_of(kernels[0].cubin)
        if all(has_data(one.cubin, data) for one in kernels[1:]):
            return data
    raise BadRequest(f"{', '.join(names)} store A in different layouts: tune each with memory low")


def _is_verified_on_gpu(kernel: Artifact) -> bool:
    verified = kernel.manifest["verified"]
    return verified is not None and verified["on"] == "gpu"


def _with_cubin(kernel: Artifact, binary: Binary, digest: str, errors: Mapping[str, float]) -> Artifact:
    """Return a kernel with another cubin; ``errors`` has those that ran on a GPU, by name."""
    name = kernel.manifest["name"]
    usage = elf.kernel_usage(binary.cubin, name)
    changed: dict[str, object] = {
        "cubin_sha256": digest,
        "toolchain": binary.toolchain,
        "registers": usage.registers,
        "spill_bytes": binary.spill_bytes,
        "code_bytes": binary.code_bytes,
    }
    if _is_verified_on_gpu(kernel):
        changed["verified"] = None
        if name in errors:
            changed["verified"] = {"on": "gpu", "max_relative_error": errors[name], "columns": kernel.manifest["n"]}
    manifest = json.dumps({**kernel.manifest, **changed}, indent=2) + "\n"
    files = kernel.files | {CUBIN_FILE: binary.cubin, MANIFEST_FILE: manifest.encode()}
    return Artifact(parse(files[MANIFEST_FILE], f"kernel {name}, joined"), files)


def _errors(
    kernels: Sequence[Artifact], cubin: bytes, store: Store, session: Session | None, matrix: SparseMatrix | None
) -> dict[str, float]:
    """Return the errors of ``kernels`` of ``cubin``, run on this machine's GPU in one process, by name.

    Nothing where it has none like theirs. Raises VerificationFailed and GpuFault.
    """
    gpu = detect_device() if kernels and own_gpu() else None
    if gpu is None or gpu.arch != kernels[0].manifest["arch"]:
        return {}
    matrix, found = matrix or kernels[0].matrix(), {}
    with ExitStack() as stack:
        shop = stack.enter_context(Session(1)) if session is None else session
        stack.enter_context(exclusive(store.root, gpu=own_gpu_id()))
        with system_errors(DiskFault, f"{tempfile.gettempdir()}: cannot be written"):
            file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lospmm-")), CUBIN_FILE)
            file.write_bytes(cubin)  # once, not through the worker's pipe for each
        for kernel in reversed(kernels):  # the worker has the last one's problem
            bench, name = shop.bench(kernel.problem(gpu, matrix), None), kernel.manifest["name"]
            found[name] = bench.error_of(file, name, kernel.launch, f"{name}, joined")
    return found
