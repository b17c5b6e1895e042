"""What the rank model learns from is measured: problems by number, candidates, lines. The GPU is machine_gpu.py."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.sparse

from lospmm.errors import BadRequest
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.build import for_emitter
from lospmm_rank.train import collect
from lospmm_rank.train.lines import Lines
from lospmm_rank.train.pool import EmitterPool, Source, numbered
from lospmm_rank.train.problems import DROPPED, MOST_NONZEROS, MOST_PRODUCTS, PATTERNS, drawn
from lospmm_rank.train.sample import sampled
from tests.fixtures import machine_gpu
from tests.gpu.test_bench import gate_library

__all__ = ["gate_library"]  # a fixture

M, K, N = 12, 20, 40
H200 = DEVICES["h200"]


def weights() -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.where(rng.random((M, K)) < 0.3, rng.normal(size=(M, K)), 0).astype(np.float32)


def test_a_number_is_one_problem_for_ever() -> None:
    found = [drawn(number) for number in range(40)]
    assert [one.matrix.fingerprint for one in found[:3]] == [drawn(number).matrix.fingerprint for number in range(3)]
    dropped = [drawn(DROPPED + number) for number in range(12)]
    assert {one.pattern for one in (*found, *dropped)} == set(PATTERNS)
    assert all(one.matrix.nnz <= MOST_NONZEROS and one.matrix.nnz * one.n <= MOST_PRODUCTS for one in found)
    # To the letter: data that were measured name their problems by number.
    sizes = [(one.matrix.m, one.matrix.k, one.n, one.matrix.nnz) for one in (*found[:2], *dropped[:2])]
    assert sizes == [(512, 256, 1024, 2621), (2048, 515, 2048, 105472), *DROPPED_FIRST]


DROPPED_FIRST = [(2304, 1536, 969, 176947), (1285, 670, 1024, 43048)]


def test_dropped_problems_have_empty_rows_and_columns_and_long_rows() -> None:
    found = [drawn(DROPPED + number).matrix for number in range(12)]
    empty = [np.mean(one.row_nnz == 0) for one in found]
    assert max(empty) >= 0.6 and sum(share > 0.1 for share in empty) >= 8
    assert any(len(np.unique(one.indices)) < 0.9 * one.k for one in found)
    assert max(one.row_nnz.max() / one.row_nnz[one.row_nnz > 0].mean() for one in found) > 10


def test_a_sample_is_different_candidates_with_the_first_among_them() -> None:
    found = drawn(5)
    problem = for_emitter(Problem(found.matrix, found.n, H200), "sass")
    chosen = sampled(problem, 40, "sass", np.random.default_rng(1))
    named = {(one.tile, one.schedule) for one in chosen}
    assert 20 <= len(chosen) == len(named) <= 40
    assert {one.schedule.split_k for one in chosen} >= {1, 2}
    everything = sampled(problem, 2000, "sass", np.random.default_rng(2))
    assert estimate_micros(problem, chosen).min() == estimate_micros(problem, everything).min()
    again = sampled(problem, 40, "sass", np.random.default_rng(1))
    assert [(one.tile, one.schedule) for one in again] == [(one.tile, one.schedule) for one in chosen]


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    folder = tmp_path / "layers"
    folder.mkdir()
    for name in ("a", "b"):
        matrix = scipy.sparse.csr_array(weights())
        arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
        np.savez(folder / f"{name}.npz", shape=np.array(matrix.shape), **arrays)
    (folder / "rn50_batchsizes.txt").write_text(f"a,{N}\n")
    return folder


def test_matrices_of_a_folder_have_the_columns_of_its_list(layers: Path, tmp_path: Path) -> None:
    assert [(one.key, one.n) for one in collect.of_files(layers, 0, 1)] == [("a.npz", N), ("b.npz", 1024)]
    assert [one.key for one in collect.of_files(layers, 1, 2)] == ["b.npz"]
    with pytest.raises(BadRequest, match=r"no \.smtx or \.npz"):
        collect.of_files(tmp_path / "nothing", 0, 1)


@pytest.fixture
def bench(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    worker = (sys.executable, "-P", machine_gpu.__file__, str(gate_library), "", *map(str, (M, K, N)))
    with Bench(Problem(from_dense(np.ones((1, 1), dtype=np.float32)), 32, H200), command=worker) as bench:
        yield bench


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_kernels_are_timed_once_and_a_stopped_run_goes_on(layers: Path, tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "out" / "real-0-of-1.jsonl"
    first, second = (Source(number, f"{name}.npz", layers, N) for number, name in enumerate("ab"))
    until = time.monotonic() + 60
    with EmitterPool(1, "sass", H200, 5) as pool:
        with Lines(path) as lines:
            tally = collect.collect([first], pool, bench, lines, until=until, tell=lambda _: None)
        assert (tally.problems, tally.failures) == (1, 0)
        with path.open("a") as torn:
            torn.write('{"problem":"b.npz","rows":[1,')  # its writer was killed
        with Lines(path) as lines:
            tally = collect.collect([first, second], pool, bench, lines, until=until, tell=lambda _: None)
            assert tally.problems == 1
            late = collect.collect([Source(2, "b.npz", layers, 41)], pool, bench, Lines(tmp_path), until=0, tell=print)
            assert late.problems == 0
    found = entries(path)
    assert [entry["problem"] for entry in found] == ["a.npz", "b.npz"]
    for entry in found:
        assert (entry["m"], entry["k"], entry["n"], entry["pattern"]) == (M, K, N, "real")
        columns = [entry[name] for name in ("rows", "cols", "prefetch", "split_k", "lockstep", "estimated", "micros")]
        assert {len(column) for column in columns} == {tally.points}
        assert all(micros > 0 for micros in entry["micros"])
        assert entry["failures"] == {}


def test_a_dry_run_needs_no_gpu(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["collect", "--out", str(tmp_path), "--dry", "0", "--candidates", "4", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--matrices", str(layers), "--part", "1/2", "--seconds", "100"])
    collect.main()
    assert capsys.readouterr().out.startswith("1 problems, 4 points")
    about, found = entries(tmp_path / "real-1-of-2.jsonl")
    assert (about["device"], about["emitter"], found["problem"], found["n"]) == ("h200", "sass", "b.npz", 1024)
    monkeypatch.setattr(sys, "argv", [*arguments, "--part", "3/3"])
    with pytest.raises(SystemExit) as ended:
        collect.main()
    assert ended.value.code == 2


def test_the_parts_of_a_run_share_the_numbers() -> None:
    shared = [[one.number for one in itertools.islice(numbered(part, 3), 10)] for part in range(3)]
    every = sorted(number for part in shared for number in part)
    assert every == [*range(18), *(DROPPED + number for number in range(18) if number // 3 % 3)]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(layers: Path, tmp_path: Path) -> None:
    arguments = [
        "--out",
        str(tmp_path),
        "--dry",
        "0.2",
        "--workers",
        "2",
        "--matrices",
        str(layers),
        "--seconds",
        "100",
    ]
    run = psutil.Popen([sys.executable, "-m", "lospmm_rank.train.collect", *arguments])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "real-0-of-1.jsonl").exists() or len(run.children(recursive=True)) < 4:
            assert time.monotonic() < deadline and run.is_running()
            time.sleep(0.05)
        children = run.children(recursive=True)
    finally:
        run.kill()
        run.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]
