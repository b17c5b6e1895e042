"""The commands of ``lospmm``; ``main.py`` makes their errors a line and an exit code."""

from collections.abc import Collection, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated

import typer

from lospmm.errors import BadRequest
from lospmm.progress import tell
from lospmm.settings import unknown_variables
from lospmm.version import __version__

#: Where each command is, as "module:name" of this package.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "tune": "tune:tune",
        "tune-model": "tune_model:tune_model",
        "layers": "layers:layers",
        "train-ranker": "train_ranker:train_ranker",
        "space": "space:space",
        "inspect": "kernels:inspect",
        "replay": "kernels:replay",
        "verify": "kernels:verify",
        "join": "kernels:join",
        "bench": "bench:bench",
        "serve": "serve:serve",
        "worker": "serve:worker",
        "cache": "cache:cache_app",
        "keys": "serve:keys_app",
    }
)


def app_with(names: Collection[str]) -> typer.Typer:
    """Return the command line with the commands among ``names``, as others take a while to import; all if none is."""
    app = typer.Typer(
        help="Tune SpMM kernels for pruned neural networks on NVIDIA GPUs.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(start)
    for name in [name for name in COMMANDS if name in names] or COMMANDS:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f"lospmm.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


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
