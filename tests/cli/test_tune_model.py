"""lospmm tune-model: every layer in a folder of its own, the bad ones named, and a second run that goes on."""

import errno
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import lospmm
from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadRequest, LospmmError, NothingFits, ToolchainFault, VerificationFailed, printable
from lospmm.matrix.csr import from_dense
from lospmm.matrix.layers import open_model
from lospmm.model import batch
from lospmm.model.folder import Batch, ModelFolder, alone_in
from lospmm.model.layer_table import ANY, LayerSpec, LayerTable
from lospmm.model.report import COLUMNS
from lospmm.store import is_locked_alone
from lospmm.toolchain import discover
from lospmm.tuning import jobs, one_copy
from lospmm.tuning.request import Request
from tests.cli.command import COMMAND, H200, WEIGHTS, Answer, Command, draw
from tests.fixtures.files import smtx
from tests.fixtures.waiting import wait_until
from tests.server.conftest import make_slow_toolkit

pytestmark = pytest.mark.usefixtures("own_cache")


class Killed(BaseException):
    """What nobody catches."""


LAYERS = {
    "fc.0": WEIGHTS,
    "fc.1": draw(4, 24, seed=1),
    "fc.2": WEIGHTS,
    "conv": draw(8, 24, seed=2).reshape(8, 6, 2, 2),
    "bias": np.ones(4, np.float32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(LAYERS, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def tune_model(lospmm_command: Command, tmp_path: Path) -> Callable[..., Answer]:
    def run(model: Path, *more: object, n: int | str = 32, out: Path | None = None) -> Answer:
        return lospmm_command("tune-model", model, "--n", n, *H200, "--out", out or tmp_path / "out", *more)

    return run


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprints of what was really asked to be tuned."""
    asked: list[str] = []
    chosen = jobs.chosen

    def listed(request: Request, **options: Any) -> Callable[[], Artifact]:
        asked.append(request.problem.matrix.fingerprint)
        return chosen(request, **options)

    monkeypatch.setattr(jobs, "chosen", listed)
    return asked


def report_in(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "report.json").read_text())


def launches_in(folder: Path) -> list[tuple[str | int, ...]]:
    """The lines of kernels.tsv but the first, numbers as such."""
    heads, *lines = (folder / "kernels.tsv").read_text().splitlines()
    assert heads.split("\t") == list(COLUMNS)
    return [tuple(int(cell) if cell.isdigit() else cell for cell in line.split("\t")) for line in lines]


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_dir()}


def test_every_weight_has_a_folder(tune_model: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    answer = tune_model(model)
    assert answer.status == 0, answer.err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"fc.0", "fc.1", "fc.2", "conv", "report.json", "kernels.tsv"}
    heads, *rows = answer.out.splitlines()
    assert heads.split() == ["layer", "N", "shape", "sparsity", "us", "dense", "us", "advice"]
    assert [row.split()[:2] for row in rows[:-1]] == [[name, "32"] for name in ("conv", "fc.0", "fc.1", "fc.2")]
    assert all(row.endswith("not timed") and " ~" in row for row in rows[:-1])
    assert re.fullmatch(r"N 32: ~[0-9.]+ us, dense ~[0-9.]+ us \(4 layers\)", rows[-1])
    report = report_in(out)
    assert (report["model"], report["n"], report["device"]) == ("net", 32, "h200")
    assert report["layers"].pop()["skipped"] == "a vector: no kernel of its own"
    for layer in report["layers"]:
        kernel = artifact.read(out / layer["folder"])
        for name in ("cubin_sha256", "launch", "m", "k", "n", "nnz"):
            assert layer[name] == kernel.manifest[name], name
        assert layer["entry"] == kernel.manifest["name"]
        assert layer["sparsity"] == pytest.approx(1 - kernel.matrix().nnz / (layer["m"] * layer["k"]))
        assert (layer["error"], layer["micros"], layer["advice"]) == (None, None, None)
    assert (report["layers"][0]["m"], report["layers"][0]["k"]) == (8, 24)
    assert launches_in(out) == [
        (
            layer["entry"],
            layer["m"],
            layer["k"],
            32,
            *launch["grid"],
            launch["block"],
            launch["shared_bytes"],
            name,
            name,
        )
        for layer in report["layers"]
        for launch, name in [(layer["launch"], layer["name"])]
    ]
    layers = [f"kernel {at} of 4: {name}" for at, name in enumerate(("conv", "fc.0", "fc.1", "fc.2"), 1)]
    note, *rest = answer.err.splitlines()
    assert note.startswith("note: kernels of products for the 4-D weights conv, which lospmm.nn.load_ cannot use: ")
    assert rest[:-1] == layers


def test_several_columns(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, tunings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row and a folder for each layer and N; a second run asks for none of them, a third for what is new."""
    answer = tune_model(model, n="8, 1")
    assert answer.status == 0, answer.err
    out, names = tmp_path / "out", ["conv", "fc.0", "fc.1", "fc.2"]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {f"{name}@{n}" for name in names for n in (1, 8)}
    report = report_in(out)
    rows = [(row["name"], row["n"], row["folder"]) for row in report["layers"][:-1]]
    assert rows == [(name, n, f"{name}@{n}") for name in names for n in (1, 8)]
    assert (report["n"], [(line[3], line[-2]) for line in launches_in(out)]) == (None, [row[1:] for row in rows])
    for n, total in zip((1, 8), report["totals"], strict=True):
        own = [row for row in report["layers"] if row["n"] == n]
        assert (total["n"], total["layers"], total["timed"]) == (n, 4, 0)
        assert total["dense_micros"] == pytest.approx(sum(row["dense_forecast_micros"] for row in own))
        assert total["chosen_micros"] == pytest.approx(sum(row["estimated_micros"] for row in own))
    assert [row.split()[:2] for row in answer.out.splitlines()[1:9]] == [[name, str(n)] for name, n, _ in rows]
    assert "kernel 2 of 8: conv@8\n" in answer.err
    assert {name: one.manifest["n"] for name, one in lospmm.load_model(out).items()} == {
        folder: n for _, n, folder in rows
    }
    assert len(tunings) == 8 and len(set(tunings)) == 3, "fc.2 is answered by the store"
    assert [(out / f"fc.0@{n}" / "matrix.npz").stat().st_nlink for n in (1, 8)] == [2, 2], "on the disk once"
    before, read = inodes(out), []
    with monkeypatch.context() as patched:
        patched.setattr(Artifact, "matrix", lambda kernel: read.append(kernel.manifest["name"]))
        assert tune_model(model, "--quiet", n="1,8").status == 0
    assert len(read) == len(names), "a file that kernels share is read once"
    for n, more in (("1,8", 0), ("1,8,16", 4)):
        tunings.clear()
        assert tune_model(model, "--quiet", n=n).status == 0
        assert len(tunings) == more and before.items() <= inodes(out).items()
    assert [total["n"] for total in report_in(out)["totals"]] == [1, 8, 16]


def test_one_copy_of_each_layer(
    tune_model: Callable[..., Answer], tmp_path: Path, tunings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --memory low; a stopped run joins the rest, a new N joins the others, and what cannot be joined fails."""
    halves = WEIGHTS.astype(np.float16)
    save_file({"a": halves, "b": 2 * halves}, tmp_path / "net.safetensors")  # other data, but the same text to compile
    low = (tmp_path / "net.safetensors", "--dtype", "float16", "--memory", "low", "--quiet", "--verify", "none")
    out, real = tmp_path / "out", one_copy.joined
    answer = tune_model(low[0], "--memory", "low", n="1,8")
    assert (answer.status, answer.error) == (2, "memory low: choose dtype float16 or bfloat16, not float32")

    def cubins() -> dict[str, set[int]]:
        return {name: {path.stat().st_ino for path in out.glob(f"{name}@*/kernel.cubin")} for name in "ab"}

    def killed(kernels: Sequence[Artifact], **given: Any) -> list[Artifact]:
        if kernels[0].manifest["fingerprint"] != from_dense(halves).fingerprint:
            raise Killed
        return real(kernels, **given)

    monkeypatch.setattr(batch, "joined", killed)
    with pytest.raises(Killed):
        tune_model(*low, n="1,8")
    assert [len(found) for found in cubins().values()] == [1, 2]
    monkeypatch.setattr(batch, "joined", real)
    tunings.clear()
    assert tune_model(*low, n="1,8").status == 0
    assert [len(found) for found in cubins().values()] == [1, 1] and tunings == []
    assert tune_model(*low, n="1,8,16").status == 0
    assert [len(found) for found in cubins().values()] == [1, 1] and len(tunings) == 2
    for row in report_in(out)["layers"]:
        kernel = artifact.read(out / row["folder"])
        assert kernel.manifest["cubin_sha256"] == row["cubin_sha256"] and kernel.manifest["n"] == row["n"]
    before = inodes(out)
    monkeypatch.setattr(batch, "joined", None)
    assert tune_model(*low, n="1,8,16").status == 0
    assert inodes(out) == before, "nothing is joined again"

    def failing(*_: object, **__: object) -> None:
        raise faults.pop()

    faults: list[LospmmError] = [ToolchainFault("no CUDA toolkit")] * 2
    monkeypatch.setattr(batch, "joined", failing)
    answer = tune_model(*low, n="1,2")
    assert (answer.status, answer.error.rpartition(", of ")[2]) == (4, "a, b: no CUDA toolkit")
    assert not any(row["error"] for row in report_in(out)["layers"]), "a client of a service may have no compilers"
    faults += [VerificationFailed("other numbers, joined")] * 2
    answer = tune_model(*low, n="1,2")
    assert answer.status == 5
    assert {row["error"]["message"] for row in report_in(out)["layers"]} == {"other numbers, joined"}


@pytest.mark.parametrize(
    ("n", "says"),
    [
        ("1,,8", "n is '1,,8': give a number of columns, or several, as 1,8,512"),
        ("0", "n is 0: B must have from 1 to 1073741823 columns"),
        ("4,-1", "n is '4,-1': give a number of columns, or several, as 1,8,512"),
    ],
)
def test_columns_that_are_none(tune_model: Callable[..., Answer], model: Path, n: str, says: str) -> None:
    answer = tune_model(model, n=n)
    assert (answer.status, answer.error) == (2, says)


def test_several_columns_of_a_convolution(tune_model: Callable[..., Answer], model: Path) -> None:
    answer = tune_model(model, "--conv", "1x6x4x4,2x2", n="1,8")
    assert (answer.status, answer.error) == (2, "n has several values; a convolution's follows from its window")


def test_json_and_quiet(tune_model: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    answer = tune_model(model, "--json", "--quiet")
    assert (answer.status, answer.err) == (0, "")
    assert json.loads(answer.out) == report_in(tmp_path / "out")


def test_equal_layers_are_tuned_once_and_finished_ones_not_again(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, tunings: list[str]
) -> None:
    assert tune_model(model).status == 0
    assert len(set(tunings)) == 3
    before, first = inodes(tmp_path / "out"), report_in(tmp_path / "out")
    for file in ("kernel.cubin", "matrix.npz"):
        tunings.clear()
        (tmp_path / "out" / "fc.1" / file).write_bytes(b"damaged")
        assert tune_model(model).status == 0
        assert len(tunings) == 1
        after = inodes(tmp_path / "out")
        assert {name for name in before if before[name] != after[name]} == {"fc.1"}
        assert report_in(tmp_path / "out") == first
        before = after
    assert tune_model(model, n=33).status == 0
    assert all(artifact.read(tmp_path / "out" / name).manifest["n"] == 33 for name in before)


def test_a_layer_is_written_down_while_the_next_one_is_tuned(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for an equal one, which waits for it and is then found in the store."""
    chosen = jobs.chosen
    begun: list[str] = []
    ended: list[str] = []
    second = threading.Event()

    def watched(request: Request, **options: Any) -> Callable[[], Artifact]:
        digest = request.digest
        assert begun.count(digest) == ended.count(digest), "an equal layer is under way"
        begun.append(digest)
        if len(begun) == 2:
            second.set()
        finish = chosen(request, **options)

        def finished() -> Artifact:
            assert second.wait(20), "the second layer was not begun"
            kernel = finish()
            ended.append(digest)
            return kernel

        return finished

    monkeypatch.setattr(jobs, "chosen", watched)
    assert tune_model(model, "--quiet").status == 0
    assert len(set(begun)) == 3 and ended == begun
    assert [layer["error"] for layer in report_in(tmp_path / "out")["layers"]] == [None] * 5


def test_a_run_that_was_stopped_goes_on(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its second layer, and once more before it has come to a layer that it had."""
    chosen, write = jobs.chosen, artifact.write
    asked: list[int] = []

    def stopped(request: Request, **options: Any) -> Callable[[], Artifact]:
        asked.append(request.problem.matrix.m)
        if len(asked) == 2:
            raise Killed
        return chosen(request, **options)

    monkeypatch.setattr(jobs, "chosen", stopped)
    with pytest.raises(Killed):
        tune_model(model, "--quiet")
    assert [layer["name"] for layer in report_in(tmp_path / "out")["layers"]] == ["conv", "bias"]
    assert tune_model(model, "--quiet").status == 0
    assert asked == [8, 4, 4, 4, 4]
    shutil.rmtree(tmp_path / "out" / "conv")

    def killed(_artifact: Artifact, _directory: Path, **_: object) -> None:
        raise Killed

    monkeypatch.setattr(artifact, "write", killed)
    with pytest.raises(Killed):
        tune_model(model, "--quiet")
    assert len(report_in(tmp_path / "out")["layers"]) == 5, "what is known of the others is not forgotten"
    monkeypatch.setattr(artifact, "write", write)
    asked.clear()
    assert tune_model(model, "--quiet").status == 0
    assert asked == [8]


def test_bad_layers_fail_alone_and_the_worst_decides(
    tune_model: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"good": WEIGHTS, "nan": np.full((4, 4), np.nan, np.float32)}, tmp_path / "net.safetensors")
    answer = tune_model(tmp_path / "net.safetensors", "--quiet")
    assert answer.status == 6
    assert answer.error == "layer nan: net.safetensors: row 0, column 0: nan is not a finite float32"
    assert answer.out.splitlines()[2].endswith("no kernel: BadMatrix")
    good, bad = report_in(tmp_path / "out")["layers"]
    assert good["error"] is None and artifact.read(tmp_path / "out" / "good")
    assert bad["error"] == {"type": "BadMatrix", "message": answer.error.removeprefix("layer nan: "), "exit_code": 2}
    assert not (tmp_path / "out" / "nan").exists()
    save_file({"good": WEIGHTS}, tmp_path / "net.safetensors")
    assert tune_model(tmp_path / "net.safetensors", "--quiet").status == 0, "nothing of the other is there"

    failures = [NothingFits("too tall"), VerificationFailed("other numbers")]
    monkeypatch.setattr(jobs, "chosen", lambda *_, **__: (_ for _ in ()).throw(failures.pop()))
    save_file({"a": WEIGHTS, "b": WEIGHTS * 2}, tmp_path / "all.safetensors")
    answer = tune_model(tmp_path / "all.safetensors", "--quiet", "--json", out=tmp_path / "bad")
    assert answer.status == 5
    kinds = [layer["error"]["type"] for layer in json.loads(answer.out)["layers"]]
    assert kinds == ["VerificationFailed", "NothingFits"]


def test_weights_that_are_not_pruned_are_skipped(
    tune_model: Callable[..., Answer], tunings: list[str], tmp_path: Path, set_environment: Callable[..., None]
) -> None:
    """Also the last one, after which no kernel is written, and one with more nonzeros than are read."""
    save_file({"embed": draw(8, 24, density=1), "fc": WEIGHTS, "head": draw(4, 24, density=1)}, tmp_path / "net.st")
    set_environment("LOSPMM_MAX_NONZEROS", 100)
    few = "fewer zeros than the 40% of min_sparsity"
    shown = tune_model(tmp_path / "net.st", "--quiet", n="32,40").out
    assert (shown.count(f"skipped: {few}"), len(tunings)) == (2, 2)
    assert [layer["skipped"] for layer in report_in(tmp_path / "out")["layers"]] == [few, None, None, few]
    above = tune_model(tmp_path / "net.st", "--quiet", "--min-sparsity", 0.9, out=tmp_path / "new")
    assert above.status == 2 and f"no layer is asked for: embed: {few.replace('40', '90')};" in above.error
    assert not (tmp_path / "new").exists()
    set_environment("LOSPMM_MAX_NONZEROS", 1000)
    assert tune_model(tmp_path / "net.st", "--quiet", "--min-sparsity", 0).status == 0
    assert [layer["sparsity"] for layer in report_in(tmp_path / "out")["layers"]][::2] == [0, 0]


def test_weights_of_16_bits_are_noted(
    tune_model: Callable[..., Answer], lospmm_command: Command, tmp_path: Path
) -> None:
    """By the first layer, before it is tuned."""
    layers = {"bad": np.full((4, 4), np.nan, np.float32), "fc.0": WEIGHTS}
    save_file({name: weights.astype(np.float16) for name, weights in layers.items()}, tmp_path / "net.safetensors")
    (tmp_path / "half.toml").write_text('[layers."fc.0"]\nn = 32\ndtype = "float16"\n')
    answer = tune_model(tmp_path / "net.safetensors", "--quiet", "--verify", "none", n="32,40")
    elements = "note: all weights are float16; B and C are float32 unless --dtype float16 says otherwise"
    assert [line for line in answer.err.splitlines() if line.startswith("note: ")] == [elements]
    table = ("--layers", tmp_path / "half.toml", *H200, "--quiet", "--verify", "none", "--out", tmp_path / "half")
    assert lospmm_command("tune-model", tmp_path / "net.safetensors", *table).err == ""


def test_a_model_that_only_gxx_can_verify_is_refused_once(
    tune_model: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "find_host_compiler", lambda: None)
    save_file({"a": WEIGHTS, "b": WEIGHTS}, tmp_path / "net.safetensors")
    answer = tune_model(tmp_path / "net.safetensors", "--families", "csr,hyb")
    assert (answer.status, len(answer.err.splitlines())) == (4, 1)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_matrices(tune_model: Callable[..., Answer], tmp_path: Path) -> None:
    folder = tmp_path / "layers.v1"
    (folder / "more.npz").mkdir(parents=True)
    np.save(folder / "fc10.npy", WEIGHTS)
    np.save(folder / "fc9.npy", LAYERS["fc.1"])
    (folder / "pattern.smtx").write_bytes(smtx(WEIGHTS))
    (folder / "torn.npy").write_bytes(b"\x93NUMPY")
    (folder / "torn2.safetensors").write_bytes(b"\xff" * 7)
    save_file({"x.w": WEIGHTS, "x.v": WEIGHTS}, folder / "x.safetensors")
    for ignored in ("config.json", ".hidden.npy", "README.md"):
        (folder / ignored).write_text("{}")
    answer = tune_model(folder, "--seed", 4, "--json", "--quiet")
    assert answer.status == 6
    assert len(answer.err.splitlines()) == 2
    report = json.loads(answer.out)
    assert report["model"] == "layers.v1"
    assert [layer["name"] for layer in report["layers"]] == [
        "fc9", "fc10", "pattern", "torn", "torn2", "x.v", "x.w",
    ]  # fmt: skip
    assert [layer["error"] is None for layer in report["layers"]] == [True, True, True, False, False, True, True]
    assert artifact.read(tmp_path / "out" / "pattern").manifest["seed"] == 4


def test_names_that_are_no_folders(tune_model: Callable[..., Answer], tmp_path: Path) -> None:
    names = ["a/b", "report.json", "Kernels.TSV", "x" * 300, "", ".hidden", "ü", "-rf", "a b"]
    save_file({name: draw(4, 8, density=0.4, seed=at) for at, name in enumerate(names)}, tmp_path / "net.safetensors")
    answer = tune_model(tmp_path / "net.safetensors", "--json", "--quiet")
    assert answer.status == 0, answer.err
    report = json.loads(answer.out)
    assert {layer["name"] for layer in report["layers"]} == set(names)
    folders = {layer["folder"] for layer in report["layers"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == folders | {"report.json", "kernels.tsv"}
    assert {launch[-1] for launch in launches_in(tmp_path / "out")} == {printable(name) for name in names}
    assert {launch[-2] for launch in launches_in(tmp_path / "out")} == folders
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "out", "cache"}
    save_file({"../up": WEIGHTS}, tmp_path / "evil.safetensors")
    answer = tune_model(tmp_path / "evil.safetensors", "--quiet", out=tmp_path / "evil")
    assert (answer.status, "could point outside" in answer.error) == (2, True)
    assert not (tmp_path / "evil").exists()


def test_requests_that_are_refused_before_any_work(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, tunings: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "twins").mkdir()
    np.save(tmp_path / "twins" / "w.npy", WEIGHTS)
    shutil.copy(tmp_path / "twins" / "w.npy", tmp_path / "twins" / "w.mtx")
    (tmp_path / "empty").mkdir()
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "thesis.tex").write_text("years")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "report.json").write_text('{"schema": 1')
    np.save(tmp_path / "w.npy", WEIGHTS)
    for wrong, says in (
        ((tmp_path / "none",), "there is no such file"),
        ((tmp_path / "empty",), "no matrix file lies in this folder"),
        ((tmp_path / "twins",), "two layers are called 'w'"),
        ((tmp_path / "w.npy",), "no .safetensors, .onnx or .pt"),
        ((Path("/dev/null"),), "device or pipe"),
        ((model, "--emitter", "wasm"), "emitter 'wasm'"),
        ((model, "--measure", "gpu"), "measure gpu: h200 is needed"),
        ((model, "--n", 0), "n is 0: B must have"),
        ((model, "--out", tmp_path / "file"), "is a file; name a folder"),
        ((model, "--out", tmp_path / "file" / "below"), "is a file; name a folder"),
        ((model, "--out", tmp_path / "held"), "holds something other than a model's kernels"),
        ((model, "--out", tmp_path / "damaged"), "is no report of `lospmm tune-model`, or damaged"),
    ):
        answer = tune_model(*wrong, "--quiet")
        assert (answer.status, answer.out) == (2, ""), answer
        assert says in answer.error
    assert not tunings
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "held" / "thesis.tex").read_text() == "years"


def test_a_wrong_command_leaves_a_model_as_it_is(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path
) -> None:
    """No layer fits: its report, and the table of its kernels, are those of the command that was right."""
    assert tune_model(model, "--quiet").status == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    answer = tune_model(model, "--quiet", "--json", "--conv", "1x7x9x9,3x3")
    assert answer.status == 2
    assert all(layer["error"] for layer in json.loads(answer.out)["layers"][:4])
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert tune_model(model, "--quiet", "--conv", "1x7x9x9,3x3", out=tmp_path / "new").status == 2
    assert json.loads((tmp_path / "new" / "report.json").read_text())["layers"]


def test_folders_of_others_are_left_alone(tune_model: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    save_file({"other": WEIGHTS}, tmp_path / "other.safetensors")
    assert tune_model(tmp_path / "other.safetensors", "--quiet").status == 0
    refused = tune_model(model, "--quiet")
    assert (refused.status, "holds the layer 'other', which this model does not have" in refused.error) == (2, True)
    out = tmp_path / "mine"
    assert tune_model(model, "--quiet", out=out).status == 0
    shutil.rmtree(out / "fc.1")
    (out / "fc.1").mkdir()
    (out / "fc.1" / "notes").write_text("years")
    answer = tune_model(model, "--quiet", out=out)
    assert (answer.status, "layer fc.1: " in answer.error) == (6, True)
    assert "holds something other than a kernel" in answer.error
    assert (out / "fc.1" / "notes").read_text() == "years"
    assert artifact.read(out / "fc.2")


def test_a_full_disk(
    tune_model: Callable[..., Answer], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for a layer and then for the report: what was there before stays whole."""
    assert tune_model(model, "--quiet").status == 0
    before = (tmp_path / "out" / "report.json").read_bytes()
    write_bytes, write_text = Path.write_bytes, Path.write_text

    def full(path: Path, content: Any, *more: Any) -> int:
        if ".lospmm-" in str(path):
            (write_bytes if isinstance(content, bytes) else write_text)(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return (write_bytes if isinstance(content, bytes) else write_text)(path, content, *more)

    monkeypatch.setattr(Path, "write_bytes", full)
    answer = tune_model(model, "--quiet", n=40)
    assert answer.status == 4
    assert answer.err.count("cannot be written: No space left on device") == 4
    assert answer.out.count("no kernel: DiskFault") == 4
    monkeypatch.setattr(Path, "write_text", full)
    answer = tune_model(model, "--quiet", n=41)
    report = tmp_path / "out" / "report.json"
    assert (answer.status, answer.error) == (4, f"{report}: cannot be written: No space left on device")
    monkeypatch.undo()
    assert all(artifact.read(tmp_path / "out" / name).manifest["n"] == 32 for name in inodes(tmp_path / "out"))
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    assert len(json.loads(before)["layers"]) == len(report_in(tmp_path / "out")["layers"])


def test_two_runs_do_not_share_a_folder(model: Path, tune_model: Callable[..., Answer], tmp_path: Path) -> None:
    """The first one's report would stand beside the other's kernels."""
    out = tmp_path / "out"
    with alone_in(out):
        answer = tune_model(model, "--quiet")
        assert answer.status == 2
        assert answer.error == f"{out}: another run writes to it now; wait for its end, or name another folder"
        assert not list(out.iterdir())
    assert not out.exists()  # nothing was put in it
    assert tune_model(model, "--quiet").status == 0
    assert tune_model(model, "--quiet").status == 0
    assert (out / "report.json").exists()


def test_a_folder_that_is_removed_meanwhile_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a third run would hold the next one of its name."""
    out = tmp_path / "out"

    def held(descriptor: int) -> bool:
        out.rmdir()
        return is_locked_alone(descriptor)

    monkeypatch.setattr("lospmm.model.folder.is_locked_alone", held)
    with pytest.raises(BadRequest, match="another run writes to it now"), alone_in(out):
        pass


def test_of_two_processes_at_once_one_is_refused(
    model: Path, tmp_path: Path, set_environment: Callable[[str, object], None]
) -> None:
    """They start together, and compilers wait until one of them has ended."""
    slow, out = make_slow_toolkit(tmp_path / "slow"), tmp_path / "out"
    set_environment("LOSPMM_TOOLKIT", slow.root)
    command = [*COMMAND, "tune-model", str(model), *H200, "--emitter", "ptx", "--quiet", "--out", str(out), "--n"]
    runs = {n: subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in (32, 48)}
    wait_until(lambda: any(run.poll() is not None for run in runs.values()))
    slow.gate.touch()
    ends = {run.wait(60): (n, run.communicate()[1]) for n, run in runs.items()}
    assert sorted(ends) == [0, 2]
    assert ends[2][1] == f"error: {out}: another run writes to it now; wait for its end, or name another folder\n"
    report = report_in(out)
    assert report["n"] == ends[0][0]
    for layer in report["layers"][:-1]:
        kernel = artifact.read(out / layer["folder"]).manifest
        assert (kernel["n"], kernel["cubin_sha256"]) == (report["n"], layer["cubin_sha256"])


def test_what_a_killed_writer_left_is_removed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for age, name in ((0, "0" * 16), (3600, "1" * 16)):
        (out / f".lospmm-{name}").write_text("{")
        os.utime(out / f".lospmm-{name}", (out.stat().st_mtime - age,) * 2)
    folder = ModelFolder(out, Batch(open_model(model), LayerTable({ANY: LayerSpec(n=4)}), "h200"), lambda _layer: None)
    folder._write()
    assert {path.name for path in out.iterdir()} == {"report.json", "kernels.tsv", f".lospmm-{'0' * 16}"}


def test_a_file_whose_name_is_no_text(tune_model: Callable[..., Answer], tmp_path: Path) -> None:
    folder = tmp_path / "layers"
    folder.mkdir()
    np.save(folder / "m.npy", WEIGHTS)
    (folder / "m.npy").rename(os.fsdecode(os.fsencode(folder) + b"/m\xff.npy"))
    for _ in range(2):  # the second time it goes on where the first one was
        answer = tune_model(folder, "--json", "--quiet")
        assert (answer.status, answer.err) == (0, "")
        assert [layer["name"] for layer in json.loads(answer.out)["layers"]] == ["m\\udcff"]
