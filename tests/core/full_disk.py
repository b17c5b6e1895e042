"""A store whose disk is full when a kernel comes."""

from collections.abc import Mapping

import pytest

from lospmm.errors import ToolchainFault
from lospmm.store import Store
from lospmm.tuning import jobs


def take_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else is kept."""
    put = Store.put

    def full(store: Store, kind: str, key: str, files: Mapping[str, bytes]) -> None:
        if kind == jobs.KERNELS:
            raise ToolchainFault("the store in /cache cannot be used: No space left on device")
        put(store, kind, key, files)

    monkeypatch.setattr(Store, "put", full)
