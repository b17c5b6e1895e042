"""The database of jobs: SQLite in a file beside the cache, or PostgreSQL by ``LOSPMM_DATABASE_URL``.

There is one writer at a time on either: SQLite allows no more, and on PostgreSQL a writing transaction takes an
advisory lock first. So a transaction sees what it is going to change, and the ids of events follow the order of their
commits. Transactions are short, and hundreds of them fit into a second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from lospmm.errors import BadSettings, DiskFault
from lospmm.settings import settings
from lospmm_server.disk import Landmark, check_room
from lospmm_server.faults import DatabaseFault

#: The file of the default database, in LOSPMM_CACHE_DIR.
FILE = "service.db"

#: How long a transaction waits for another one's end, and a connection for its server, in seconds.
BUSY_SECONDS = 5

#: Names the lock of the writers in PostgreSQL: "lospmm" as a number.
WRITERS = int.from_bytes(b"lospmm", "big")

#: What each database is driven with, and the package that brings it.
DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}


@dataclass(frozen=True, slots=True)
class Database:
    """A database; its transactions, ``read`` and ``write``, raise DatabaseFault if nothing was written."""

    engine: sa.Engine
    file: Landmark | None = None  # SQLite's

    @property
    def name(self) -> str:
        """Name for people: without the password, which may also be a parameter of the URL."""
        url = self.engine.url
        told = {name: "***" if "password" in name.lower() else value for name, value in url.query.items()}
        return url.set(query=told).render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Yield a connection for reading."""
        with self._faults(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Yield a connection for writing, committed at the end of the block unless it raises."""
        with self._faults(), self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITERS)))
            yield connection

    def migrate(self) -> None:
        """Migrate the tables to this program's version. Raises DatabaseFault, also for a later version."""
        config = Config()
        config.set_main_option("script_location", "lospmm_server:migrations")
        with self.write() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise DatabaseFault(f"{self.name}: made by a later version of lospmm ({error})") from None

    def check_room(self) -> None:
        """Raise DiskFault if the disk of the file is full or read-only."""
        if self.file is not None:
            check_room(self.file.path.parent)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            if self.file is not None:
                self.file.check()  # SQLite would go on in the file that nobody finds any more
            yield
        except DiskFault as error:
            raise DatabaseFault(f"the database {self.name} cannot be used now: {error}") from None
        except DBAPIError as error:
            reason = " ".join(str(error.orig).split())[:200]
            raise DatabaseFault(f"the database {self.name} cannot be used now: {reason}") from error
        except SQLAlchemyError as error:  # such as no free connection in time
            raise DatabaseFault(f"the database {self.name} cannot be used now: {type(error).__name__}") from error


def open_database(url: str | None = None) -> Database:
    """Return the database of ``url``, of LOSPMM_DATABASE_URL, or the cache's file, without connecting.

    Raises BadSettings for a URL that is none, DatabaseFault if the file cannot be made.
    """
    address = _address(url or settings().database_url)
    options: dict[str, Any] = {"pool_pre_ping": True, "pool_timeout": BUSY_SECONDS, "max_overflow": 20}
    if address.get_backend_name() == "sqlite":
        file = _made_file(address)
        engine = sa.create_engine(address, connect_args={"timeout": BUSY_SECONDS}, **options)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return Database(engine, file)
    try:
        return Database(sa.create_engine(address, connect_args={"connect_timeout": BUSY_SECONDS}, **options))
    except ModuleNotFoundError:
        raise BadSettings("LOSPMM_DATABASE_URL: PostgreSQL needs psycopg: pip install 'lospmm[postgresql]'") from None


def migrated() -> Database:
    """Return the database of the settings, migrated. Raises BadSettings, DatabaseFault."""
    database = open_database()
    database.migrate()
    return database


def _address(url: str | None) -> URL:
    if url is None:
        return URL.create(DRIVERS["sqlite"], database=str(settings().cache_dir / FILE))
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # the latter of a port that is no number
        raise BadSettings("LOSPMM_DATABASE_URL: not a URL; it looks like postgresql://user:word@host/name") from None
    backend = address.drivername.partition("+")[0]
    if backend not in DRIVERS:
        raise BadSettings(f"LOSPMM_DATABASE_URL: {backend[:40]!r} is none of {', '.join(DRIVERS)}")
    if backend == "sqlite" and (address.database in (None, "", ":memory:") or "uri" in address.query):
        # Memory, which a URI may name too, is of one process.
        raise BadSettings("LOSPMM_DATABASE_URL: name a file, as in sqlite:////var/lib/lospmm/service.db")
    return address.set(drivername=DRIVERS[backend])


def _made_file(address: URL) -> Landmark:
    file = Path(address.database or "").absolute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.touch(0o644)  # to SQLite, an empty file is an empty database
        return Landmark.at(file)
    except OSError as error:
        raise DatabaseFault(f"{file.parent}: no place for the database: {error.strerror}") from None


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # Transactions begin where we say so, not where Python's module would.
    connection.isolation_level = None
    # FULL: what is accepted outlasts a power failure too, not only the end of a process.
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that turned from reading to writing would be refused if another one wrote meanwhile.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
