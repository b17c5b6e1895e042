"""Unrolled kernels of 16-bit types, from request to artifact: with sums in float32, and in pairs of columns without."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.artifact import artifact
from lospmm.cli.main import run
from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.cpu.rounding import bfloat_multiply_add, half_multiply_add
from lospmm.cpu.verify import verify_on_cpu
from lospmm.errors import Unsupported, VerificationFailed
from lospmm.kernel import Kernel, load
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.accuracy import ACCURACY
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.lanes import NARROW, PAIRS, SINGLE, in_lanes, lanes_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import Options
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm_server.queued_request import from_json, keep_matrix, to_json
from tests.cpu.drawn import matrices, schedules

H200 = DEVICES["h200"]
HALVES = [dtype for dtype in DTYPES.values() if dtype.is_16_bit]
FUSED = {"float16": half_multiply_add, "bfloat16": bfloat_multiply_add}
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)

M, K, N = 37, 60, 150
RNG = np.random.default_rng(6)
WEIGHTS = np.where(RNG.random((M, K)) < 0.3, RNG.normal(size=(M, K)), 0).astype(np.float32)
WEIGHTS[11] = 0
MATRIX = from_dense(WEIGHTS)


def pairs(dtype: Dtype, matrix: SparseMatrix = MATRIX, n: int = N) -> Problem:
    return for_emitter(Problem(matrix, n, H200, dtype=dtype, sums=dtype), "sass")


def request(dtype: Dtype, **options: str) -> Request:
    return Request(Problem(MATRIX, N, H200), Options(dtype=dtype.name, **{"sums": dtype.name, **options}))


@st.composite
def kernels(draw: st.DrawFn) -> tuple[Problem, KernelProgram]:
    matrix, half = draw(matrices()), draw(st.integers(1, 90) | st.sampled_from([12_000_011]))
    problem = pairs(draw(st.sampled_from(HALVES)), matrix, 2 * half)
    rows, cols = draw(st.integers(1, matrix.m)), draw(st.sampled_from([1, 3, 32, 128]))
    tiling = regroup(matrix, [rows])[rows] if draw(st.booleans()) else natural_order(matrix, rows)
    schedule = replace(draw(schedules), split_k=draw(st.sampled_from([1, 1, 2, 4])))
    return problem, lower(problem, UnrolledPlan(TileSize(rows, cols), schedule, tiling))


@given(kernels(), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_kernels_of_pairs_compute_the_product(kernel: tuple[Problem, KernelProgram], seed: int) -> None:
    problem, program = kernel
    assert (program.n, program.words) == (problem.n // 2, PAIRS)
    assert verify_on_cpu(problem, program, emit(program, "sass", "sm_90"), seed=seed).columns <= 128


@dtypes
def test_a_kernel_is_tuned_kept_and_run(dtype: Dtype, tmp_path: Path) -> None:
    kernel = Kernel(jobs.tune(request(dtype), store=Store(tmp_path / "store")))
    manifest = kernel.manifest
    assert (manifest["family"], manifest["emitter"], manifest["sums"]) == ("unrolled", "sass", dtype.name)
    assert manifest["tile"]["thread_columns"] == 2
    assert manifest["launch"]["grid"][0] * manifest["launch"]["block"] * manifest["launch"]["grid"][2] < N + 64
    longest = int(np.diff(MATRIX.indptr).max())
    assert manifest["accuracy"]["sum_rounding"] == pytest.approx((1 + dtype.unit_roundoff) ** (longest + 8) - 1)
    assert all("4-byte aligned" in one["layout"] for one in manifest["arguments"])
    kernel.save(tmp_path / "kernel")
    b = RNG.uniform(-1, 1, (K, N)).astype(np.float32)
    c = load(tmp_path / "kernel").run_on_cpu(b)
    np.testing.assert_array_equal(c, step_by_step(dtype, b))
    assert replay(artifact.read(tmp_path / "kernel"), H200).agrees


def step_by_step(dtype: Dtype, b: np.ndarray) -> np.ndarray:
    """C with one rounding for each multiply-add, in the order of A's columns."""
    words = np.ascontiguousarray(dtype.to_storage(b)).view(np.uint32)
    weights = dtype.to_storage(MATRIX.data).view(np.uint16).astype(np.uint32)
    c = np.zeros((M, N // 2), np.uint32)
    for row in range(M):
        for at in range(MATRIX.indptr[row], MATRIX.indptr[row + 1]):
            twice = int(weights[at] << np.uint32(16) | weights[at])
            c[row] = FUSED[dtype.name](twice, words[MATRIX.indices[at]], c[row])
    return dtype.from_storage(c.view(dtype.to_storage(b[:0]).dtype))


@dtypes
@pytest.mark.parametrize("n", [N, N + 1])
@pytest.mark.parametrize("is_layer", [False, True])
def test_sums_in_float32_are_as_exact_as_those_of_other_families(
    dtype: Dtype, n: int, is_layer: bool, tmp_path: Path
) -> None:
    """What pairs do not take has such sums, where others are asked for too."""
    bias = np.linspace(-1, 1, M, dtype=np.float32)
    epilogue = epilogue_of(bias if is_layer else None, relu=is_layer, residual=is_layer)
    sums = dtype.name if is_layer or n % 2 else "float32"
    wanted = Request(Problem(MATRIX, n, H200, epilogue=epilogue), Options(dtype=dtype.name, sums=sums))
    kernel = Kernel(jobs.tune(wanted, store=Store(tmp_path)))
    manifest, accuracy = kernel.manifest, ACCURACY[dtype.name]
    assert (manifest["family"], manifest["sums"]) == ("unrolled", sums)
    assert manifest["tile"]["thread_columns"] == manifest["tile"]["thread_words"]  # an element is a word: no pairs
    assert manifest["accuracy"]["sum_rounding"] == accuracy.sum_rounding
    b, third = (RNG.uniform(-1, 1, (rows, n)).astype(np.float32) for rows in (K, M))
    stored, added = (dtype.from_storage(dtype.to_storage(one)).astype(np.float64) for one in (b, third))
    c = kernel.run_on_cpu(b, third if is_layer else None)
    exact, scale = dtype.rounded(WEIGHTS).astype(np.float64) @ stored, abs(WEIGHTS) @ abs(stored)
    if is_layer:
        exact, scale = np.maximum(exact + added + bias[:, np.newaxis], 0), scale + abs(added) + 1
    assert (abs(c - exact) <= accuracy.sum_rounding * scale + accuracy.c_rounding * abs(c) + 1e-7).all()
    assert np.array_equal(c, dtype.from_storage(dtype.to_storage(c)))


@dtypes
def test_a_wrong_weight_in_the_code_is_refused(dtype: Dtype) -> None:
    problem = pairs(dtype)
    weights = MATRIX.data.copy()
    place = int(np.argsort(abs(weights))[len(weights) // 2])
    weights[place] *= -1
    wrong = replace(problem, matrix=replace(MATRIX, data=weights))
    program = lower(wrong, UnrolledPlan(TileSize(8, 32), Schedule(8), regroup(MATRIX, [8])[8]))
    row = int(MATRIX.rows_of_nonzeros()[place])
    with pytest.raises(VerificationFailed, match=rf"row {row}, column \d+: got"):
        verify_on_cpu(problem, program, emit(program, "sass", "sm_90"))


@dtypes
def test_who_computes_in_pairs(dtype: Dtype) -> None:
    problem = pairs(dtype)
    assert lanes_of(problem) == PAIRS
    assert (in_lanes(problem).n, in_lanes(problem).dtype.name) == (N // 2, "float32")
    others = (
        replace(problem, n=N - 1),
        replace(problem, sums=DTYPES["float32"]),
        replace(problem, epilogue=epilogue_of(None, relu=True, residual=False)),
    )
    for other in others:
        assert lanes_of(other) == NARROW
        assert in_lanes(other).n == other.n
    assert lanes_of(Problem(MATRIX, N, H200)) == SINGLE


def test_other_emitters_have_no_pairs() -> None:
    problem = pairs(DTYPES["float16"])
    program = lower(problem, UnrolledPlan(TileSize(8, 32), Schedule(8), regroup(MATRIX, [8])[8]))
    for language in ("ptx", "cuda"):
        with pytest.raises(Unsupported, match=f"pairs of float16: {language} has no such kernels"):
            emit(program, language, "sm_90")


@dtypes
def test_sums_are_another_request_and_sent_with_it(dtype: Dtype, tmp_path: Path) -> None:
    store, sent = Store(tmp_path), request(dtype).settled()
    keep_matrix(MATRIX, store)
    read = from_json(to_json(sent), store)
    assert (read.problem.sums, read.digest) == (dtype, sent.digest)
    assert request(dtype, sums="float32").digest != request(dtype).digest


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "w.npy", WEIGHTS)
    asked = ["tune", str(tmp_path / "w.npy"), "--n", str(N), "--device", "h200", "--dtype", "bfloat16", "--json"]
    assert run([*asked, "--sums", "bfloat16", "--out", str(tmp_path / "kernel"), "--quiet"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["sums"], manifest["tile"]["thread_columns"]) == ("bfloat16", 2)
    assert run(["inspect", str(tmp_path / "kernel")]) == 0
    columns = 2 * manifest["tile"]["cols"]
    assert f"{manifest['tile']['rows']} rows x {columns} columns (2 a thread)" in capsys.readouterr().out
    assert run([*asked, "--sums", "float16", "--out", str(tmp_path / "other"), "--quiet"]) == 2
    assert "sums 'float16': with dtype bfloat16 choose float32 or bfloat16" in capsys.readouterr().err
