"""A family's kernel from request to artifact: the manifest, its files, the CPU, the command line."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.cli.main import run
from lospmm.errors import BadRequest, NothingFits
from lospmm.families.candidate import Candidate
from lospmm.kernel import Kernel, load
from lospmm.matrix.csr import from_dense
from lospmm.problem.accuracy import SUM_ROUNDING
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.tuning import forecast, jobs, refusal
from lospmm.tuning.known import Known
from lospmm.tuning.log import plans_log
from lospmm.tuning.options import FAMILY_NAMES, Options
from lospmm.tuning.plans import plans_for
from lospmm.tuning.race import FINALS, race_plans
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from tests.fixtures.lookup_runner import LookupRunner

M, K, N = 40, 30, 50
RNG = np.random.default_rng(5)
WEIGHTS = np.where(RNG.random((M, K)) < 0.3, RNG.normal(size=(M, K)), 0).astype(np.float32)
WEIGHTS[11] = 0


def request(**options: str) -> Request:
    epilogue = epilogue_of(np.arange(M, dtype=np.float32), relu=True, residual=True)
    problem = Problem(from_dense(WEIGHTS), N, DEVICES["h200"], None, epilogue)
    return Request(problem, Options(**{"families": "csr", **options}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(jobs.tune(request(), store=Store(tmp_path_factory.mktemp("store"))))


def test_the_manifest_names_the_family_and_its_plan(made: Kernel) -> None:
    manifest = made.manifest
    assert (manifest["family"], manifest["emitter"], manifest["tile"]) == ("csr", "template", None)
    assert manifest["plan"]["axes"].keys() == {"vector", "team", "slices", "group", "warps"}
    assert manifest["plan"]["data_bytes"] > 0 and manifest["code_bytes"] > 0
    assert manifest["search"]["chosen_by"] == "estimate" and manifest["search"]["space"] == 0
    (family,) = manifest["search"]["families"]
    assert family["name"] == "csr" and family["refusal"] is None and family["forecast_micros"] > 0
    assert manifest["verified"]["on"] == "cpu"
    assert manifest["verified"]["max_relative_error"] < SUM_ROUNDING
    assert "space.json" not in made.artifact.files and b"lospmm_rows" in made.artifact.files["kernel.cu"]
    log = [json.loads(line) for line in made.artifact.files["tuning.jsonl"].splitlines()]
    assert [(line["family"], line["rank"]) for line in log] == [("csr", 1)]


def test_it_is_saved_loaded_and_run(made: Kernel, tmp_path: Path) -> None:
    made.save(tmp_path / "kernel")
    kernel = load(tmp_path / "kernel")
    b, residual = RNG.normal(size=(K, N)).astype(np.float32), RNG.normal(size=(M, N)).astype(np.float32)
    expected = np.maximum(WEIGHTS.astype(float) @ b + residual + np.arange(M)[:, np.newaxis], 0)
    np.testing.assert_allclose(kernel.run_on_cpu(b, residual), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadRequest, match="takes a residual"):
        kernel.run_on_cpu(b)


def test_its_choice_is_made_again(made: Kernel) -> None:
    found = replay(made.artifact, DEVICES["h200"])
    assert found.agrees and found.timed == 0 and found.winner["family"] == "csr"


def timed(made: Kernel, micros: Callable[[Candidate], float]) -> tuple[Artifact, Known]:
    """The artifact of a tuning in which a made-up GPU took ``micros``."""
    problem = request().problem
    known = race_plans(plans_for(problem, ["csr"]), LookupRunner(micros))
    winner = forecast.winner_of(problem, known, "sass")
    manifest = dict(made.manifest)
    manifest["plan"] = {**manifest["plan"], "axes": asdict(winner.plan)}
    measured, chosen = len(known.trials), {"trials": "full", "chosen_by": "measurement"}
    manifest["search"] = {**manifest["search"], **chosen, "measured": measured}
    log = "".join(f"{json.dumps(line)}\n" for line in plans_log(known, first=1))
    return Artifact(manifest, {**made.artifact.files, artifact.TUNING_FILE: log.encode()}), known


def test_a_choice_by_time_is_made_again(made: Kernel) -> None:
    kept, known = timed(made, lambda one: 100.0 / one.plan.warps + one.plan.group)
    found = replay(kept, DEVICES["h200"])
    assert found.agrees and found.timed == len(known.trials) > 1

    lines = [json.loads(line) for line in kept.files[artifact.TUNING_FILE].splitlines()]
    for line in lines:  # the finals are what decides
        if line["final_micros"]:
            won = all(line[name] == value for name, value in found.winner.items())
            line["final_micros"] = [1e4 if won else 1e-3] * len(FINALS)
    changed = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    other = replay(Artifact(kept.manifest, {**kept.files, artifact.TUNING_FILE: changed}), DEVICES["h200"])
    assert other.timed == len(lines) and not other.agrees and other.winner != found.winner

    cut = b"".join(f"{json.dumps(line)}\n".encode() for line in lines[1:])
    with pytest.raises(BadRequest, match="no time of the candidate family csr"):
        replay(Artifact(kept.manifest, {**kept.files, artifact.TUNING_FILE: cut}), DEVICES["h200"])


def test_a_template_is_compiled_once_for_all_matrices(tmp_path: Path) -> None:
    store = Store(tmp_path)
    jobs.tune(request(verify="none"), store=store)
    units = [entry.key for entry in store.entries() if entry.kind == "unit"]
    other = replace(request(verify="none"), problem=replace(request().problem, matrix=from_dense(-2 * WEIGHTS)))
    jobs.tune(other, store=store)
    assert [entry.key for entry in store.entries() if entry.kind == "unit"] == units


def test_a_matrix_too_large_to_unroll_has_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = settings().model_copy(update={"max_nonzeros": 2})
    monkeypatch.setattr(refusal, "settings", lambda: few)
    made = jobs.tune(request(families="all", verify="none"), store=Store(tmp_path))
    assert made.manifest["family"] in FAMILY_NAMES[1:]


def test_a_matrix_that_is_read_may_be_too_large_to_unroll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unrolled has a limit of its own, so that more may be read without a search of kernels for it."""
    few = settings().model_copy(update={"max_unrolled_nonzeros": 2})
    monkeypatch.setattr(refusal, "settings", lambda: few)
    with pytest.raises(BadRequest, match="together more than the 2 of LOSPMM_MAX_UNROLLED_NONZEROS"):
        jobs.tune(request(families="unrolled"), store=Store(tmp_path))


