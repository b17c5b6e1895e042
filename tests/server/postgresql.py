"""A PostgreSQL of the tests' own: a cluster in a temporary folder, reached through a socket in it."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

#: Where Debian keeps the programs of each version, which it does not put on PATH.
DEBIAN = Path("/usr/lib/postgresql")

#: Why a test is skipped, and what to do.
MISSING = "PostgreSQL is not installed: apt-get install postgresql"


def programs() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``, of the newest version."""
    folders = sorted(DEBIAN.glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    if on_path is not None:
        folders.append(Path(on_path).resolve().parent)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@dataclass(frozen=True)
class Cluster:
    """``outlasts_its_machine``: whether what was committed would outlast a power failure too, which takes time."""

    programs: Path
    folder: Path
    outlasts_its_machine: bool = True

    def url(self, database: str) -> str:
        return f"postgresql://lospmm@/{database}?host={self.folder}"

    def create(self, database: str) -> str:
        """A new database; its URL."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)

    def create_schema(self, name: str) -> str:
        """As good as a new database, and a thousand files less; its URL."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE SCHEMA "{name}"'.encode())
        return f"{self.url('postgres')}&options=-csearch_path%3D{name}"

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c max_connections=200"
        if not self.outlasts_its_machine:
            options += "".join(f" -c {name}=off" for name in ("fsync", "full_page_writes"))
        self._run("pg_ctl", "--wait", "--log", str(self.folder / "log"), "--options", options, "start")

    def stop(self) -> None:
        """At once, as if its machine had lost power."""
        self._run("pg_ctl", "--wait", "--mode", "immediate", "stop")

    def initialize(self) -> None:
        self._run("initdb", "--username", "lospmm", "--auth", "trust", "--encoding", "UTF8", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        command = (*_as_somebody(), str(self.programs / program), "--pgdata", str(self.folder / "data"), *arguments)
        # Not a pipe: the server that pg_ctl starts would hold it open.
        with (self.folder / "commands.log").open("ab") as log:
            done = subprocess.run(command, stdout=log, stderr=log, cwd=self.folder)
        assert done.returncode == 0, (self.folder / "commands.log").read_text()


@contextmanager
def running(*, outlasts_its_machine: bool = True) -> Iterator[Cluster]:
    """A cluster that runs during the block. Skips the test where PostgreSQL is not installed."""
    found = programs()
    if found is None:
        pytest.skip(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="lospmm-pg-"))  # a short path: a socket's has at most 107 bytes
    try:
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            somebody = pwd.getpwnam("nobody")
            os.chown(folder, somebody.pw_uid, somebody.pw_gid)
        cluster = Cluster(found, folder, outlasts_its_machine)
        cluster.initialize()
        cluster.start()
        try:
            yield cluster
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                cluster.stop()
    finally:
        shutil.rmtree(folder)


def _as_somebody() -> tuple[str, ...]:
    if os.getuid() != 0:
        return ()
    return ("setpriv", "--reuid=nobody", f"--regid={pwd.getpwnam('nobody').pw_gid}", "--clear-groups")
