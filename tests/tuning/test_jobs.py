"""Jobs: a request is done once, its name says all that decides its kernel, and a failed one leaves nothing."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lospmm.artifact import artifact, kept
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.errors import BadRequest, LospmmError, NothingFits, ToolchainFault, Unsupported, VerificationFailed
from lospmm.matrix.csr import from_dense
from lospmm.matrix.readers import Values
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain import compilers, discover
from lospmm.tuning import build, jobs, tuner, winner
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from tests.fixtures.full_disk import take_no_kernels

WEIGHTS = np.array([[1, 0, 2], [0, 0, 0], [0, 3, 0]], dtype=np.float32)


def request(
    weights: Any = WEIGHTS,
    *,
    n: int = 4,
    device: str = "h200",
    values: Values = "stored",
    seed: int = 0,
    **options: Any,
) -> Request:
    matrix = from_dense(np.asarray(weights, dtype=np.float32))
    problem = Problem(matrix, n, DEVICES[device])
    return Request(problem, Options(**options), values, seed)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def kernels(store: Store) -> list[str]:
    return [entry.key for entry in store.entries() if entry.kind == kept.KERNELS]


def test_a_stored_kernel_is_read_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jobs.tune(request(), store=store)
    with Session(1) as session:
        for _ in range(2):
            jobs.search_ahead(request(), store=store, session=session)
        monkeypatch.setattr(jobs, "find", None)
        assert jobs.tune(request(), store=store, session=session).files == made.files


def test_the_digest_says_all_that_decides_a_kernel() -> None:
    different = [
        request(),
        request(WEIGHTS * 2),
        request(n=5),
        request(device="a100"),
        request(emitter="cuda"),
        request(verify="none"),
        request(shortlist_size=3),
        request(values="drawn"),
        request(values="drawn", seed=1),
    ]
    assert len({one.digest for one in different}) == len(different)
    same = [request(), request(seed=7)]  # a seed draws nothing where values are stored
    assert len({one.digest for one in same}) == 1


def test_a_limit_of_unrolled_kernels_makes_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leaves the unrolled family out, and only there."""
    before = request(families="all").digest
    digests = []
    for limit in (10_000, 2):
        monkeypatch.setenv("LOSPMM_MAX_UNROLLED_NONZEROS", str(limit))
        settings.cache_clear()
        digests.append(request(families="all").digest)
    monkeypatch.undo()
    settings.cache_clear()
    assert digests[0] == before != digests[1]


def test_another_toolkit_makes_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = request().digest
    older = replace(compilers.find_toolkit(), version="12.8.93")
    monkeypatch.setattr(compilers, "find_toolkit", lambda: older)
    assert request().digest != before


def test_a_request_is_done_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jobs.tune(request(), store=store)
    monkeypatch.setattr(tuner, "prepare", None)  # would fail
    assert jobs.tune(request(), store=store) == first
    assert kept.find(request().digest, store) == first
    assert kernels(store) == [request().digest]


def test_a_damaged_entry_is_built_again(store: Store) -> None:
    first = jobs.tune(request(), store=store)
    (store.directory(kept.KERNELS, request().digest) / "kernel.cubin").write_bytes(b"damaged")
    second = jobs.tune(request(), store=store)
    assert second.cubin == first.cubin
    assert store.verify() == []


def test_of_two_processes_both_give_what_the_first_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times in their manifests differ; scripts that compare artifacts must not see it."""
    put = Store.put
    first: dict[str, bytes] = {}

    def late(store: Store, kind: str, key: str, files: Mapping[str, bytes], like: str | None = None) -> bool:
        if kind == kept.KERNELS:
            manifest = json.loads(files["manifest.json"])
            manifest["seconds"]["total"] += 1
            first.update({**files, "manifest.json": json.dumps(manifest).encode()})
            put(store, kind, key, first)
        return put(store, kind, key, files, like)

    monkeypatch.setattr(Store, "put", late)
    assert jobs.tune(request(), store=store).files == first


def test_a_kernel_that_the_disk_does_not_take_is_not_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a line says so, once in a run."""
    take_no_kernels(monkeypatch, reason := f"{tmp_path} is full")
    for _ in range(2):
        made = jobs.tune(request(), store=store)
    assert caplog.messages == [f"note: kernels are not cached: {reason}"]
    assert made.cubin and not kernels(store)
    with pytest.raises(ToolchainFault, match=reason):  # as whoever has to have it there
        kept.keep(made, request().digest, store)


