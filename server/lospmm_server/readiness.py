"""Readiness: whether the service could take and tune a kernel now."""

from lospmm.errors import LospmmError
from lospmm.toolchain.discover import find_toolkit
from lospmm_server import queries
from lospmm_server.database import Database
from lospmm_server.disk import Disk


def reasons_not_ready(disk: Disk, database: Database) -> list[str]:
    """Return why a kernel could not be tuned now, one line each; empty if all is well."""
    reasons = []
    for check in (find_toolkit, lambda: queries.figures(database), database.check_room):
        try:
            check()
        except LospmmError as error:
            reasons.append(str(error))
    return reasons + disk.lacks()
