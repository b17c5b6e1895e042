"""``lospmm serve``, ``worker`` and ``keys``: the REST service, its workers and its API keys."""

import signal
from importlib import import_module
from types import ModuleType
from typing import Annotated

import typer

from lospmm.cli.options import JsonOption
from lospmm.cli.output import print_json
from lospmm.errors import extra_needed

keys_app = typer.Typer(help="The API keys of the service, for addresses that other machines can reach.")


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Workers to start with it; 0: none.")] = 1,
) -> None:
    """Run the REST service: POST a pruned matrix or a model, get cubins."""
    # The service ends in its own orderly way, and then by the same signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _service().serve(host, port, workers)


def worker(
    name: Annotated[str, typer.Option("--name", help="The name in logs; no two workers may share one.")] = "",
    parent: Annotated[int | None, typer.Option("--parent", help="Exit when the process with this id exits.")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster to tune on: HOST:PORT, or auto.")
    ] = None,
) -> None:
    """Tune what the service has accepted, with the same database and cache."""
    _service("worker_process").work(name, parent, ray)


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the key.")],
    terms: Annotated[
        list[str] | None, typer.Argument(metavar="TERMS", help="What it may do, such as team=vision.")
    ] = None,
) -> None:
    """Create an API key and print it once."""
    print(_service().add_key(name, terms or ()))


@keys_app.command("ls")
def keys_list(as_json: JsonOption = False) -> None:
    """List the names of the API keys in the database, which holds only their hashes."""
    found = _service().list_keys()
    if as_json:
        shown = [(key.name, f"{key.created}", key.is_valid, key.terms) for key in found]
        print_json({"keys": [dict(zip(("name", "created", "valid", "terms"), row, strict=True)) for row in shown]})
        return
    for key in found:
        print(f"{key.name}  {key.created:%Y-%m-%d}  {'valid' if key.is_valid else 'ended'}  {key.terms}".rstrip())


@keys_app.command("revoke")
def keys_revoke(name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the key.")]) -> None:
    """Revoke an API key, within seconds and for good."""
    _service().revoke_key(name)


def _service(module: str = "main") -> ModuleType:
    """Import a module of the service: only its commands need a web framework, and a worker none."""
    with extra_needed("server", "the service"):
        return import_module(f"lospmm_server.{module}")