def test_the_file_is_the_kept_one(store: Store, tmp_path: Path) -> None:
    made = jobs.tune(request(), store=store)
    artifact.write(made, tmp_path / "kernel")
    assert {path.name: path.read_bytes() for path in (tmp_path / "kernel").iterdir()} == made.files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"emitter": "llvm"}, "emitter 'llvm': choose one of"),
        ({"ranker": "best"}, "ranker 'best': choose one of auto, none, lambdamart"),
        ({"measure": "often"}, "measure 'often': choose one of auto, gpu, none"),
        ({"verify": "yes"}, "verify 'yes': choose one of auto, gpu, cpu, none"),
        ({"dtype": "int8"}, "dtype 'int8': choose one of float32, tf32, float16, bfloat16"),
        ({"shortlist_size": 0}, "shortlist 0: at least 1"),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Options(**options)


def test_a_kernel_that_fails_verification_is_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem, winner: UnrolledPlan) -> KernelProgram:
        return lower(replace(problem, matrix=from_dense(WEIGHTS * 2)), winner)

    monkeypatch.setattr(build, "lower", wrong)
    with pytest.raises(VerificationFailed, match="column 0: got"):
        jobs.tune(request(), store=store)
    assert kernels(store) == []


def test_verification_can_be_left_out(store: Store) -> None:
    made = jobs.tune(request(verify="none"), store=store)
    assert made.manifest["verified"] is None
    assert made.manifest["seconds"]["verify"] == 0


def test_nothing_fits(store: Store) -> None:
    small = replace(DEVICES["h200"], name="small", registers_per_thread=8)
    asked = replace(request(families="unrolled"), problem=replace(request().problem, device=small))
    with pytest.raises(NothingFits, match="no tile size fits small: of 3, 3 by thread_registers"):
        jobs.tune(asked, store=store)


def test_an_old_gpu_is_refused_before_any_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "prepare", None)
    with pytest.raises(Unsupported, match=r"V100 .*needs a CUDA 12 toolkit"):
        jobs.tune(request(device="v100"), store=store)


def test_too_many_nonzeros_are_refused_before_any_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    few = settings().model_copy(update={"max_nonzeros": 2})
    monkeypatch.setattr("lospmm.tuning.refusal.settings", lambda: few)
    with pytest.raises(BadRequest, match="3 nonzeros and 3 rows: together more than the 2 of LOSPMM_MAX_NONZEROS"):
        jobs.tune(request(families="unrolled"), store=store)


@pytest.mark.parametrize(
    "at", [("reorder", 0, 1), ("emit", 0, 1), ("compile", 0, 1), ("verify", 0, 1), ("verify", 0, 2)]
)
def test_a_cancelled_job_keeps_no_kernel(store: Store, at: tuple[str, int, int]) -> None:
    """Nor one that is cancelled between two tiles of its verification, which takes minutes of a large matrix."""
    cancel = threading.Event()

    def progress(*reached: object) -> None:
        assert not cancel.is_set(), "nothing is done after it"
        if reached == at:
            cancel.set()

    with pytest.raises(CancelledError):
        jobs.tune(request(), store=store, progress=progress, cancel=cancel)
    assert kernels(store) == []


@pytest.mark.parametrize("fault", [NothingFits, VerificationFailed, BadRequest])
def test_exit_codes_are_those_of_the_errors(fault: type[LospmmError]) -> None:
    assert fault.exit_code == {NothingFits: 3, VerificationFailed: 5, BadRequest: 2}[fault]


def test_a_kernel_that_only_gxx_can_verify_is_refused_before_it_is_built(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "find_host_compiler", lambda: None)
    assert jobs.tune(request(emitter="sass"), store=store).manifest["verified"]["on"] == "cpu"
    monkeypatch.setattr(winner, "build", None)
    for options in ({"families": "csr"}, {"emitter": "cuda"}):
        with pytest.raises(ToolchainFault, match=r"by g\+\+, which is not on PATH"):
            jobs.tune(request(**options), store=store)
    monkeypatch.setattr(tuner, "winner_of", lambda _, known, __: known.plans[0])
    with pytest.raises(ToolchainFault, match=r"by g\+\+, which is not on PATH"):
        jobs.tune(request(n=8), store=store)
