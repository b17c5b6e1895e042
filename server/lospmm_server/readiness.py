"""Readiness: whether the service could take and tune a kernel now."""

import tempfile
from pathlib import Path

from lospmm.errors import LospmmError
from lospmm.store import Store
from lospmm.toolchain.discover import find_toolkit
from lospmm_server import queries
from lospmm_server.database import Database

#: Bytes that a disk has to take.
PROBE_BYTES = 64 << 10


def reasons_not_ready(store: Store, database: Database) -> list[str]:
    """Return why a kernel could not be tuned now, one line each; empty if all is well."""
    reasons = []
    for check in (find_toolkit, lambda: queries.figures(database)):
        try:
            check()
        except LospmmError as error:
            reasons.append(str(error))
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        _write_to(store.root)
    except OSError as error:
        reasons.append(f"the cache {store.root} cannot be written: {error.strerror}")
    try:
        _write_to(None)
    except OSError as error:  # the error names the folder
        reasons.append(f"uploads and compilers have no place for temporary files: {error}")
    return reasons


def _write_to(folder: Path | None) -> None:
    """Write a temporary file with some bytes: a full disk still takes empty files."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