def test_nobody_has_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = settings().model_copy(update={"max_nonzeros": 2})
    monkeypatch.setattr(refusal, "settings", lambda: few)
    monkeypatch.setattr("lospmm.families.rows.CSR_WARPS", ())
    with pytest.raises(NothingFits, match=r"no family has a kernel for this: unrolled: .* LOSPMM_MAX_NONZEROS; csr: "):
        jobs.tune(request(families="unrolled,csr"), store=Store(tmp_path))


def test_a_budget_of_nothing_times_nothing() -> None:
    resolved = Options(budget_seconds=0).resolved(DEVICES["h200"], "h200")
    assert (resolved.measure, resolved.verify, resolved.budget_seconds) == ("none", "gpu", None)


def test_what_an_unrolled_kernel_was_chosen_by_is_told(tmp_path: Path) -> None:
    """In 16 bits a model forecasts it: less than cuBLAS takes by forecast, or that would have been the choice."""
    rng = np.random.default_rng(3)
    weights = np.where(rng.random((256, 256)) < 0.11, rng.normal(size=(256, 256)), 0).astype(np.float32)
    problem = Problem(from_dense(weights), 64, DEVICES["h200"], dtype=DTYPES["float16"])
    manifest = jobs.tune(Request(problem, Options(verify="none", measure="none")), store=Store(tmp_path)).manifest
    assert (manifest["family"], manifest["search"]["chosen_by"]) == ("unrolled", "model")
    assert manifest["search"]["estimated_micros"] < manifest["search"]["dense_forecast_micros"]


def test_families_are_named_in_one_order() -> None:
    assert Options(families="csr, unrolled").families == "unrolled,csr"
    assert Options(families="all").family_names == FAMILY_NAMES
    with pytest.raises(BadRequest, match=r"families: 'dense-ish': choose some of unrolled, .*, or all"):
        Options(families="unrolled,dense-ish")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", WEIGHTS)
    out = tmp_path / "kernel"
    asked = ["tune", str(tmp_path / "a.npy"), "--n", "50", "--device", "h200", "--families", "csr"]
    assert run([*asked, "--quiet", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "csr" in text and "warps" in text
    assert artifact.read(out).manifest["family"] == "csr"
    assert run([*asked[:-1], "wrong", "--out", str(out)]) == 2
    assert "families: 'wrong': choose some of" in capsys.readouterr().err
