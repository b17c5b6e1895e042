"""Kernels for several N in one cubin with one copy of A, and what cannot be joined."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Self

import numpy as np
import pytest

import lospmm
from lospmm.errors import BadRequest, NothingFits, VerificationFailed
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.toolchain import elf
from lospmm.toolchain.data import data_of
from lospmm.tuning import one_copy, session
from lospmm.tuning.replay import replay
from tests.cli.command import draw

HALVES = draw(90, 300, density=0.5).astype(np.float16)
LOW = {"device": "h200", "dtype": "float16", "memory": "low"}


class FakeBench(Bench):
    """A GPU's worker, made by calling it, that finds this error, or a wrong C."""

    def __init__(self, error: float | None) -> None:
        self.error, self.began, self.ran, self.n = error, 0, [], 0

    def __call__(self, problem: Problem, *, cancel: object) -> Self:
        self.began += 1
        self.turn_to(problem, cancel)
        return self

    def open(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def turn_to(self, problem: Problem, _: object) -> None:
        self.n = problem.n

    def measure(self, _cubin: bytes, name: str, _launch: object, *, effort: object) -> SimpleNamespace:  # noqa: ARG002
        self.ran.append((self.n, name))
        return SimpleNamespace(max_relative_error=self.error, failure=None if self.error else "wrong")


def as_of_a_gpu(kernel: lospmm.Kernel) -> lospmm.Kernel:
    own = kernel.artifact
    verified = {**own.manifest["verified"], "on": "gpu"}
    return lospmm.Kernel(replace(own, manifest={**own.manifest, "verified": verified}))


@pytest.fixture(scope="module")
def apart() -> list[lospmm.Kernel]:
    return [lospmm.tune(HALVES, n, relu=True, **LOW) for n in (1, 8, 72)]


def test_one_cubin_has_all_kernels_and_a_once(apart: list[lospmm.Kernel]) -> None:
    together = lospmm.join(apart)
    (cubin,) = {kernel.cubin for kernel in together}
    data = data_of(cubin)
    assert {data_of(kernel.cubin) for kernel in apart} == {data}
    assert len(cubin) < 2 * len(data) < sum(len(kernel.cubin) for kernel in apart)
    for before, after in zip(apart, together, strict=True):
        own, manifest = before.manifest, after.manifest
        assert (manifest["name"], manifest["launch"], manifest["plan"]) == (own["name"], own["launch"], own["plan"])
        usage = elf.kernel_usage(cubin, manifest["name"])
        assert (manifest["registers"], usage.stack_bytes) == (usage.registers, 0) and usage.registers <= 168
        assert manifest["verified"] == own["verified"] and manifest["verified"]["on"] == "cpu"
        b = draw(300, manifest["n"], density=1.0).astype(np.float16)
        wanted = np.maximum(HALVES.astype(np.float64) @ b.astype(np.float64), 0)
        assert np.allclose(after.run_on_cpu(b), wanted, rtol=2e-3, atol=2e-2)
    assert [kernel.cubin for kernel in lospmm.join(together)] == [cubin] * 3


def test_what_cannot_be_joined(apart: list[lospmm.Kernel]) -> None:
    first, low = apart[0], {**LOW, "verify": "none"}
    with pytest.raises(BadRequest, match="lospmm_bitmap_n1 is given twice"):
        lospmm.join([first, lospmm.tune(HALVES * 2, 1, relu=True, **low)])
    with pytest.raises(BadRequest, match="the kernels differ in fingerprint"):
        lospmm.join([first, lospmm.tune(HALVES * 2, 8, relu=True, **low)])
    with pytest.raises(BadRequest, match="the kernels differ in epilogue"):
        lospmm.join([first, lospmm.tune(HALVES, 8, **low)])
    for families in ("bitmap", "unrolled"):
        other = lospmm.tune(HALVES, 16, relu=True, **(low | {"memory": "fast"}), families=families)
        with pytest.raises(BadRequest, match="store A in different layouts: tune each with memory low"):
            lospmm.join([first, other])


def test_what_memory_low_has_no_kernel_for() -> None:
    with pytest.raises(NothingFits, match="kernel for this: bitmap: n 65 is not a multiple of 8"):
        lospmm.tune(HALVES, 65, **LOW)
    with pytest.raises(BadRequest, match="memory low: choose dtype float16 or bfloat16, not float32"):
        lospmm.tune(HALVES, 64, **(LOW | {"dtype": "float32"}))
    with pytest.raises(BadRequest, match="families csr: with memory low choose bitmap, or all"):
        lospmm.tune(HALVES, 64, **LOW, families="csr")


def test_the_choice_is_made_again_from_the_log(apart: list[lospmm.Kernel]) -> None:
    assert all(replay(kernel.artifact, DEVICES["h200"]).agrees for kernel in apart)


def test_verified_elsewhere_is_not_verified_of_other_code(apart: list[lospmm.Kernel]) -> None:
    """What ran on a GPU was another cubin, and there is none here."""
    first, second, _ = apart
    found = lospmm.join([first, as_of_a_gpu(second)])
    assert [kernel.manifest["verified"] is None for kernel in found] == [False, True]


def test_verified_on_a_gpu_is_verified_there_once(apart: list[lospmm.Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process for all kernels; the GPU is a stand-in. A run that resumes needs no GPU."""
    bench = FakeBench(None)
    monkeypatch.setattr(one_copy, "own_gpu", lambda: "h200")
    monkeypatch.setattr(one_copy, "detect_device", lambda: DEVICES["h200"])
    monkeypatch.setattr(one_copy, "own_gpu_id", lambda: "GPU-0")
    monkeypatch.setattr(session, "Bench", bench)
    first, *others = apart
    asked = [first, *map(as_of_a_gpu, others)]
    with pytest.raises(VerificationFailed, match="lospmm_bitmap_n72, joined, on the GPU: wrong"):
        lospmm.join(asked)
    bench.error, bench.began, bench.ran = 1e-4, 0, []
    found = lospmm.join(asked)
    assert [kernel.manifest["verified"]["on"] for kernel in found] == ["cpu", "gpu", "gpu"]
    assert found[2].manifest["verified"] == {"on": "gpu", "max_relative_error": 1e-4, "columns": 72}
    assert bench.began == 1 and bench.ran == [(72, "lospmm_bitmap_n72"), (8, "lospmm_bitmap_n8")]
    again = lospmm.join(asked)
    assert [kernel.manifest for kernel in again] == [kernel.manifest for kernel in found] and bench.began == 1
