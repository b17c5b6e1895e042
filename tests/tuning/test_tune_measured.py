"""A whole tuning with a GPU: candidates built, timed, the fastest verified and compared. The GPU is machine_gpu.py."""

import copy
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lospmm.artifact import artifact, kept
from lospmm.artifact.artifact import Artifact
from lospmm.artifact.manifest import FamilySummary
from lospmm.cli.main import run
from lospmm.errors import BadRequest, GpuFault
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.gpu.messages import Measurement
from lospmm.kernel import load
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.cubin import machine_code
from lospmm.tuning import history, jobs, prepare, race, request, runner, session, tuner, winner
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import build
from lospmm.tuning.history import TIMINGS
from lospmm.tuning.options import Options
from lospmm.tuning.race import POLICIES
from lospmm.tuning.replay import AXES, replay
from lospmm.tuning.request import Request
from tests.fixtures import machine_gpu
from tests.gpu.test_bench import gate_library

__all__ = ["gate_library"]  # a fixture

M, K, N = 10, 16, 40

#: A short search: each kernel takes a fifth of a second on this GPU.
SHORT = replace(POLICIES["full"], rounds=2, batch=1, ahead=1, finals=(3, 2))

#: Kernels of a shortlist, and those that are timed of so small a problem: none of it walks its code twice.
SHORTLISTED = 4
TIMED = SHORTLISTED + SHORT.rounds * SHORT.batch

#: Times that the winner is measured, and verified, beside the libraries.
COMPARED = 3


def weights() -> np.ndarray:
    rng = np.random.default_rng(3)
    dense = np.where(rng.random((M, K)) < 0.3, rng.normal(size=(M, K)), 0).astype(np.float32)
    dense[7] = 0
    return dense


WEIGHTS = weights()


#: Makes every Bench have a worker on the CPU, and searches short; ``fail`` says which kernels fail.
Install = Callable[..., None]


