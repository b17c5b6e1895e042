"""The kernels of a model in a folder, and in another model: without tuning, whole or not at all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.artifact import artifact  # noqa: E402
from lospmm.errors import BadRequest, ToolchainFault  # noqa: E402
from lospmm.nn.folder import MODEL_FILE  # noqa: E402
from lospmm.nn.layer import SparseLinear  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402


def perceptron(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return pruned(
        nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16, bias=False), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = perceptron()
    report = lospmm.nn.sparsify_(model, drawn(10, 24), n=[10, 32], **EMULATED)
    assert report.sparse == ("0", "2", "4"), str(report)
    folder = tmp_path_factory.mktemp("saved") / "tuned"
    lospmm.nn.save(model, folder)
    return folder


@torch.no_grad()
def test_a_saved_model_runs_without_tuning(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "chosen", None)
    model, x = perceptron(), drawn(10, 24)
    wanted = exact(model, x)
    report = lospmm.nn.load_(model, saved, emulate=True)
    assert [(row.layer, row.n, row.advice) for row in report.rows] == [
        ("0", 10, "sparse"), ("0", 32, "sparse"), ("2", 10, "sparse"), ("2", 32, "sparse"), ("4", 40, "sparse")
    ]  # fmt: skip
    assert model[0].lospmm_tuned.features_first
    assert error(model(x), wanted) < MAX_ERROR
    assert not any(lospmm.nn.status(model).values())


@torch.no_grad()
def test_layers_that_do_not_fit_are_dense_with_a_reason(saved: Path) -> None:
    model, x = perceptron(), drawn(10, 24)
    model[0].weight.mul_(2.0)
    model[4].bias.add_(1.0)
    wanted = exact(model, x)
    report = lospmm.nn.load_(model, saved, emulate=True)
    assert report.sparse == ("2",)
    assert {row.layer: row.reason.partition(";")[0] for row in report.rows if row.advice == "dense"} == {
        "0": "its weights are not those that its kernels were tuned for",
        "4": "its bias is not the one in the code of its kernels",
    }
    assert error(model(x), wanted) < MAX_ERROR
    assert [row.reason for row in lospmm.nn.load_(nn.Sequential(nn.ReLU()), saved).rows] == [
        "the model has no such layer"
    ] * 3
    reasons = {row.reason for row in lospmm.nn.load_(perceptron(), saved).rows}
    assert reasons == {
        "it is on the CPU; to emulate kernels there: choice='sparse' of sparsify_, emulate=True of load_"
    }


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / MODEL_FILE).unlink(), "name a folder that save or tune-model wrote"),
        (lambda folder: (folder / MODEL_FILE).write_text("{"), "is damaged"),
        (lambda folder: (folder / MODEL_FILE).write_text('{"schema": 1}'), "is damaged"),
        (lambda folder: (folder / MODEL_FILE).write_text('{"schema": 9, "layers": []}'), "schema 9"),
        (lambda folder: _edit(folder, folder="../elsewhere"), "not the name of a folder"),
        (lambda folder: _edit(folder, folder="absent"), "there is no such folder"),
        (lambda folder: _edit(folder, least=-5), "is damaged"),
        (lambda folder: _edit(folder, None), "is damaged"),
        (lambda folder: next(folder.glob("*bias*/bias.npy")).unlink(), "bias.npy: .*; tune it again"),
        (lambda folder: next(folder.glob("*/kernel.cubin")).write_bytes(b"other"), "its sha256 differs"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_model_stays(
    saved: Path, tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(saved, folder)
    harm(folder)
    model = perceptron()
    with pytest.raises(BadRequest, match=words):
        lospmm.nn.load_(model, folder, emulate=True)
    assert type(model[0]) is nn.Linear


def _edit(model: Path, *kernels: None, **changed: object) -> None:
    """``changed`` of the first layer's first kernel; or no kernels, for a None."""
    content = json.loads((model / MODEL_FILE).read_text())
    first = content["layers"][0]
    first["kernels"] = [] if kernels else [first["kernels"][0] | changed]
    (model / MODEL_FILE).write_text(json.dumps(content))


