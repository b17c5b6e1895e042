"""Databases of earlier versions, on SQLite and on PostgreSQL: what is in them goes on."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from lospmm_server import queries, queue
from lospmm_server.database import Database, open_database
from lospmm_server.keys import NOBODY
from lospmm_server.tables import metadata
from tests.server.orders import claimed, model, order, submitted

CONFIG = Config()
CONFIG.set_main_option("script_location", "lospmm_server:migrations")
REVISIONS = [script.revision for script in reversed([*ScriptDirectory.from_config(CONFIG).walk_revisions()])]

#: What a version of any revision may have written: a table has those of the columns that its revision knows.
NOW = datetime.now(UTC)
KERNEL = {"request": order(1).request, "gpu": "", "attempts": 0, "beat": 0, "cancel": False, "progress": {}}
KERNEL |= {"key": "team", "model": "", "created": NOW}
ROWS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "events": tuple({"job": f"{number:064x}", "time": NOW, "kind": "queued", "data": {}} for number in (1, 2, 3)),
    "kernels": (
        {**KERNEL, "digest": order(1).digest, "turn": 1, "state": "queued", "posted": True},
        {**KERNEL, "digest": order(2).digest, "turn": 2, "state": "succeeded", "posted": False, "model": "net"},
    ),
    "postings": tuple(
        {"team": "", "digest": order(number).digest, "posted": number == 1, "cancel": False} for number in (1, 2)
    ),
    "models": (
        {"id": "f" * 64, "turn": 3, "name": "net", "n": 8, "device": "h200", "key": "team", "cancel": False}
        | {"created": NOW},
    ),
    "layers": ({"model": "f" * 64, "position": 0, "name": "fc", "digest": order(2).digest, "m": 4, "k": 8, "nnz": 2},),
    "keys": ({"sha256": "a" * 64, "name": "team", "created": NOW},),
}


def migrated(database: Database, revision: str) -> None:
    """Give an empty database the tables of a revision, and rows of that time."""
    with database.write() as connection:
        metadata.drop_all(connection)
        connection.execute(sa.text("DROP TABLE alembic_version"))
        CONFIG.attributes["connection"] = connection
        command.upgrade(CONFIG, revision)
        old = sa.MetaData()
        old.reflect(connection)
        for name, rows in ((name, ROWS[name]) for name in ROWS if name in old.tables):
            known = [{key: value for key, value in row.items() if key in old.tables[name].c} for row in rows]
            connection.execute(sa.insert(old.tables[name]), known)


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_an_earlier_version_has_written_goes_on(either_database: Database, revision: str) -> None:
    migrated(either_database, revision)
    others = [open_database() for _ in range(3)]  # of servers that start at the same time
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Database.migrate, others))
    for other in others:
        other.close()
    with either_database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    listed = queries.list_jobs(either_database, None, None, 50)
    assert [(job.id, job.state) for job in listed] == [("f" * 64, "succeeded"), (order(1).digest, "queued")]
    submitted(either_database, 3)
    queue.submit_model(either_database, model(order(4)), NOBODY)
    assert {claimed(either_database).digest for _ in range(3)} == {order(number).digest for number in (1, 3, 4)}
    assert queue.cancel(either_database, order(1).digest)