@pytest.fixture(scope="module")
def install(gate_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc")
    libraries = tmp_path_factory.mktemp("libraries") / "libfake.so"
    source = Path(__file__).parents[1] / "fixtures" / "fake_libraries.c"
    command = [compiler, "-shared", "-fPIC", "-DSTREAM=0", "-o", str(libraries), str(source)]
    subprocess.run(command, check=True, capture_output=True)

    def install(patch: pytest.MonkeyPatch, fail: int = 0) -> None:
        sizes = [str(size) for size in (M, K, N, fail)]
        worker = (sys.executable, "-P", machine_gpu.__file__, str(gate_library), str(libraries), *sizes)
        patch.setattr(session, "Bench", lambda problem, cancel: Bench(problem, cancel=cancel, command=worker))
        patch.setattr(race, "POLICIES", dict.fromkeys(("full", "proxy"), SHORT))
        patch.setattr(measure, "compile_gate", lambda _arch: b"gate")
        patch.setattr(request, "own_gpu", lambda: "h200")

    return install


@pytest.fixture
def on_the_machine(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture(scope="module")
def plain(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tuning with no options of its own."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        return tuned(Store(tmp_path_factory.mktemp("plain")))


def tuned(store: Store, **options: Any) -> Artifact:
    matrix = from_dense(WEIGHTS)
    asked = Request(
        Problem(matrix, N, DEVICES["h200"]),
        Options(**{"shortlist_size": SHORTLISTED, "families": "unrolled", **options}),
    )
    return jobs.tune(asked, store=store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_auto_measures_verifies_and_compares(plain: Artifact, tmp_path: Path) -> None:
    """And the kernel runs without a GPU."""
    manifest, log = plain.manifest, _log(plain)
    assert manifest["emitter"] == "sass"
    assert manifest["verified"]["on"] == "gpu"
    assert manifest["verified"]["columns"] == N
    assert 0 < manifest["verified"]["max_relative_error"] < 1e-6
    search = manifest["search"]
    assert (search["chosen_by"], search["trials"], search["measured"]) == ("measurement", "full", len(log))
    assert search["shortlisted"] == SHORTLISTED < len(log)  # and what promised most after it
    assert [line["rank"] for line in log] == [*range(1, len(log) + 1)]
    assert len({axes(line) for line in log}) == len(log)  # nothing timed twice
    assert all(line["failure"] is None and line["max_relative_error"] < 1e-6 for line in log)
    best = min(log, key=lambda line: line["measured_micros"])
    assert axes(manifest["tile"]) == axes(best)
    assert search["estimated_micros"] == best["estimated_micros"]

    code = machine_code(plain.cubin, manifest["name"], "sm_90")
    measured = manifest["measured"]
    assert measured["micros"] == best["measured_micros"] == pytest.approx(machine_gpu.micros_of(code))
    assert (measured["gpu"], measured["cold"]) == ("NVIDIA H200", True)
    assert measured["advice"] == ("dense" if measured["cublas_tf32_micros"] < measured["micros"] else "sparse")
    assert measured["cusparse_micros"] > 0
    seconds = manifest["seconds"]
    assert min(seconds[name] for name in ("compile_trials", "measure_trials", "compare")) > 0

    artifact.write(plain, tmp_path / "kernel")
    b = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)
    np.testing.assert_allclose(load(tmp_path / "kernel").run_on_cpu(b), WEIGHTS @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_the_machine")
def test_a_state_of_the_cache_has_its_own_times(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one problem: in the second tuning nothing is known, and all of it is timed anew."""
    parts: list[tuple[int, str]] = []
    part = Stages.part
    monkeypatch.setattr(Stages, "part", lambda self, name: (parts.append((id(self), name)), part(self, name))[1])
    cold = tuned(store, cache="cold").manifest
    assert len({stages for stages, _ in parts}) == 1  # all seconds are of the one tuning, those of choosing too
    assert [name for _, name in parts].count("rank") > 2
    network = tuned(store, cache="network").manifest
    for made, cache in ((cold, "cold"), (network, "network")):
        assert (made["measured"]["cache"], made["measured"]["cold"]) == (cache, cache == "cold")
        assert made["search"]["measured"] == TIMED
    assert network["measured"]["micros"] == pytest.approx(cold["measured"]["micros"])  # the machine's are of the code
    entries = [store.directory(TIMINGS, entry.key) for entry in store.entries() if entry.kind == TIMINGS]
    states = {json.loads((one / history.CONDITIONS_FILE).read_text())["cache"]: one for one in entries}
    lines = [len((one / history.LINES_FILE).read_text().splitlines()) for one in states.values()]
    assert set(states) == {"cold", "network"} and lines[0] == lines[1]


@pytest.mark.usefixtures("on_the_machine")
def test_proxies_are_timed_and_then_the_kernels_of_the_fastest(store: Store) -> None:
    made = tuned(store, trials="proxy")
    assert made.manifest["search"]["trials"] == "proxy" and made.manifest["verified"]["on"] == "gpu"
    log = _log(made)
    assert [line["max_relative_error"] is None for line in log] == [True] * len(log), "a proxy has no result"
    best = min((line for line in log if len(line["final_micros"]) == 2), key=lambda line: min(line["final_micros"]))
    assert axes(made.manifest["tile"]) == axes(best)
    assert replay(made, DEVICES["h200"]).agrees


@pytest.mark.usefixtures("on_the_machine")
@pytest.mark.parametrize(("measured", "verify"), [("none", "gpu"), ("gpu", "none")])
def test_each_alone(store: Store, measured: str, verify: str) -> None:
    manifest = tuned(store, measure=measured, verify=verify).manifest
    assert (manifest["measured"] is None) == (measured == "none")
    assert manifest["search"]["chosen_by"] == ("model" if measured == "none" else "measurement")
    assert (manifest["verified"] or {"on": "none"})["on"] == verify


@pytest.mark.usefixtures("on_the_machine")
def test_a_budget_ends_the_search(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lospmm.tuning.budget.LEAST_SEARCH_SECONDS", 0.0)
    made = tuned(store, budget_seconds=1e-9)
    manifest = made.manifest
    assert manifest["search"]["measured"] == 1
    assert manifest["search"]["chosen_by"] == "measurement"
    assert manifest["verified"]["on"] == "gpu"
    assert manifest["measured"]["micros"] > 0
    assert manifest["measured"]["cusparse_micros"] is None, "there was no time for the libraries"
    assert replay(made, DEVICES["h200"]).agrees


@pytest.mark.usefixtures("on_the_machine")
@pytest.mark.parametrize("budget", [4.0, 8.0])
def test_a_budget_is_for_all_of_it(store: Store, monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    """By a clock that only what takes long moves: the GPU, the builds, the exploration and the libraries."""
    now = [0.0]

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return work(*arguments, **options)

        return slowly

    monkeypatch.setattr(jobs, "Budget", lambda seconds: Budget(seconds, clock=lambda: now[0]))
    monkeypatch.setattr(prepare, "search", taking(0.5, prepare.search))
    monkeypatch.setattr(runner, "build", taking(0.05, build))
    monkeypatch.setattr(winner, "build", taking(0.2, build))
    monkeypatch.setattr(Bench, "measure", taking(0.2, Bench.measure))
    monkeypatch.setattr(Bench, "request", taking(0.3, Bench.request))
    manifest = tuned(store, budget_seconds=budget).manifest
    assert now[0] <= 1.1 * budget
    assert now[0] >= 0.5 * budget or manifest["search"]["measured"] == TIMED
    assert (manifest["measured"]["cusparse_micros"] is not None) == (budget > 5)


@pytest.mark.usefixtures("on_the_machine")
def test_a_budget_that_is_enough_changes_nothing(plain: Artifact, store: Store) -> None:
    long = tuned(store, budget_seconds=1e6)
    assert long.cubin == plain.cubin
    assert [line["measured_micros"] for line in _log(long)] == [line["measured_micros"] for line in _log(plain)]
    assert long.manifest["measured"]["cusparse_micros"] > 0


@pytest.mark.usefixtures("on_the_machine")
def test_the_gpu_starts_while_the_search_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its process ends with a search that is interrupted."""

    def workers() -> list[psutil.Process]:
        children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
        return [one for one in children if machine_gpu.__file__ in one.cmdline()]

    def prepare(*_: object) -> None:
        assert len(workers()) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        tuned(store)
    assert not workers()


@pytest.mark.usefixtures("on_the_machine")
def test_nothing_is_measured_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed in the middle, the same again, and one that asks for more."""
    measured: list[str] = []
    real = Bench.measure

    def counted(bench: Bench, cubin: bytes, *arguments: Any, **options: Any) -> Measurement:
        if len(measured) == stop_at:
            raise KeyboardInterrupt
        measured.append(hashlib.sha256(cubin).hexdigest())
        return real(bench, cubin, *arguments, **options)

    monkeypatch.setattr(Bench, "measure", counted)
    stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        tuned(store)
    first, stop_at = list(measured), -1
    measured.clear()
    made = tuned(store)
    whole = made.manifest["search"]["measured"]
    assert len(measured) == whole - len(first) + sum(SHORT.finals) + COMPARED
    measured.clear()
    again = tuned(store, verify="cpu")  # another request for the same kernel
    assert again.manifest["verified"]["on"] == "cpu" and again.manifest["measured"] is not None
    assert again.cubin == made.cubin and _log(again) == _log(made)
    assert len(measured) == COMPARED
    measured.clear()
    wider = tuned(store, shortlist_size=6)
    asked = {axes(line) for line in _log(wider)} - {axes(line) for line in _log(made)}
    assert len(measured) <= len(asked) + sum(SHORT.finals) + COMPARED
    assert [entry.kind for entry in store.entries()].count(TIMINGS) == 1
    assert store.verify() == []


@pytest.mark.usefixtures("on_the_machine")
def test_a_choice_is_made_again_without_a_gpu(plain: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plain
    monkeypatch.setattr(session, "Bench", None)
    found = replay(made, DEVICES["h200"])
    assert found.agrees and found.timed == made.manifest["search"]["measured"]

    lines = _log(made)
    last = [line for line in lines if len(line["final_micros"]) == len(SHORT.finals)]
    second = next(line for line in last if any(line[axis] != found.winner[axis] for axis in found.winner))
    second["final_micros"] = [1e-3] * len(SHORT.finals)
    changed = _with_log(made, lines)
    found = replay(changed, DEVICES["h200"])
    assert not found.agrees and found.winner == {axis: second[axis] for axis in found.winner}
    with pytest.raises(
        BadRequest, match=r"tuning\.jsonl has no time of the candidate family unrolled, rows \d+, cols \d+"
    ):
        replay(_with_log(made, lines[1:]), DEVICES["h200"])
    with pytest.raises(BadRequest, match=r"tuning\.jsonl is damaged, or of an earlier version"):
        replay(_with_log(made, [{"rank": 1}]), DEVICES["h200"])
    for line in (b"[1, 2]", b"null", b'"x"', b"true", b"[" * 100_000):
        with pytest.raises(BadRequest, match=r"tuning\.jsonl is damaged, or of an earlier version"):
            replay(replace(made, files={**made.files, "tuning.jsonl": line}), DEVICES["h200"])
    manifest = copy.deepcopy(dict(made.manifest))
    manifest["search"]["families"] = [{**dict.fromkeys(FamilySummary.__slots__), "name": "x"}]
    with pytest.raises(BadRequest, match="comes from another version: families: 'x': choose some of"):
        replay(replace(made, manifest=manifest), DEVICES["h200"])
    with pytest.raises(BadRequest, match="was tuned for h200, not for a100"):
        replay(made, DEVICES["a100"])


def test_a_choice_by_estimate_is_made_again(store: Store) -> None:
    assert replay(tuned(store, measure="none"), DEVICES["h200"]).agrees


def _with_log(made: Artifact, lines: list[dict[str, Any]]) -> Artifact:
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    return replace(made, files={**made.files, "tuning.jsonl": content})


def axes(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[axis] for axis in AXES)


def test_kernels_that_fail_are_passed_over(
    plain: Artifact, store: Store, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plain.manifest
    install(monkeypatch, fail=before["registers"])
    made = tuned(store)
    log = _log(made)
    failed = [line for line in log if line["failure"] is not None]
    assert failed and len(failed) < len(log)
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in line["failure"] for line in failed)
    assert all(line["measured_micros"] is None for line in failed)
    assert made.manifest["registers"] != before["registers"]
    assert made.manifest["measured"]["micros"] == min(line["measured_micros"] for line in log if line not in failed)


def _log(made: Artifact) -> list[dict[str, Any]]:
    return [json.loads(line) for line in made.files["tuning.jsonl"].splitlines()]


def test_where_none_runs_nothing_is_kept(store: Store, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fail=-1)
    with pytest.raises(GpuFault, match=r"none of 2 kernels ran: .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        tuned(store, shortlist_size=2)
    assert [entry.kind for entry in store.entries()].count(kept.KERNELS) == 0


def test_another_machines_gpu_is_refused_before_any_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "own_gpu", lambda: "a100")
    monkeypatch.setattr(tuner, "prepare", None)
    with pytest.raises(BadRequest, match="measure gpu: h200 is needed, and this machine has a100"):
        tuned(store, measure="gpu")


@pytest.mark.usefixtures("on_the_machine")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lospmm.gpu.detect.detect_device", lambda: DEVICES["h200"])
    np.save(tmp_path / "w.npy", WEIGHTS)
    command = ["tune", str(tmp_path / "w.npy"), "--n", str(N), "--out", str(tmp_path / "out"), "--measure", "gpu"]
    command += ["--families", "unrolled", "--shortlist", "2"]
    assert run([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["measured"]["gpu"] == "NVIDIA H200"
    assert run([*command, "--quiet"]) == 0
    assert "measured" in capsys.readouterr().out
