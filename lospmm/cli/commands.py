"""The commands. Each raises LospmmError for what a user got wrong; ``cli.py`` makes it a line and an exit code."""

import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from lospmm.artifact import artifact
from lospmm.cli.options import (
    BiasOption,
    BudgetOption,
    CacheOption,
    ColumnsOption,
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
    QuietOption,
    RankerOption,
    ReluOption,
    ResidualOption,
    SeedOption,
    ServerOption,
    ShortlistOption,
    SumsOption,
    TensorOption,
    TrialsOption,
    VerifyOption,
    chosen_server,
    options_for,
    out_option,
)
from lospmm.cli.output import print_json
from lospmm.cli.show import show_comparison, show_entries, show_manifest, show_replay, show_space
from lospmm.cli.train_ranker import train_ranker
from lospmm.cli.tune_model import open_client, tune_model
from lospmm.codegen import check_target
from lospmm.errors import BadRequest, ToolchainFault, VerificationFailed
from lospmm.gpu.compare import bench_artifact
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import CACHE_STATES
from lospmm.matrix import readers
from lospmm.problem.convolution import parse_convolution
from lospmm.problem.device import DEVICES, DeviceSpec, find_device
from lospmm.problem.dtype import DTYPES, FLOAT32
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem, columns_of
from lospmm.progress import reported
from lospmm.settings import settings
from lospmm.stages import Stages
from lospmm.tuning import history as timings
from lospmm.tuning import jobs
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import Options, check_choice, is_experimental, splits_of
from lospmm.tuning.replay import replay as replayed
from lospmm.tuning.request import Request
from lospmm.tuning.search import explore_problem
from lospmm.version import __version__

if TYPE_CHECKING:
    from lospmm_server.database import Database

app = typer.Typer(
    help="Fully unrolled SpMM kernels for pruned neural networks: tune, inspect, serve.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The store of compiled units and tuned kernels.")
app.add_typer(cache_app, name="cache")
keys_app = typer.Typer(help="The API keys of the service, for addresses that other machines can reach.")
app.add_typer(keys_app, name="keys")


