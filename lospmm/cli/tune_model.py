"""``lospmm tune-model``: every layer of a model into a folder of its own, on this machine or by a service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lospmm.cli.options import (
    BiasesOption,
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
    MeasureOption,
    QuietOption,
    RankerOption,
    ReluOption,
    ResidualOption,
    SeedOption,
    ServerOption,
    ShortlistOption,
    SumsOption,
    TrialsOption,
    VerifyOption,
    chosen_server,
    options_for,
    out_option,
    say,
)
from lospmm.cli.output import print_json, print_table
from lospmm.gpu.detect import detect_device, own_gpu
from lospmm.matrix.layers import open_model
from lospmm.matrix.readers import MatrixFile
from lospmm.model.batch import Batch, ModelFolder, take_results, tune_here
from lospmm.model.report import LayerReport, table
from lospmm.problem.convolution import parse_convolution
from lospmm.problem.device import find_device
from lospmm.problem.epilogue import Epilogue, epilogue_of
from lospmm.problem.problem import Problem, check_columns, columns_of
from lospmm.progress import reported
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

if TYPE_CHECKING:
    from lospmm.client.client import Client


def tune_model(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A .safetensors, or a folder of matrix files with a layer each.")
    ],
    out: Annotated[Path, out_option("The folder to put a folder for each layer in.")],
    n: LayerColumnsOption = None,
    conv: ConvolutionOption = None,
    biases: BiasesOption = False,
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
    seed: SeedOption = 0,
    server: ServerOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make a kernel for every layer of a model, each in a folder of its own, and report.json about all of them."""
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
    )
    convolution, epilogue = None if conv is None else parse_convolution(conv), Epilogue(None, relu, residual)
    columns = columns_of(n, convolution)
    check_columns(columns)
    batch = Batch(open_model(model, seed=seed), columns, device, convolution, epilogue)
    if biases:
        batch.model.check_biases()
    if address is None:
        folder = _tuned_here(batch, options, out, biases=biases, seed=seed, quiet=quiet)
    else:
        with open_client(address, key, quiet=quiet) as client:
            folder = _tuned_there(client, batch, options, out, biases=biases, seed=seed, quiet=quiet)
    _show(folder, as_json=as_json)
    if folder.report.exit_code:
        raise typer.Exit(folder.report.exit_code)


def open_client(address: str, key: str | None, *, quiet: bool) -> "Client":
    """For the service at ``address``, with ``key`` or the key of the settings; what it waits for is said on stderr."""
    from lospmm.client.client import Client  # HTTP takes a while to import

    return Client(address, key or settings().key, waits=say(quiet=quiet))


def _tuned_here(batch: Batch, options: Options, out: Path, *, biases: bool, seed: int, quiet: bool) -> ModelFolder:
    gpu = detect_device() if batch.device == "auto" else find_device(batch.device)
    options.resolved(gpu, own_gpu())  # what no layer can have is said once
    folder = ModelFolder(out, replace(batch, device=gpu.name), _say_failure)

    def request_of(file: MatrixFile) -> Request:
        epilogue = batch.epilogue
        if biases and (bias := file.bias) is not None:
            epilogue = epilogue_of(bias, relu=epilogue.relu, residual=epilogue.residual)
        problem = Problem(file.matrix, batch.n, gpu, batch.convolution, epilogue)
        return Request(problem, options, file.values, seed)

    @contextmanager
    def watch(name: str) -> Iterator[Progress]:
        say(quiet=quiet)(f"layer {batch.model.names.index(name) + 1} of {len(batch.model.names)}: {name}")
        with reported(quiet=quiet) as progress:
            yield progress

    tune_here(folder, batch.model, request_of, store=jobs.open_store(), watch=watch)
    return folder


def _tuned_there(
    client: "Client", batch: Batch, options: Options, out: Path, *, biases: bool, seed: int, quiet: bool
) -> ModelFolder:
    folder = ModelFolder(out, batch, _say_failure)
    results = client.each_layer(
        batch.model,
        batch.n,
        device=batch.device,
        convolution=batch.convolution,
        biases=biases,
        relu=batch.epilogue.relu,
        residual=batch.epilogue.residual,
        seed=seed,
        progress=None if quiet else _say_layer,
        has=lambda name, digest: folder.held(name, digest) is not None,
        **asdict(options),
    )
    take_results(folder, results)
    return folder


def _show(folder: ModelFolder, *, as_json: bool) -> None:
    report = folder.report
    if as_json:
        print_json(asdict(report))
        return
    heads = ("layer", "shape", "sparsity", "us", "dense us", "advice")
    print_table(heads, table(report.layers), numbers=("sparsity", "us", "dense us"))


def _say_layer(layer: str, stage: str, done: int, total: int) -> None:
    """A line for each stage that has ended, and for each state."""
    if (done, total) == (1, 1):
        say(quiet=False)(f"{layer}: {stage}")


def _say_failure(layer: LayerReport) -> None:
    """Also with --quiet: it is no progress."""
    if layer.error is not None:
        say(quiet=False)(f"error: layer {layer.name}: {layer.error.message}")
