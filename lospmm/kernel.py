"""The library's interface: ``tune`` weights into a ``Kernel``, ``load`` one, run it without a GPU."""

import copy
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.artifact import artifact, kept
from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest, Unsupported, extra_needed
from lospmm.gpu.detect import device_of
from lospmm.gpu.launcher import ArtifactLauncher, open_launcher
from lospmm.gpu.protocol import Driver
from lospmm.model.report import read_report
from lospmm.problem.convolution import Convolution
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div, columns_of
from lospmm.problem.weights import Weights, file_of, flattened


@dataclass(frozen=True, slots=True, repr=False)
class Kernel:
    """A tuned kernel: C (m, n) = A (m, k) x B (k, n) with A in its code, or a convolution with weights A.

    A bias and ReLU may be in its code too, and a residual among its arguments.
    """

    artifact: Artifact

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The fields of manifest.json (docs/manifest.md), in a copy."""
        return copy.deepcopy(dict(self.artifact.manifest))

    @property
    def cubin(self) -> bytes:
        """The machine code, as ``cuModuleLoadData`` takes it."""
        return self.artifact.cubin

    @property
    def source(self) -> str:
        """The PTX or CUDA C++ that the cubin was compiled from, or the listing of its machine code."""
        return self.artifact.source.decode()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write all files to a folder: a new or empty one, or one with a kernel, which is replaced.

        Raises BadRequest for any other folder, ToolchainFault where the disk fails.
        """
        artifact.write(self.artifact, path_of(directory))

    def launcher(self, driver: Driver) -> ArtifactLauncher:
        """Load the kernel for launches on any stream: ``launch(stream, b, c, residual=0)``, with addresses.

        The family "dense" launches cuBLAS, the others the cubin. ``driver`` (``gpu.driver.open_driver``) is the GPU;
        launches use its context, which PyTorch shares, and what was loaded stays there until ``unload``.

        Raises GpuFault, also if cuBLAS is needed and missing.
        """
        return open_launcher(self.artifact, driver)

    def launch(self, columns: int | None = None) -> Launch:
        """Return the grid, block and shared memory for the first ``columns`` of C, 1 to n; None: all.

        So one kernel serves any number of columns up to its n, in as many blocks as these need. B, C and the residual
        keep rows of n elements. B may hold anything after the columns; C may be overwritten there, as the last block
        writes all of its columns. In a convolution a column is a pixel of the output, image by image.

        Raises BadRequest for a number out of range, Unsupported for a family whose blocks are not bound to columns.
        """
        manifest = self.artifact.manifest
        tile, whole = manifest["tile"], self.artifact.launch
        if columns is None:
            return whole
        if tile is None:
            raise Unsupported(f"family {manifest['family']} computes all columns: launch it for all {manifest['n']}")
        if not 1 <= (count := whole_number("columns", columns)) <= manifest["n"]:
            raise BadRequest(f"columns is {count}: this kernel has 1 to {manifest['n']}")
        return whole.narrowed(ceil_div(count, tile["thread_columns"] * tile["walks"]))

    def run_on_cpu(self, b: NDArray[np.floating], residual: NDArray[np.floating] | None = None) -> NDArray[np.float32]:
        """Run the shipped text on the CPU: return C (m, n) of ``b`` (k, n), rounded to float32.

        Of a convolution, ``b`` is the input (batch, channels, height, width), and the result is (batch, m, out_height,
        out_width). ``residual`` has the shape of the result, where the kernel takes one.

        Of the family "dense" that is the kernel in the cubin, which computes the same.

        It shows what the kernel computes, not how fast. Raises BadRequest for arrays of other shapes or not of real
        numbers, VerificationFailed where the text cannot be run, ToolchainFault where CUDA C++ finds no g++.
        """
        from lospmm.cpu import shipped  # a program that runs kernels on a GPU needs no emulator

        return shipped.run(self.artifact, b, residual)

    def __repr__(self) -> str:
        """Return the kernel's name, device and architecture."""
        return f"<Kernel {self.manifest['name']} for {self.manifest['device']} ({self.manifest['arch']})>"


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
    """Tune a kernel for ``weights`` (m, k) and a B of ``n`` columns, or take it from the store.

    With a ``convolution`` B is taken from an input tensor instead, n is its output pixels, and ``weights`` may have the
    layer's four axes, or three as in ``nn.Conv1d``. ``bias`` (m,) and ``relu`` go into the kernel; with ``residual`` it
    takes a third argument of C's shape, which is added before ReLU.

    ``device`` names a GPU of the device table or a device file; auto is this machine's. ``tensor`` chooses from a
    .safetensors file, and ``seed`` draws the values of a file that is only a pattern. ``options`` are the fields of
    ``options.Options``, such as ``emitter="cuda"``.

    A sparse matrix is the same in any order of its entries and with or without explicit zeros, but an entry given
    twice is refused: sum duplicates first.

    Raises BadMatrix for weights that cannot be used, BadRequest and Unsupported for the rest of the request,
    NothingFits, ToolchainFault and VerificationFailed.
    """
    with extra_needed("tune", "lospmm.tune"):
        from lospmm.tuning import jobs, request

    seed = whole_number("seed", seed)
    if not isinstance(convolution, Convolution | None):
        kind = type(convolution).__name__
        raise BadRequest(f"convolution is of type {kind}: give a lospmm.Convolution, or leave it out for a product")
    file = file_of(flattened(weights, convolution), tensor, seed)
    gpu = device_of(str(device))
    columns = whole_number("n", columns_of(n, convolution))
    epilogue = epilogue_of(bias, relu=relu, residual=residual)
    problem = Problem(file.matrix, columns, gpu, convolution, epilogue)
    asked = request.request_of(problem, options, file.values, seed)
    return Kernel(jobs.tune(asked, store=kept.open_store()))


def join(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return ``kernels``, in their order, with one cubin that has the code of all, and A once.

    They must be kernels of one matrix for several N, tuned with ``memory="low"``. Load the cubin once, and get each
    kernel by its manifest's name.

    Raises BadRequest for other kernels, ToolchainFault, and GpuFault and VerificationFailed if they are verified again.
    """
    with extra_needed("tune", "lospmm.join"):
        from lospmm.tuning import one_copy

    return [Kernel(one) for one in one_copy.joined([one.artifact for one in kernels], store=kept.open_store())]


def whole_number(name: str, value: object) -> int:
    """Return a whole number of NumPy or Python as an ``int``. Raises BadRequest."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # of an array, too
        pass
    raise BadRequest(f"{name} is {value!r:.80}: give a whole number")


def load(directory: str | os.PathLike[str]) -> Kernel:
    """Load the kernel in a folder that ``Kernel.save`` or ``lospmm tune`` wrote. Raises BadRequest."""
    return Kernel(artifact.read(path_of(directory)))


def load_model(directory: str | os.PathLike[str]) -> dict[str, Kernel]:
    """Load the kernels in a folder that ``lospmm tune-model`` wrote, by the names of their layers.

    Those of a layer with kernels for several N have names like fc1.weight@8. Layers that failed or were skipped are
    left out; report.json says why. Raises BadRequest.
    """
    folder = path_of(directory)
    layers = [layer for layer in read_report(folder).layers if layer.launch is not None]
    return {layer.kernel: Kernel(artifact.read(folder / layer.folder)) for layer in layers}


def path_of(directory: str | os.PathLike[str]) -> Path:
    """Return a directory as a ``Path``. Raises BadRequest for anything but a path."""
    if not isinstance(directory, str | os.PathLike):
        raise BadRequest(f"the directory is of type {type(directory).__name__}: give a path")
    return Path(directory)
