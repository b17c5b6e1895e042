"""``lospmm tune``: the kernel of one matrix into a folder, on this machine or by a service."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np

from lospmm.artifact import artifact, kept
from lospmm.cli.client import open_client
from lospmm.cli.options import (
    BiasOption,
    BudgetOption,
    CacheOption,
    ConvolutionOption,
    DeviceOption,
    DtypeOption,
    EmitterOption,
    FamiliesOption,
    JsonOption,
    KeyOption,
    LayerColumnsOption,
    MatrixArgument,
    MeasureOption,
    MemoryOption,
    QuietOption,
    RankerOption,
    ReluOption,
    ResidualOption,
    SeedOption,
    ServerOption,
    ShortlistOption,
    SumsOption,
    TensorOption,
    TransposeOption,
    TrialsOption,
    ValuesOption,
    VerifyOption,
    chosen_server,
    options_for,
    out_option,
    read_problem,
)
from lospmm.cli.show import show_manifest
from lospmm.matrix import readers
from lospmm.model.layer_table import LayerSpec
from lospmm.problem.convolution import parse_convolution
from lospmm.problem.dtype import DTYPES, FLOAT32
from lospmm.problem.problem import columns_of
from lospmm.progress import reported, tell
from lospmm.tuning import jobs
from lospmm.tuning.options import is_experimental
from lospmm.tuning.request import Request


def tune(
    matrix: MatrixArgument,
    out: Annotated[Path, out_option("The folder to put the kernel in.")],
    n: LayerColumnsOption = None,
    conv: ConvolutionOption = None,
    bias: BiasOption = None,
    relu: ReluOption = False,
    residual: ResidualOption = False,
    device: DeviceOption = "auto",
    emitter: EmitterOption = "auto",
    ranker: RankerOption = "auto",
    shortlist: ShortlistOption = 10,
    measure: MeasureOption = "auto",
    trials: TrialsOption = "full",
    budget: BudgetOption = None,
    verify: VerifyOption = "auto",
    dtype: DtypeOption = "float32",
    sums: SumsOption = "float32",
    families: FamiliesOption = "all",
    cache: CacheOption = "cold",
    memory: MemoryOption = "fast",
    values: ValuesOption = "dtype",
    transpose: TransposeOption = False,
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    server: ServerOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Search for the fastest kernel for C = A x B, and write it to a folder."""
    options = options_for(
        address := chosen_server(server, key),
        emitter=emitter,
        ranker=ranker,
        measure=measure,
        verify=verify,
        trials=trials,
        dtype=dtype,
        sums=sums,
        families=families,
        shortlist_size=shortlist,
        budget_seconds=budget,
        cache=cache,
        memory=memory,
        values=values,
    )
    convolution = None if conv is None else parse_convolution(conv)
    numbers = None if bias is None else readers.read_bias(bias)
    columns = columns_of(n, convolution)
    artifact.check_target(out)
    if address is not None:
        layer = {"convolution": convolution, "bias": numbers, "relu": relu, "residual": residual}
        more = {"device": device, "tensor": tensor, "seed": seed, **layer, **asdict(options)}
        more["transpose"] = transpose
        with open_client(address, key, quiet=quiet) as client, reported(quiet=quiet) as progress:
            done = client.tune(matrix, columns, progress=progress, **more).artifact
        artifact.write(done, out)
    else:
        file, plain = read_problem(matrix, columns, device, tensor, seed)
        row = LayerSpec(n=columns, conv=conv, transpose=transpose, relu=relu, residual=residual)
        done = _tuned_here(row.request(file, numbers, plain.device, options, seed), out, quiet=quiet)
        _note_of_zeros(file)
        _note_of_elements(file, dtype)
    show_manifest(done.manifest, out, as_json=as_json)
    _warn_of_experiments(done)
    if not (quiet or as_json):
        tell(f"next: lospmm bench {out}, on a machine with the GPU {done.manifest['device']}")


def _tuned_here(request: Request, out: Path, *, quiet: bool) -> artifact.Artifact:
    """Tune on this machine; note a kernel from the cache, whose timings are from an earlier run."""
    store, stages = kept.open_store(), set()
    with reported(quiet=quiet) as progress:

        def watched(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            progress(stage, done, total)

        done = jobs.tune_to_folder(request, out, store=store, progress=watched)
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


def _note_of_elements(file: readers.MatrixFile, dtype: str) -> None:
    """Note weights of 16 bits: B and C of that type, in place of the default float32, may halve the time."""
    weights = file.matrix.data
    if dtype != FLOAT32.name or file.values != "stored" or (weights == np.rint(weights)).all():
        return
    for one in (DTYPES["bfloat16"], DTYPES["float16"]):  # bfloat16 first: most of its weights are float16 too
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(one.rounded(weights), weights)
        if is_exact:
            note = f"note: all weights are {one.name}; B and C are float32 unless --dtype {one.name} says otherwise"
            tell(note)
            return


def _warn_of_experiments(made: artifact.Artifact) -> None:
    if is_experimental(made.manifest["emitter"], arch := made.manifest["arch"]):
        note = f"note: machine code for {arch} is experimental, never run on a GPU: check its results"
        tell(note)
