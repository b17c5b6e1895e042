"""The library's face: ``tune`` a weight matrix into a ``Kernel``, ``load`` one, run its text without a GPU."""

import copy
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import narrowed
from lospmm.cpu import execute
from lospmm.cpu.block import execute_packed
from lospmm.cpu.geometry import Geometry
from lospmm.errors import BadMatrix, BadRequest, Unsupported
from lospmm.families.packed import PackedKernel
from lospmm.gpu.detect import detect_device
from lospmm.gpu.launcher import Launcher
from lospmm.gpu.libraries.dense import CublasKernel
from lospmm.gpu.protocol import Driver
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, check_shape, from_coo, from_dense
from lospmm.matrix.readers import Values
from lospmm.problem.convolution import Convolution, unfold
from lospmm.problem.device import find_device
from lospmm.problem.dtype import dtype_named
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.lanes import lanes_stored
from lospmm.problem.problem import Launch, Problem, ceil_div, columns_of
from lospmm.toolchain.cubin import machine_code
from lospmm.toolchain.data import data_of
from lospmm.tuning import jobs
from lospmm.tuning.options import ARGUMENTS, options_of
from lospmm.tuning.request import Request

#: A, (m, k). A dense array is pruned already: its zeros are what is left out.
Matrix: TypeAlias = NDArray[np.floating] | scipy.sparse.sparray | scipy.sparse.spmatrix | SparseMatrix

#: The same, or the path of a matrix file.
Weights: TypeAlias = Matrix | str | os.PathLike[str]

