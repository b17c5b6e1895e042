"""The commands of ``lospmm``, one module each; ``main.py`` makes their errors a line and an exit code."""

from typing import Annotated

import typer

from lospmm.cli.bench import bench
from lospmm.cli.cache import cache_app
from lospmm.cli.inspect import inspect, replay
from lospmm.cli.serve import keys_app, serve, worker
from lospmm.cli.space import space
from lospmm.cli.train_ranker import train_ranker
from lospmm.cli.tune import tune
from lospmm.cli.tune_model import tune_model
from lospmm.errors import BadRequest
from lospmm.progress import tell
from lospmm.settings import unknown_variables
from lospmm.version import __version__

app = typer.Typer(
    help="Fully unrolled SpMM kernels for pruned neural networks: tune, inspect, serve.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (tune, tune_model, train_ranker, space, inspect, replay, bench, serve, worker):
    app.command()(command)
app.add_typer(cache_app, name="cache")
app.add_typer(keys_app, name="keys")


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
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
