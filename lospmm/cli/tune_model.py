"""``lospmm tune-model``: tune every layer of a model, on this machine or by a service."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from lospmm.artifact import kept
from lospmm.cli.client import fetch_layers, open_client
from lospmm.cli.options import (
    MIN_SPARSITY,
    BiasesOption,
    LayersOption,
    MinSparsityOption,
    Tuning,
    note_of_elements,
    out_option,
    say,
    tunes,
)
from lospmm.cli.output import print_json, print_table
from lospmm.errors import BadRequest, LospmmError
from lospmm.gpu.detect import device_of
from lospmm.matrix.layers import Found, open_model
from lospmm.matrix.readers import VECTOR, MatrixFile
from lospmm.model.batch import join_layers, tune_here
from lospmm.model.folder import Batch, ModelFolder, alone_in
from lospmm.model.layer_table import ANY, LayerKernel, LayerSpec, LayerTable, columns_in, keys_given, read_table
from lospmm.model.report import LayerReport, table
from lospmm.progress import kernels_told, reported
from lospmm.stages import Progress


@partial(tunes, cache="network")
def tune_model(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A .safetensors, .onnx or .pt, or a folder of matrix files."),
    ],
    out: Annotated[Path, out_option("Folder to write; it gets a folder per layer.")],
    layers: LayersOption = None,
    n: Annotated[
        str | None,
        typer.Option("--n", metavar="<int,...>", help="Columns of B, as 8 or 1,8,512; needed without --conv."),
    ] = None,
    biases: BiasesOption = False,
    min_sparsity: MinSparsityOption = MIN_SPARSITY,
    *,
    tuning: Tuning,
) -> None:
    """Tune a kernel for every pruned layer of a model; write a folder per layer, and report.json.

    --layers gives each layer its own N or convolution; `lospmm layers` writes such a table.
    """
    own, quiet = {"n": None if n is None else columns_in(n), "bias": biases, **tuning.layer}, tuning.quiet
    table = replace(_table(layers, own), min_sparsity=min_sparsity)
    batch = Batch(open_model(model, seed=tuning.seed), table, tuning.device, tuning.options, tuning.seed)
    batch.check()
    if biases:
        batch.model.check_biases()
    with alone_in(out):
        folder = (_tuned_here if tuning.address is None else partial(_tuned_there, tuning))(batch, out, quiet=quiet)
        folder.check()
        apart: Mapping[str, LospmmError] = {}
        if tuning.options.memory == "low":
            store, heard = kept.open_store(), lambda name: say(quiet=quiet)(f"join: {name}")
            apart = join_layers(folder, batch, store=store, heard=heard)
    _show(folder, as_json=tuning.as_json)
    if any(layer.launch is not None for layer in folder.report.layers):
        say(quiet=quiet or tuning.as_json)(
            f"next: lospmm.nn.load_(model, {str(out)!r}) or lospmm.load_model({str(out)!r}) in Python"
        )
    if apart:
        first = next(iter(apart.values()))
        say(quiet=False)(f"error: kernels of several N are whole, but not joined, of {_listed([*apart])}: {first}")
    if status := folder.report.exit_code or max((error.exit_code for error in apart.values()), default=0):
        raise typer.Exit(status)


def _table(path: Path | None, own: Mapping[str, Any]) -> LayerTable:
    """Return the table in a file, or that of the options of all layers. Raises BadRequest."""
    if path is None:
        if own["n"] is own["conv"] is None:
            raise BadRequest("n is missing: give --n, --conv or --layers, whose table `lospmm layers` writes")
        return LayerTable({ANY: LayerSpec(**own)})
    if given := keys_given(own):
        flags = ", ".join(f"--{'biases' if key == 'bias' else key}" for key in given)
        raise BadRequest(f"--layers gives these of each layer: leave out {flags}")
    return read_table(path)


def _tuned_here(batch: Batch, out: Path, *, quiet: bool) -> ModelFolder:
    gpu = device_of(batch.device)
    batch.check_here(gpu)
    batch = replace(batch, device=gpu.name, model=replace(batch.model, read=partial(_noted, batch)))
    folder = _opened(out, batch, quiet=quiet)
    names = [kernel.name for kernel in batch.kernels]
    begin = kernels_told(len(names), say=say(quiet=quiet))

    @contextmanager
    def watch(kernel: LayerKernel) -> Iterator[Progress]:
        begin(names.index(kernel.name), kernel.name)
        with reported(quiet=quiet, ends=False) as progress:
            yield progress

    tune_here(folder, batch, gpu, store=kept.open_store(), watch=watch)
    return folder


def _opened(out: Path, batch: Batch, *, quiet: bool) -> ModelFolder:
    """Open the model's folder; note convolutions that get kernels of products."""
    folder = ModelFolder(out, batch, _say_failure)
    products = [one.layer for one in batch.kernels if batch.model.axes.get(one.layer) == 4 and one.row.conv is None]
    if found := list(dict.fromkeys(products)):
        said = f"note: kernels of products for the 4-D weights {_listed(found)}, which lospmm.nn.load_ cannot use"
        say(quiet=quiet)(f"{said}: `lospmm layers` writes a table of convolutions for --layers")
    return folder


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _noted(batch: Batch, wanted: Collection[str]) -> Iterator[tuple[str, Found]]:
    """Yield the layers; note weights of 16 bits by the first that can be read."""
    is_new = True
    for name, found in batch.model.read(wanted):
        if is_new and isinstance(found, MatrixFile):
            note_of_elements(found, batch.table.row_of(name).options(batch.options).dtype)
            is_new = False
        yield name, found


def _tuned_there(tuning: Tuning, batch: Batch, out: Path, *, quiet: bool) -> ModelFolder:
    with open_client(tuning) as client:
        folder = _opened(out, batch, quiet=quiet)
        begin, numbers = kernels_told(len(batch.kernels), say=say(quiet=quiet)), count()
        begin_once = cache(lambda name: begin(next(numbers), name))
        fetch_layers(client, folder, batch, lambda name, *_: begin_once(name))
    return folder


def _show(folder: ModelFolder, *, as_json: bool) -> None:
    report = folder.report
    if as_json:
        print_json(asdict(report))
        return
    heads = ("layer", "N", "shape", "sparsity", "us", "dense us", "advice")
    rows = table([layer for layer in report.layers if layer.skipped != VECTOR])
    print_table(heads, rows, numbers=("N", "sparsity", "us", "dense us"))
    for total in report.totals:
        print(total)


def _say_failure(layer: LayerReport) -> None:
    """Print the failure of a layer, also with --quiet."""
    if layer.error is not None:
        say(quiet=False)(f"error: layer {layer.kernel}: {layer.error.message}")