#: The runtimes hold some ten numbers of each thread that they run together: a few hundred megabytes for so many.
_THREADS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, repr=False)
class Kernel:
    """A tuned kernel: C (m, n) = A (m, k) x B (k, n) with A in its code, or a convolution with A's weights.

    A bias and ReLU may be in its code too, and a residual among its arguments.
    """

    artifact: Artifact

    @property
    def manifest(self) -> Mapping[str, Any]:
        """manifest.json; docs/manifest.md says what each field means. A copy: what it says cannot be changed."""
        return copy.deepcopy(dict(self.artifact.manifest))

    @property
    def cubin(self) -> bytes:
        """The machine code, as ``cuModuleLoadData`` takes it."""
        return self.artifact.cubin

    @property
    def source(self) -> str:
        """The text that the cubin was made of, PTX or CUDA C++, or the listing of its machine code."""
        return self.artifact.source.decode()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write all files to a folder: a new or an empty one, or one that holds a kernel, which is replaced.

        Raises BadRequest for any other folder, ToolchainFault where the disk fails.
        """
        artifact.write(self.artifact, path_of(directory))

    def launcher(self, driver: Driver) -> Launcher | CublasKernel:
        """What puts it on a stream, again and again: ``launch(stream, b, c, residual=0)``, all of them addresses.

        That is cuBLAS where the family is "dense", and else the cubin. ``driver`` (``gpu.driver.open_driver``) is the
        GPU, in whose context it is used, such as torch's; it holds what stays there until ``unload``.

        Raises GpuFault, also where there is no cuBLAS and one is needed.
        """
        manifest = self.artifact.manifest
        if manifest["dense"] is not None:
            return CublasKernel(self.artifact.matrix(), manifest["n"], dtype_named(manifest["dtype"]), driver)
        return Launcher(self.cubin, manifest["name"], self.launch())

    def launch(self, columns: int | None = None) -> Launch:
        """How the cubin is started; with ``columns``, for so many of the first columns of C, 1 to n, alone.

        So one kernel serves every number of columns up to its n, in as many blocks as these need. B, C and the residual
        keep rows of n elements, and what lies behind the columns may be anything: of the last block's it is computed
        with, and written. Of a convolution a column is a pixel of the output, all of an image before the next one's.

        Raises BadRequest for a number that is none, Unsupported for a family whose blocks have no columns of their own.
        """
        manifest = self.artifact.manifest
        shape, tile = manifest["launch"], manifest["tile"]
        whole = Launch(tuple(shape["grid"]), shape["block"], shape["shared_bytes"])
        if columns is None:
            return whole
        if tile is None:
            raise Unsupported(f"family {manifest['family']}: some columns alone; launch it for all {manifest['n']}")
        if not 1 <= (count := whole_number("columns", columns)) <= manifest["n"]:
            raise BadRequest(f"columns is {count}: this kernel has 1 to {manifest['n']}")
        return narrowed(whole, ceil_div(count, tile["thread_columns"] * tile["walks"]))

    def run_on_cpu(self, b: NDArray[np.floating], residual: NDArray[np.floating] | None = None) -> NDArray[np.float32]:
        """C (m, n) of ``b`` (k, n), rounded to float32, by running the shipped text on the CPU; no GPU is needed.

        Of a convolution, ``b`` is the input (batch, channels, height, width), and the result is (batch, m, out_height,
        out_width). ``residual`` has the shape of the result, where the kernel takes one.

        Of the family "dense" that is the kernel in the cubin, which computes the same.

        It shows what the kernel computes, not how fast. Raises BadRequest for arrays of other shapes or not of real
        numbers, VerificationFailed where the text cannot be run, ToolchainFault where CUDA C++ finds no g++.
        """
        if self.artifact.manifest["plan"] is not None:
            return self._run_packed(b, residual)
        geometry, n = self._geometry(), self.artifact.manifest["n"]
        convolution = geometry.convolution
        elements = _float32("B", b, (geometry.k, n) if convolution is None else convolution.input_shape)
        shape = (geometry.m, n) if convolution is None else convolution.output_shape(geometry.m)
        if (residual is not None) != geometry.takes_residual:
            raise BadRequest(f"this kernel takes {'a' if geometry.takes_residual else 'no'} residual")
        third = None if residual is None else _float32("the residual", residual, shape)
        emission = self._emission()
        c = np.empty(shape, dtype=np.float32)
        step = max(1, _THREADS_AT_ONCE // geometry.block_rows)
        for start in range(0, geometry.n, step):
            words = geometry.together(np.arange(start, min(start + step, geometry.n)))
            columns = geometry.columns_of(words)
            own_b = elements[:, columns] if convolution is None else unfold(convolution, elements, columns)
            place = geometry.places_of_c(columns)
            own_third = None if third is None else third.reshape(-1)[place]
            c.reshape(-1)[place] = execute(emission, geometry, words, own_b, own_third)
        return c

    def _run_packed(self, b: NDArray[np.floating], residual: NDArray[np.floating] | None) -> NDArray[np.float32]:
        manifest, kernel = self.artifact.manifest, packed_kernel(self.artifact)
        m, k, n = (manifest[name] for name in ("m", "k", "n"))
        if (residual is not None) != kernel.takes_residual:
            raise BadRequest(f"this kernel takes {'a' if kernel.takes_residual else 'no'} residual")
        elements = _float32("B", b, (k, n))
        third = None if residual is None else _float32("the residual", residual, (m, n))
        return execute_packed(kernel, np.arange(n), elements, m=m, residual=third)

    def _geometry(self) -> Geometry:
        """The launch that the manifest describes; a kernel that is shipped has its n in its code."""
        manifest = self.artifact.manifest
        tile, dtype = manifest["tile"], dtype_named(manifest["dtype"])
        words = lanes_stored(dtype, tile["thread_columns"], tile["thread_words"])
        return Geometry(
            m=manifest["m"],
            k=manifest["k"],
            n=manifest["n"] // words.columns,
            cols=tile["cols"],
            block_rows=manifest["launch"]["grid"][1],
            grid=tuple(manifest["launch"]["grid"]),
            takes_n=False,
            convolution=self.artifact.convolution,
            takes_residual=manifest["epilogue"]["residual"],
            words=words,
            dtype=dtype,
            walks=tile["walks"],
            kept_bytes=manifest["launch"]["shared_bytes"] if tile["walks"] > 1 else 0,
        )

    def _emission(self) -> Emission:
        manifest = self.manifest
        machine = None
        if manifest["emitter"] == "sass":  # what runs is the code in the cubin, not its listing
            machine = machine_code(self.cubin, manifest["name"], manifest["arch"])
        return Emission(manifest["emitter"], manifest["name"], self.source, (self.source,), machine)

    def __repr__(self) -> str:
        return f"<Kernel {self.manifest['name']} for {self.manifest['device']} ({self.manifest['arch']})>"


def packed_kernel(kept: Artifact) -> PackedKernel:
    """The kernel that an artifact of a family with a template holds; A is in its cubin. Raises ToolchainFault."""
    manifest = kept.manifest
    launch = manifest["launch"]
    x, y, z = launch["grid"]
    return PackedKernel(
        entry=manifest["name"],
        source=kept.source.decode(),
        data=data_of(kept.cubin),
        launch=Launch((x, y, z), launch["block"], launch["shared_bytes"]),
        registers=manifest["registers"],
        cols=manifest["plan"]["cols"],
        dtype=dtype_named(manifest["dtype"]),
        takes_residual=manifest["epilogue"]["residual"],
    )


def tune(
    weights: Weights,
    n: int | None = None,
    *,
    device: str = "auto",
    convolution: Convolution | None = None,
    bias: Sequence[float] | NDArray[np.floating] | None = None,
    relu: bool = False,
    residual: bool = False,
    tensor: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Kernel:
    """The kernel for ``weights`` (m, k) and a B of ``n`` columns, from the store if it was tuned before.

    With a ``convolution`` B is taken from an input tensor instead, n is its output pixels, and ``weights`` may have the
    four axes of a layer's. ``bias`` (m,) and ``relu`` go into the kernel; with ``residual`` it takes a third argument
    of C's shape, which is added before ReLU.

    ``device`` names a GPU of the device table or a device file; auto is this machine's. ``tensor`` chooses from a
    .safetensors file, and ``seed`` draws the values of a file that is only a pattern. ``options`` are the fields of
    ``options.Options``, such as ``emitter="cuda"``.

    A sparse matrix is the same in any order of its entries and with or without explicit zeros, but an entry given
    twice is refused: sum duplicates first.

    Raises BadMatrix for weights that cannot be used, BadRequest and Unsupported for the rest of the request,
    NothingFits, ToolchainFault and VerificationFailed.
    """
    seed = whole_number("seed", seed)
    if not isinstance(convolution, Convolution | None):
        kind = type(convolution).__name__
        raise BadRequest(f"convolution is of type {kind}: give a lospmm.Convolution, or leave it out for a product")
    matrix, values = matrix_and_values(flattened(weights, convolution), tensor, seed)
    gpu = detect_device() if device == "auto" else find_device(str(device))
    columns = whole_number("n", columns_of(n, convolution))
    epilogue = epilogue_of(bias, relu=relu, residual=residual)
    problem = Problem(matrix, columns, gpu, convolution, epilogue)
    request = Request(problem, options_of(options, ARGUMENTS), values, seed)
    return Kernel(jobs.tune(request, store=jobs.open_store()))


def flattened(weights: Weights, convolution: Convolution | None) -> Weights:
    """(out_channels, channels, kernel_height, kernel_width) as A; other weights as they are.

    Raises BadMatrix for another window than the convolution's.
    """
    if convolution is None or not isinstance(weights, np.ndarray) or weights.ndim != 4:
        return weights
    wanted = (convolution.channels, convolution.kernel_height, convolution.kernel_width)
    if weights.shape[1:] != wanted:
        raise BadMatrix(f"weights of shape {weights.shape}: the convolution takes {(weights.shape[0], *wanted)}")
    return weights.reshape(len(weights), -1)


def whole_number(name: str, value: object) -> int:
    """A whole number, of NumPy or of Python. Raises BadRequest."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # of an array, too
        pass
    raise BadRequest(f"{name} is {value!r:.80}: give a whole number")


