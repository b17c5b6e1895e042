"""Compilers that are shell scripts, and settings of a test's own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lospmm.store import Store


@pytest.fixture(autouse=True)
def every_test_has(own_settings: None) -> None:
    """See tests/conftest.py."""


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
