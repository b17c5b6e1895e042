"""Whether the service could take and tune a kernel now."""

import tempfile

from lospmm.errors import LospmmError
from lospmm.store import Store
from lospmm.toolchain.discover import find_toolkit
from lospmm_server import queries
from lospmm_server.database import Database


def reasons_not_ready(store: Store, database: Database) -> list[str]:
    """Why a kernel could not be tuned now, one line each; none when all is well."""
    reasons = []
    for check in (find_toolkit, lambda: queries.figures(database)):
        try:
            check()
        except LospmmError as error:
            reasons.append(str(error))
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.root):
            pass
    except OSError as error:
        reasons.append(f"the cache {store.root} cannot be written: {error.strerror}")
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as error:  # it names the folder
        reasons.append(f"uploads and compilers have no place for temporary files: {error}")
    return reasons
