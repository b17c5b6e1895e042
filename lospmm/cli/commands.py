"""The commands of ``lospmm``; ``main.py`` makes their errors a line and an exit code.

A command's module takes up to two seconds to import, so it is imported where the command is run: ``--help`` lists all
of them by ``COMMANDS`` alone.
"""

from collections.abc import Collection
from importlib import import_module
from typing import Annotated, NamedTuple, NoReturn

import typer

from lospmm.errors import BadRequest
from lospmm.progress import tell
from lospmm.settings import unknown_variables
from lospmm.version import __version__


class Command(NamedTuple):
    """Where a command is, as "module:name" of this package, and its line in ``--help``, its docstring's first."""

    place: str
    summary: str


COMMANDS = {
    "tune": Command("tune:tune", "Search for the fastest kernel for C = A x B, and write it to a folder."),
    "tune-model": Command(
        "tune_model:tune_model",
        "Tune a kernel for every pruned layer of a model; write a folder per layer, and report.json.",
    ),
    "layers": Command(
        "layers:layers",
        "Write N or the convolution of each layer of a model, for `lospmm tune-model --layers`.",
    ),
    "train-ranker": Command(
        "train_ranker:train_ranker", "Train a rank model on measured kernels; with --collect, measure them first."
    ),
    "space": Command(
        "space:space",
        "Count the tile sizes that each constraint removes, and those that are left to `lospmm tune`.",
    ),
    "inspect": Command(
        "kernels:inspect", "Show what a kernel's folder holds; check its cubin, matrix and bias against the manifest."
    ),
    "replay": Command(
        "kernels:replay", "Make the choice of a kernel again from its log, without a GPU; exit status 5 if it differs."
    ),
    "verify": Command(
        "kernels:verify", "Build a folder's kernels anew and compare the bytes; exit status 5 if they differ."
    ),
    "join": Command(
        "kernels:join",
        "Put the kernels of one matrix for several N, tuned with --memory low, into one cubin that has A once.",
    ),
    "bench": Command("bench:bench", "Time a kernel beside cuSPARSE and cuBLAS on this machine's GPU."),
    "serve": Command("serve:serve", "Run the REST service: POST a pruned matrix or a model, get cubins."),
    "worker": Command("serve:worker", "Tune what the service has accepted, with the same database and cache."),
    "cache": Command("cache:cache_app", "The store of compiled units and tuned kernels."),
    "keys": Command("serve:keys_app", "The API keys of the service, for addresses that other machines can reach."),
}


def app_with(names: Collection[str]) -> typer.Typer:
    """Return the command line; of the commands with these names all is there, of the others their line in --help."""
    app = typer.Typer(
        help="Tune SpMM kernels for pruned neural networks on NVIDIA GPUs.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(start)
    for name, command in COMMANDS.items():
        if name not in names:
            app.command(name, help=command.summary)(_not_imported)
            continue
        module, _, attribute = command.place.partition(":")
        found = getattr(import_module(f"lospmm.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _not_imported() -> NoReturn:
    raise AssertionError("a command that is run is imported")


def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version, or the notes of unknown settings before a command."""
    if context.invoked_subcommand != "worker":  # which notes them in its log
        for line in unknown_variables():
            tell(f"note: {line}")
    if version:
        print(f"lospmm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise BadRequest("name a command, such as tune; `lospmm --help` lists them")