@torch.no_grad()
def test_kernels_of_another_layer_with_the_same_weights_are_not_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    conv, x = pruned(nn.Conv2d(4, 8, 3, padding=1))[0], drawn(2, 4, 5, 5)
    added, ended = lospmm.nn.fused(nn.Sequential(conv, nn.ReLU())), nn.Sequential(conv)
    lospmm.nn.sparsify_(added, x, **EMULATED)
    lospmm.nn.save(added, tmp_path / "conv")
    lospmm.nn.restore_(added)

    def like(layer: nn.Module) -> nn.Sequential:
        layer.weight.copy_(conv.weight.reshape(layer.weight.shape))
        layer.bias.copy_(conv.bias)
        return nn.Sequential(layer).eval()

    others = {
        "include a bias, ReLU, but the layer does not": ended,
        "another window, stride, padding or dilation": lospmm.nn.fused(
            nn.Sequential(*like(nn.Conv2d(4, 8, 3, stride=2, padding=1)), nn.ReLU())
        ),
        "are for a convolution": lospmm.nn.fused(nn.Sequential(*like(nn.Linear(36, 8)), nn.ReLU())),
    }
    for words, model in others.items():
        (row,) = lospmm.nn.load_(model, tmp_path / "conv", emulate=True).rows
        assert row.advice == "dense" and words in row.reason
    product = like(nn.Linear(36, 8))
    lospmm.nn.sparsify_(product, drawn(5, 36), **EMULATED)
    lospmm.nn.save(product, tmp_path / "product")
    (row,) = lospmm.nn.load_(ended, tmp_path / "product", emulate=True).rows
    assert row.reason == "its kernels are for a product, not a convolution: tune with the table of `lospmm layers`"


@pytest.mark.parametrize("file", ["manifest.json", "kernel.cubin", "bias.npy", "tuning.jsonl"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_saving_again_mends_a_folder(saved: Path, tmp_path: Path, file: str, harm: Callable[[Path], object]) -> None:
    folder, model = tmp_path / "tuned", perceptron()
    shutil.copytree(saved, folder)
    lospmm.nn.load_(model, folder, emulate=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    harm(next(folder.glob(f"*bias*/{file}")))
    lospmm.nn.save(model, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("text", ['{"format": "layers-model"}', "[]", "not JSON"])
def test_a_model_json_of_others_stays(saved: Path, tmp_path: Path, text: str) -> None:
    model = perceptron()
    lospmm.nn.load_(model, saved, emulate=True)
    (tmp_path / MODEL_FILE).write_text(text)
    with pytest.raises(BadRequest, match="holds something other than a tuned model"):
        lospmm.nn.save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_FILE]
    assert (tmp_path / MODEL_FILE).read_text() == text


def test_what_is_no_model_or_no_path(tmp_path: Path) -> None:
    for call in (lospmm.nn.save, lospmm.nn.load_):
        with pytest.raises(BadRequest, match=r"the model is of type NoneType: give a torch\.nn\.Module"):
            call(None, tmp_path)
        with pytest.raises(BadRequest, match="the directory is of type NoneType: give a path"):
            call(perceptron(), None)


def test_saving_again_and_saving_nothing(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(saved, folder)
    other = perceptron(seed=1)
    lospmm.nn.sparsify_(other, drawn(10, 24), **EMULATED)
    lospmm.nn.save(other, folder)
    assert lospmm.nn.load_(other, folder, emulate=True).sparse == ("0", "2", "4")
    assert type(other[0]) is SparseLinear
    with pytest.raises(BadRequest, match="no layer of the model has kernels"):
        lospmm.nn.save(perceptron(), tmp_path / "none")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadRequest, match="holds something other"):
        lospmm.nn.save(other, tmp_path / "mine")
    assert not (tmp_path / "none").exists()


def test_a_save_that_fails_leaves_what_was_there(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(saved, folder)
    other = perceptron(seed=2)
    lospmm.nn.sparsify_(other, drawn(10, 24), **EMULATED)
    write, written = artifact.write, []

    def failing(one: artifact.Artifact, directory: Path, **_: object) -> None:
        if written:
            raise ToolchainFault("the disk is full")
        written.append(directory)
        write(one, directory)

    monkeypatch.setattr(artifact, "write", failing)
    with pytest.raises(ToolchainFault, match="full"):
        lospmm.nn.save(other, folder)
    monkeypatch.undo()
    assert lospmm.nn.load_(perceptron(), folder, emulate=True).sparse == ("0", "2", "4")
