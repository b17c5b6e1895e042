"""Compilers that are shell scripts, and settings of a test's own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and nothing remembered of other tests' settings and toolkits."""
    for name in ("LOSPMM_TOOLKIT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOSPMM_CACHE_DIR", str(tmp_path / "cache"))
    remembered = (settings, discover.find_toolkit, discover.find_host_compiler)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def write_tool(tmp_path: Path) -> Callable[[str, str], Path]:
    """Make an executable shell script, named relative to the test's directory."""

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write
