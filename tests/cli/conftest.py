"""A command, a matrix and settings of its own for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lospmm.cli import main as cli
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover
from tests.cli.command import WEIGHTS, Answer, Command


@pytest.fixture
def lospmm_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command in this process: what differs from a process of its own has tests of its own."""
    monkeypatch.setenv("LOSPMM_MAX_NONZEROS", "")  # which ``serve`` sets: taken away in the end
    monkeypatch.delenv("LOSPMM_MAX_NONZEROS")

    def run(*arguments: object) -> Answer:
        status = cli.run([str(argument) for argument in arguments])
        return Answer(status, *capsys.readouterr())

    return run


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, object], None]]:
    """Set a variable and have it read again."""

    def forget() -> None:
        settings.cache_clear()
        discover.find_toolkit.cache_clear()

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(name, str(value))
        forget()

    yield change
    monkeypatch.undo()
    forget()


@pytest.fixture
def own_cache(tmp_path: Path, set_environment: Callable[[str, object], None]) -> Store:
    set_environment("LOSPMM_CACHE_DIR", tmp_path / "cache")
    return Store(tmp_path / "cache")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    np.save(tmp_path / "w.npy", WEIGHTS)
    return tmp_path / "w.npy"
