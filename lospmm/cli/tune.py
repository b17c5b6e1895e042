"""``lospmm tune``: the kernel of one matrix into a folder, on this machine or by a service."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from lospmm.artifact import artifact, kept
from lospmm.cli.client import open_client
from lospmm.cli.options import (
    BiasOption,
    LayerColumnsOption,
    MatrixArgument,
    TensorOption,
    Tuning,
    note_of_elements,
    out_option,
    tunes,
)
from lospmm.cli.show import show_manifest
from lospmm.gpu.detect import device_of
from lospmm.matrix import readers
from lospmm.model.layer_table import Bias, LayerSpec
from lospmm.progress import reported, tell
from lospmm.tuning import jobs
from lospmm.tuning.request import Request


@tunes
def tune(
    matrix: MatrixArgument,
    out: Annotated[Path, out_option("Folder to write the kernel to.")],
    n: LayerColumnsOption = None,
    bias: BiasOption = None,
    tensor: TensorOption = None,
    *,
    tuning: Tuning,
) -> None:
    """Search for the fastest kernel for C = A x B, and write it to a folder."""
    numbers = None if bias is None else readers.read_bias(bias)
    row, quiet = LayerSpec(n=n, **tuning.layer), tuning.quiet
    artifact.check_target(out)
    if tuning.address is not None:
        done = _tuned_there(matrix, tensor, row, numbers, tuning)
    else:
        gpu, file = device_of(tuning.device), readers.read(matrix, tensor=tensor, seed=tuning.seed)
        done = _tuned_here(row.request(file, numbers, gpu, tuning.options, tuning.seed), quiet=quiet)
        _note_of_zeros(file)
        note_of_elements(file, tuning.options.dtype)
    artifact.write(done, out)
    show_manifest(done.manifest, out, as_json=tuning.as_json)
    if not (quiet or tuning.as_json):
        tell(f"next: lospmm bench {out}, on a machine with the GPU {done.manifest['device']}")


def _tuned_there(matrix: Path, tensor: str | None, row: LayerSpec, bias: Bias, tuning: Tuning) -> artifact.Artifact:
    """Tune by the service."""
    with open_client(tuning) as client, reported(quiet=tuning.quiet) as progress:
        return client.tune(
            matrix,
            row.columns,
            device=tuning.device,
            convolution=row.convolution,
            bias=bias,
            relu=row.relu,
            residual=row.residual,
            tensor=tensor,
            transpose=row.transpose,
            seed=tuning.seed,
            progress=progress,
            **asdict(tuning.options),
        ).artifact


def _tuned_here(request: Request, *, quiet: bool) -> artifact.Artifact:
    """Tune on this machine; note a kernel from the cache, whose timings are from an earlier run."""
    store, stages = kept.open_store(), set()
    with reported(quiet=quiet) as progress:

        def watched(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            progress(stage, done, total)

        done = jobs.tune(request, store=store, progress=watched)
    if not stages and not quiet:  # nothing had to be done
        tell(f"note: cached in {store.root}; timings are from the earlier run")
    return done


def _note_of_zeros(file: readers.MatrixFile) -> None:
    """Note weights without zeros, likely from before the pruning, and weights that are all zero."""
    matrix = file.matrix
    if matrix.nnz == matrix.m * matrix.k > 1:
        tell("note: no weight is 0; if the layer was pruned, its mask is not in these weights")
    elif matrix.nnz == 0:
        tell("note: all weights are 0")