def load(directory: str | os.PathLike[str]) -> Kernel:
    """The kernel in a folder that ``Kernel.save`` or ``lospmm tune`` wrote. Raises BadRequest."""
    return Kernel(artifact.read(path_of(directory)))


def path_of(directory: str | os.PathLike[str]) -> Path:
    """Raises BadRequest for what is none."""
    if not isinstance(directory, str | os.PathLike):
        raise BadRequest(f"the directory is of type {type(directory).__name__}: give a path")
    return Path(directory)


def matrix_and_values(weights: Weights, tensor: str | None = None, seed: int = 0) -> tuple[SparseMatrix, Values]:
    """The matrix, and whether its values were drawn. Raises BadMatrix, BadRequest for a ``tensor`` of no file."""
    if not isinstance(tensor, str | None):
        raise BadRequest(f"tensor is {tensor!r:.80}: give the name of one")
    if isinstance(weights, str | os.PathLike):
        file = readers.read(Path(weights), tensor=tensor, seed=seed)
        return file.matrix, file.values
    if tensor is not None:
        raise BadRequest(f"tensor {tensor!r:.80} chooses from a .safetensors file; these weights are no file")
    return _matrix(weights), "stored"


def _matrix(weights: Matrix) -> SparseMatrix:
    if isinstance(weights, SparseMatrix):
        return weights
    if isinstance(weights, np.ma.MaskedArray):
        raise BadMatrix("weights are a masked array: fill what is masked with zeros first, as in weights.filled(0)")
    if isinstance(weights, np.ndarray):
        return from_dense(np.asarray(weights))  # np.matrix would index differently
    if scipy.sparse.issparse(weights):
        shape = check_shape(weights.shape)
        try:
            if weights.format in ("csr", "csc", "bsr"):
                weights.check_format(full_check=True)  # SciPy converts without looking, out of bounds if need be
            entries = weights.tocoo()
        except (ValueError, IndexError) as error:
            raise BadMatrix(f"SciPy refuses these weights: {error}") from None
        return from_coo(shape, entries.row, entries.col, entries.data)
    is_sparse = str(getattr(weights, "layout", "torch.strided")) != "torch.strided"  # a tensor of PyTorch
    hint = (
        f", as weights.detach().cpu().float(){'.to_dense()' * is_sparse}.numpy()" if hasattr(weights, "detach") else ""
    )
    some = f"a NumPy array{hint}, a SciPy sparse matrix, a lospmm.SparseMatrix or a path"
    raise BadMatrix(f"weights of type {type(weights).__name__}: give {some}")


def _float32(name: str, array: NDArray[np.floating], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """What a kernel is given, rounded to float32. Raises BadRequest."""
    if not isinstance(array, np.ndarray):
        raise BadRequest(f"{name} is of type {type(array).__name__}; give a NumPy array")
    if isinstance(array, np.ma.MaskedArray):
        raise BadRequest(f"{name} is a masked array; fill what is masked first, as in {name.lower()}.filled(0)")
    if array.shape != shape:
        raise BadRequest(f"{name} has the shape {array.shape}; this kernel takes {shape}")
    if array.dtype.kind not in "fiub":
        raise BadRequest(f"{name} of type {array.dtype} does not hold real numbers")
    with np.errstate(over="ignore"):
        elements = np.ascontiguousarray(array, dtype=np.float32)
    if np.any(np.isinf(elements) & np.isfinite(array)):
        raise BadRequest(f"{name} holds numbers that are too large for float32")
    return elements
