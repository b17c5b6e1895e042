"""A service on a store of its own, and a toolkit whose ptxas waits until a test lets it go on."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import structlog
from starlette.testclient import TestClient

from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover
from lospmm_server import events, worker
from lospmm_server.app import create_app
from lospmm_server.database import FILE, Database, open_database
from lospmm_server.keys import Keyring
from lospmm_server.service import Service
from lospmm_server.tuning import tune_here
from lospmm_server.worker import Worker
from tests.fixtures.files import saved
from tests.server import postgresql


@pytest.fixture(autouse=True)
def every_test_has(own_settings: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture(autouse=True)
def services_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of the tests they look around more often than elsewhere, and say nothing."""
    # A traceback, drawn for a terminal, takes seconds.
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(worker, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(events, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a new database, which ``migrate`` takes as long to make as most tests of the service take."""
    path = tmp_path_factory.mktemp("database") / "service.db"
    made = open_database(f"sqlite:///{path}")
    made.migrate()
    made.close()  # and nothing is left beside the file
    return path.read_bytes()


@pytest.fixture(autouse=True)
def databases_are_there(tmp_path: Path, migrated_file: bytes) -> None:
    """In the cache of each test (``own_settings``); ``migrate`` finds nothing to do."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FILE).write_bytes(migrated_file)


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Set a variable and have it read again."""

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        discover.find_toolkit.cache_clear()

    return change


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgresql.Cluster]:
    """A PostgreSQL for all tests of this process; each makes a schema of its own."""
    with postgresql.running(outlasts_its_machine=False) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def either_database(
    request: pytest.FixtureRequest, set_environment: Callable[[str, object], None]
) -> Iterator[Database]:
    """A database of this test's own, of either kind, which the settings name."""
    if request.param == "postgresql":
        made = request.getfixturevalue("cluster").create_schema(f"test{secrets.token_hex(8)}")
        set_environment("LOSPMM_DATABASE_URL", made)
    database = open_database()
    database.migrate()
    yield database
    database.close()


@dataclass(frozen=True)
class SlowToolkit:
    """Its ptxas writes a line to ``log`` and compiles once ``gate`` exists."""

    root: Path

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def gate(self) -> Path:
        return self.root / "gate"

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def make_slow_toolkit(root: Path) -> SlowToolkit:
    real = discover.find_toolkit()
    slow = SlowToolkit(root)
    tools = slow.root / "bin"
    tools.mkdir(parents=True)
    wait = f'echo "$*" >> {slow.log}; while [ ! -e {slow.gate} ]; do sleep 0.02; done'
    for tool, before in ((real.nvcc, ":"), (real.nvlink, ":"), (real.ptxas, wait)):
        script = tools / tool.name
        script.write_text(f'#!/bin/sh\ncase "$1" in --version) ;; *) {before};; esac\nexec {tool} "$@"\n')
        script.chmod(0o755)
    return slow


@pytest.fixture
def slow_toolkit(tmp_path: Path, set_environment: Callable[[str, object], None]) -> Iterator[SlowToolkit]:
    slow = make_slow_toolkit(tmp_path / "slow")
    set_environment("LOSPMM_TOOLKIT", slow.root)
    yield slow
    slow.gate.touch()


def new_service(*, asks_for_keys: bool = False) -> Service:
    """On the cache and the database of this test, without workers."""
    database = open_database()
    database.migrate()
    keyring = Keyring(database) if asks_for_keys else None
    return Service(database, Store(settings().cache_dir), keyring=keyring)


@contextmanager
def working() -> Iterator[Worker]:
    """A worker in a thread, on the cache and the database of this test."""
    store, database, stop = Store(settings().cache_dir), open_database(), threading.Event()
    database.migrate()
    own = Worker(database, store, tune_here(store))
    thread = threading.Thread(target=own.run, args=(stop,))
    thread.start()
    try:
        yield own
    finally:
        stop.set()
        thread.join(20)
        database.close()
    assert not thread.is_alive()


@pytest.fixture
def service() -> Service:
    return new_service()


def client_of(service: Service) -> TestClient:
    return TestClient(create_app(service), base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def idle_client(service: Service) -> Iterator[TestClient]:
    """Of a service without workers."""
    with client_of(service) as client:
        yield client


@pytest.fixture
def client(idle_client: TestClient) -> Iterator[TestClient]:
    """Of a service with a worker in a thread."""
    with working():
        yield idle_client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Of a service with a worker for all tests of a module that do not look at what others did: nine requests of ten
    are answered in thousandths of a second, the first ones of a service take a hundred times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_CACHE_DIR", str(tmp_path_factory.mktemp("shared")))
        settings.cache_clear()
        with ExitStack() as stack:
            stack.enter_context(working())
            client = stack.enter_context(client_of(new_service()))
            patch.undo()
            settings.cache_clear()
            yield client


def weights(seed: int = 0) -> np.ndarray:
    """Small: what a kernel costs to make grows with it, and no test of the service is about kernels."""
    generator = np.random.default_rng(seed)
    dense = generator.standard_normal((4, 12)).astype(np.float32)
    return np.where(generator.random(dense.shape) < 0.3, dense, np.float32(0))


def npy_file(seed: int = 0) -> bytes:
    return saved(np.save, weights(seed))
