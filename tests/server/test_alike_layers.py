"""Layers of a key's model take each other's plans in a worker; other keys', and kernels by themselves, do not."""

import threading
from pathlib import Path
from typing import Any

import pytest

from lospmm.stages import silent
from lospmm.store import Store
from lospmm.tuning.alike import TimedLayers
from lospmm.tuning.session import Session
from lospmm_server import tuning
from lospmm_server.queue import Claim


def test_layers_of_one_model_share_what_was_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TimedLayers] = []

    def tune(*_: Any, session: Session, **__: Any) -> None:
        seen.append(session.layers)

    monkeypatch.setattr(tuning.jobs, "tune", tune)
    for name in ("request_from_json", "check_digest"):
        monkeypatch.setattr(tuning, name, lambda *_: None)
    monkeypatch.setattr(tuning.kept, "keep", lambda *_: None)
    worker = tuning.tune_here(Store(tmp_path))
    for key, model in (("a", "one"), ("a", "other"), ("a", "one"), ("b", "one"), ("a", ""), ("a", "")):
        worker(Claim("", "", {}, key, model, 1), silent, threading.Event())
    assert seen[0] is seen[2]
    assert len(set(map(id, seen))) == 5
