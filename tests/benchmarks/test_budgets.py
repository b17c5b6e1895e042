"""benchmarks/budgets.py with invented searches, and invented times in a GPU's place."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import budgets
from lospmm.errors import NothingFits
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.launch import Launch
from lospmm.store import Store
from lospmm.tuning.request import Request

#: Patterns by file; the second row of the first is empty.
LAYERS = {"one": "3, 40, 5\n0 3 3 5\n1 7 30 7 39\n", "two": "1, 40, 2\n0 2\n1 7\n", "zero": "1, 40, 0\n0 0\n\n"}


def tune(request: Request, *, store: Store) -> SimpleNamespace:
    """Choose a kernel that ``benchmarks.dry_gpu`` says takes half as long again, if the budget is a second."""
    assert not list(store.root.iterdir()), "it finds nothing ready"
    matrix, options = request.problem.matrix, request.options
    if not matrix.nnz:
        raise NothingFits("no nonzeros")
    sizes = {"m": matrix.m, "k": matrix.k, "n": request.problem.n, "nnz": matrix.nnz, "cubin_family": "csr"}
    search = {"measured": 7}
    cubin = bytes(500 if options.budget_seconds == 1.0 else 0)
    return SimpleNamespace(manifest={"name": "k", "search": search, **sizes}, cubin=cubin, launch=Launch((1, 1, 1), 32))


def test_each_layer_is_searched_with_each_budget_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = partial(Bench, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu"))
    monkeypatch.setattr(budgets, "Bench", dry)
    monkeypatch.setattr(budgets, "jobs", SimpleNamespace(tune=tune))
    monkeypatch.setattr(budgets, "detect_device", lambda: DEVICES["h100"])
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    for name, text in LAYERS.items():
        (tmp_path / f"{name}.smtx").write_text(text)
    command = ["budgets", str(tmp_path), "--n", "64", "--out", str(tmp_path), "--commit", "c"]
    monkeypatch.setattr(sys, "argv", command)
    budgets.main()
    told, text = capsys.readouterr().out, (tmp_path / "budgets.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(one["problem"][:3], one["budget"], one["ratio"], one["empty_rows"]) for one in lines] == [
        *[("one", 1.0, 1.4956, 1), ("one", 2.0, 1.0, 1), ("one", 3.5, 1.0, 1), ("one", None, 1.0, 1)],
        *[("one", None, 1.0, 1), ("two", 1.0, 1.4956, 0), ("two", 2.0, 1.0, 0), ("two", 3.5, 1.0, 0)],
        ("two", None, 1.0, 0),
    ]
    assert [one["options"]["shortlist_size"] for one in lines[3:5]] == [10, 40]
    assert {(one["n"], one["micros"], one["machine"]["device"], one["commit"]) for one in lines[1:4]} == {
        (64, 25.0, "h100", "c")
    }
    assert "zero.smtx: FAILED: no nonzeros" in told
    assert "1 s       2 1.496 1.50   0 0.0,   1 1.496 1.50   0 0.0" in told
    budgets.main()  # goes on where it ended: only the failed one is tried
    assert (tmp_path / "budgets.jsonl").read_text() == text
