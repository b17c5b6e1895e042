"""``lospmm cache``: the store of compiled units and tuned kernels."""

from typing import Annotated

import typer

from lospmm.artifact import kept
from lospmm.cli.options import JsonOption
from lospmm.cli.show import show_entries
from lospmm.errors import ToolchainFault
from lospmm.settings import settings

cache_app = typer.Typer(help="The store of compiled units and tuned kernels.")


@cache_app.command("ls")
def cache_list(as_json: JsonOption = False) -> None:
    """List the entries of the store, last used first."""
    entries = sorted(kept.open_store().entries(), key=lambda entry: -entry.used)
    show_entries(entries, f"{settings().cache_dir}", as_json=as_json)


@cache_app.command("prune")
def cache_prune(
    max_megabytes: Annotated[
        int | None, typer.Option("--max-mb", min=0, help="Keep the last used, up to this size.")
    ] = None,
    days: Annotated[
        float | None, typer.Option("--older-than-days", min=0, help="Remove what was not used for this long.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove entries of the store, least recently used first."""
    removed = kept.open_store().prune(
        max_bytes=None if max_megabytes is None else max_megabytes << 20,
        older_than_seconds=None if days is None else days * 86_400,
    )
    show_entries(removed, "removed", as_json=as_json)


@cache_app.command("verify")
def cache_verify(as_json: JsonOption = False) -> None:
    """Check every entry of the store against its checksums; exit status 4 if any is corrupt."""
    corrupt = kept.open_store().verify()
    title = "corrupt, and built again when next asked for" if corrupt else "corrupt"
    show_entries(corrupt, title, as_json=as_json)
    if corrupt:
        raise typer.Exit(ToolchainFault.exit_code)
