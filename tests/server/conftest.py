"""A service on a store of its own, and a toolkit whose ptxas waits until a test lets it go on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover
from lospmm_server.app import create_app
from lospmm_server.workshop import Workshop
from tests.core.files import saved


@pytest.fixture(autouse=True)
def every_test_has(own_settings: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    """Set a variable and have it read again."""

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        discover.find_toolkit.cache_clear()

    return change


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


@pytest.fixture
def slow_toolkit(tmp_path: Path, set_environment: Callable[[str, object], None]) -> Iterator[SlowToolkit]:
    real = discover.find_toolkit()
    slow = SlowToolkit(tmp_path / "slow")
    tools = slow.root / "bin"
    tools.mkdir(parents=True)
    wait = f'echo "$*" >> {slow.log}; while [ ! -e {slow.gate} ]; do sleep 0.02; done'
    for tool, before in ((real.nvcc, ":"), (real.nvlink, ":"), (real.ptxas, wait)):
        script = tools / tool.name
        script.write_text(f'#!/bin/sh\ncase "$1" in --version) ;; *) {before};; esac\nexec {tool} "$@"\n')
        script.chmod(0o755)
    set_environment("LOSPMM_TOOLKIT", slow.root)
    yield slow
    slow.gate.touch()


@pytest.fixture
def workshop() -> Workshop:
    return Workshop(Store(settings().cache_dir), max_waiting=1)


@pytest.fixture
def client(workshop: Workshop) -> Iterator[TestClient]:
    with TestClient(create_app(workshop), base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def weights(seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    dense = generator.standard_normal((16, 24)).astype(np.float32)
    return np.where(generator.random(dense.shape) < 0.2, dense, np.float32(0))


def npy_file(seed: int = 0) -> bytes:
    return saved(np.save, weights(seed))