@app.command()
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
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    server: ServerOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make the fastest kernel for C = A x B that is found, and write it to a folder."""
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
    convolution = None if conv is None else parse_convolution(conv)
    numbers = None if bias is None else readers.read_bias(bias)
    columns = columns_of(n, convolution)
    artifact.check_target(out)
    if address is not None:
        layer = {"convolution": convolution, "bias": numbers, "relu": relu, "residual": residual}
        more = {"device": device, "tensor": tensor, "seed": seed, **layer, **asdict(options)}
        with open_client(address, key, quiet=quiet) as client, reported(quiet=quiet) as progress:
            done = client.tune(matrix, columns, progress=progress, **more).artifact
        artifact.write(done, out)
    else:
        file, plain = _problem(matrix, columns, device, tensor, seed)
        problem = replace(plain, convolution=convolution, epilogue=epilogue_of(numbers, relu=relu, residual=residual))
        done = _tuned_here(Request(problem, options, file.values, seed), out, quiet=quiet)
        _note_of_zeros(file)
        _note_of_elements(file, dtype)
    show_manifest(done.manifest, out, as_json=as_json)
    _warn_of_experiments(done)


def _tuned_here(request: Request, out: Path, *, quiet: bool) -> artifact.Artifact:
    """Its figures may be of before, which is said."""
    store, stages = jobs.open_store(), set()
    with reported(quiet=quiet) as progress:

        def watched(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            progress(stage, done, total)

        done = jobs.tune_to_folder(request, out, store=store, progress=watched)
    if not stages and not quiet:  # nothing had to be done
        print(f"note: tuned before: the kernel and its figures are of then, from {store.root}", file=sys.stderr)
    return done


def _note_of_zeros(file: readers.MatrixFile) -> None:
    """Weights of which none is 0 are likely those of before the pruning."""
    matrix = file.matrix
    if matrix.nnz == matrix.m * matrix.k > 1:
        print("note: no weight is 0; if the layer was pruned, its mask is not in these weights", file=sys.stderr)
    elif matrix.nnz == 0:
        print("note: all weights are 0", file=sys.stderr)


def _note_of_elements(file: readers.MatrixFile, dtype: str) -> None:
    """B and C are float32 by default; weights of 16 bits may be meant for others, which take half of the time."""
    weights = file.matrix.data
    if dtype != FLOAT32.name or file.values != "stored" or (weights == np.rint(weights)).all():
        return
    for one in (DTYPES["bfloat16"], DTYPES["float16"]):  # most of the former are of the latter too
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(one.rounded(weights), weights)
        if is_exact:
            note = f"note: all weights are {one.name}; B and C are float32 unless --dtype {one.name} says otherwise"
            print(note, file=sys.stderr)
            return


def _warn_of_experiments(made: artifact.Artifact) -> None:
    if is_experimental(made.manifest["emitter"], arch := made.manifest["arch"]):
        note = f"note: machine code for {arch} is experimental, never run on a GPU: check what it computes"
        print(note, file=sys.stderr)


app.command("tune-model")(tune_model)
app.command("train-ranker")(train_ranker)


@app.command()
def space(
    matrix: MatrixArgument,
    n: ColumnsOption,
    device: DeviceOption = "auto",
    emitter: EmitterOption = "auto",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the space as Figure 3 does (.png .svg .pdf).")
    ] = None,
    tensor: TensorOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Count the tile sizes that each constraint removes, and those that are left to `lospmm tune`."""
    _, problem = _problem(matrix, n, device, tensor, seed)
    arch = problem.device.arch
    language = Options(emitter=emitter).resolved(problem.device, None).emitter
    check_target(language, arch)
    if plot is not None:
        from lospmm.cli.plot import (  # matplotlib takes longer to import than a space to explore
            check_format,
            plot_space,
        )

        check_format(plot)
    with reported(quiet=quiet) as progress:
        found = explore_problem(for_emitter(problem, language), Stages(progress), splits=splits_of(language, arch))
    if plot is not None:
        plot_space(problem, found, plot)
    show_space(problem, language, found, as_json=as_json)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    as_json: JsonOption = False,
) -> None:
    """What an artifact holds; its cubin, its matrix and its bias are checked against the manifest."""
    kept = artifact.read(directory)
    kept.matrix()
    kept.epilogue()
    show_manifest(kept.manifest, directory, as_json=as_json)


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    device: Annotated[str, typer.Option("--device", help="A device file, where the kernel was tuned for one.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Make the choice of a kernel again from its log, without a GPU; exit status 5 if it comes out otherwise."""
    kept = artifact.read(directory)
    if not device and kept.manifest["device"] not in DEVICES:
        raise BadRequest(f"{directory}: tuned for {kept.manifest['device']!r}, of a device file: name it by --device")
    found = replayed(kept, find_device(device or kept.manifest["device"]))
    if as_json:
        print_json({"agrees": found.agrees, "timed": found.timed, "winner": found.winner, "built": found.built})
    else:
        show_replay(found)
    if not found.agrees:
        raise typer.Exit(VerificationFailed.exit_code)


@app.command()
def bench(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `lospmm tune` wrote.")],
    cache: CacheOption = "cold",
    warm: Annotated[bool, typer.Option("--warm", help="The same as --cache warm.")] = False,
    device: Annotated[str, typer.Option("--device", help="What this machine's GPU is, or auto.")] = "auto",
    sputnik: Annotated[
        Path | None, typer.Option("--sputnik", help="A shared library of Sputnik to time too (LOSPMM_SPUTNIK).")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time a kernel beside cuSPARSE and cuBLAS on this machine's GPU."""
    check_choice("cache", cache)
    if warm and cache == "network":
        raise BadRequest("--warm is --cache warm: leave one of --warm and --cache network out")
    state = CACHE_STATES["warm" if warm else cache]
    kept = artifact.read(directory)
    gpu = _own_gpu() if device == "auto" else find_device(device)
    with reported(quiet=quiet) as progress:
        found = bench_artifact(kept, gpu, cache=state, sputnik=sputnik or settings().sputnik, progress=progress)
    show_comparison(found, kept.manifest, as_json=as_json)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Workers to run beside it; 0: they run elsewhere.")] = 1,
) -> None:
    """The REST service: POST a pruned matrix or a model, get cubins."""
    from lospmm_server import main  # only the commands of the service need a web framework

    # The service ends in its own orderly way, and then by the same signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main.serve(host, port, workers)


@app.command()
def worker(
    name: Annotated[str, typer.Option("--name", help="What it is called in logs; must be its own.")] = "",
    parent: Annotated[int | None, typer.Option("--parent", help="A process to end with, by its id.")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster to tune on: HOST:PORT, or auto.")
    ] = None,
) -> None:
    """Tune what the service has accepted, with the same database and cache."""
    from lospmm_server import main

    main.work(name, parent, ray)


@keys_app.command("add")
def keys_add(name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]) -> None:
    """Make an API key and print it: it is shown this once."""
    from lospmm_server import keys

    print(keys.add(_service_database(), name))


@keys_app.command("ls")
def keys_list(as_json: JsonOption = False) -> None:
    """The names of the API keys in the database; the keys themselves are kept nowhere."""
    from lospmm_server import keys

    found = keys.listed(_service_database())
    if as_json:
        print_json({"keys": [{"name": key.name, "created": f"{key.created}", "valid": key.is_valid} for key in found]})
        return
    for key in found:
        print(f"{key.name}  {key.created:%Y-%m-%d}  {'valid' if key.is_valid else 'revoked'}")


@keys_app.command("revoke")
def keys_revoke(name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]) -> None:
    """Take an API key back, within seconds and for good."""
    from lospmm_server import keys

    keys.revoke(_service_database(), name)


@cache_app.command("ls")
def cache_list(as_json: JsonOption = False) -> None:
    """The entries of the store, the last used first."""
    entries = sorted(jobs.open_store().entries(), key=lambda entry: -entry.used)
    show_entries(entries, f"{settings().cache_dir}", as_json=as_json)


@cache_app.command("prune")
def cache_prune(
    max_megabytes: Annotated[
        int | None, typer.Option("--max-mb", min=0, help="Keep the last used, up to so much.")
    ] = None,
    days: Annotated[
        float | None, typer.Option("--older-than-days", min=0, help="Remove what was not used for so long.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove entries of the store, the least recently used first."""
    removed = jobs.open_store().prune(
        max_bytes=None if max_megabytes is None else max_megabytes << 20,
        older_than_seconds=None if days is None else days * 86_400,
    )
    show_entries(removed, "removed", as_json=as_json)


@cache_app.command("verify")
def cache_verify(as_json: JsonOption = False) -> None:
    """Check every entry of the store against its checksums; exit status 4 if any is corrupt."""
    store = jobs.open_store()
    corrupt = [*store.verify(), *timings.verify(store)]
    show_entries(corrupt, "corrupt, and built again when next asked for", as_json=as_json)
    if corrupt:
        raise typer.Exit(ToolchainFault.exit_code)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"lospmm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise BadRequest("name a command, such as tune; `lospmm --help` lists them")


def _service_database() -> "Database":
    from lospmm_server.database import open_database

    database = open_database()
    database.migrate()
    return database


def _own_gpu() -> DeviceSpec:
    try:
        return detect_device()
    except BadRequest:
        raise BadRequest(
            "bench runs kernels, and this machine has no NVIDIA GPU that the device table knows; "
            "where it has another, describe it in a file and name that with --device (docs/devices.md)"
        ) from None


def _problem(matrix: Path, n: int, device: str, tensor: str | None, seed: int) -> tuple[readers.MatrixFile, Problem]:
    gpu: DeviceSpec = detect_device() if device == "auto" else find_device(device)
    file = readers.read(matrix, tensor=tensor, seed=seed)
    return file, Problem(file.matrix, n, gpu)
