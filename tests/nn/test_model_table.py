"""``lospmm.nn.layers``: a table by which ``tune-model`` asks for the very kernels that ``sparsify_`` tunes."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

import lospmm.nn  # noqa: E402
from benchmarks.inference.pruned import CASES, build  # noqa: E402
from lospmm.artifact import kept  # noqa: E402
from lospmm.errors import BadRequest, NothingFits  # noqa: E402
from lospmm.matrix.layers import open_model  # noqa: E402
from lospmm.model.batch import join_layers, tune_here  # noqa: E402
from lospmm.model.folder import Batch, ModelFolder  # noqa: E402
from lospmm.model.layer_table import LayerSpec, LayerTable  # noqa: E402
from lospmm.problem.device import DEVICES  # noqa: E402
from lospmm.stages import silent  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from lospmm.tuning.options import Options  # noqa: E402
from lospmm.tuning.request import Request  # noqa: E402
from tests.nn.models import MAX_ERROR, Mask, drawn, error, exact, pruned  # noqa: E402

NAMES = ("BERT", "ResNet-50", "MobileNetV2")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What ``sparsify_`` asks to be tuned; nothing is."""
    requests: list[Request] = []

    def tune(request: Request, **_: Any) -> None:
        requests.append(request)
        raise NothingFits("not tuned here")

    monkeypatch.setattr(jobs, "chosen", tune)
    monkeypatch.setattr(jobs, "search_ahead", lambda *_, **__: None)
    return requests


def digests_of(model: nn.Module, table: LayerTable, folder: Path) -> list[str]:
    """The digests of what ``tune-model`` asks for of the model's file, in the model's order."""
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, folder / "net.safetensors")
    batch = Batch(open_model(folder / "net.safetensors"), table, "h200", Options(cache="network"))
    table.check_used(batch.model.names)
    files = dict(batch.model.read([name for name in batch.model.names if name not in batch.skipped]))
    requests = {name: batch.request(DEVICES["h200"], *table.kernels_of(name), file) for name, file in files.items()}
    return [requests[name].digest for name, row in table.rows.items() if row.skip is None]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=NAMES)
def test_networks(case: Any, asked: list[Request], tmp_path: Path) -> None:
    """In small; in full, with the service: tests/server/test_network_batches.py."""
    net = build(case.toy, case, 1)
    table = lospmm.nn.layers(net.model, net.example, min_sparsity=0.5)
    lospmm.nn.sparsify_(net.model, net.example, device="h200", choice="sparse", min_sparsity=0.5)
    wanted = [request.digest for request in asked]
    assert digests_of(net.model, table, tmp_path) == wanted and len(wanted) > 5


class Decoder(nn.Module):
    """Of a language model: attention, a gated product, tokens in and logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gate, self.up, self.down = nn.Linear(16, 40, bias=False), nn.Linear(16, 40), nn.Linear(40, 16)
        self.unused, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x)[0]
        return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_decoder_of_which_some_is_masked(dtype: torch.dtype, asked: list[Request], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder().eval().to(dtype)
    for part in (model.gate, model.down, model.unused, model.attention.out_proj):
        prune.l1_unstructured(part, "weight", 0.8)
    prune.l1_unstructured(model.attention, "in_proj_weight", 0.8)
    prune.remove(model.attention, "in_proj_weight")
    parametrize.register_parametrization(model.up, "weight", Mask((torch.rand(40, 16) < 0.2).to(dtype)))
    tokens = torch.zeros(3, 7, dtype=torch.int64)
    table = lospmm.nn.layers(model, tokens)
    kind = {} if dtype == torch.float32 else {"dtype": "float16"}
    assert table.rows == {
        "embedding.weight": LayerSpec(skip="no kernel for Embedding"),
        "attention.in_proj_weight": LayerSpec(n=21, bias=True, **kind),
        "attention.out_proj.weight": LayerSpec(n=21, bias=True, **kind),
        "gate.weight": LayerSpec(n=21, **kind),
        "up.parametrizations.weight.original": LayerSpec(
            skip="parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
        ),
        "down.weight": LayerSpec(n=21, bias=True, **kind),
        "unused.weight": LayerSpec(skip="no input of the example reaches it"),
        "head.weight": LayerSpec(skip="fewer zeros than the 40% of min_sparsity"),
    }
    parametrize.remove_parametrizations(model.up, "weight")
    table = lospmm.nn.layers(model, tokens)
    assert table.rows["up.weight"] == LayerSpec(n=21, bias=True, **kind)
    lospmm.nn.sparsify_(model, tokens, device="h200", choice="sparse")
    assert digests_of(model, table, tmp_path) == [request.digest for request in asked]


def test_convolutions_over_one_axis(asked: list[Request], tmp_path: Path) -> None:
    model = pruned(nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Conv1d(8, 8, 5, groups=2, dilation=2))
    table = lospmm.nn.layers(model, drawn(2, 4, 40))
    assert table.rows["0.weight"].conv == "2x4x1x40,1x3,stride=1x2,padding=0x1,dilation=1x1"
    lospmm.nn.sparsify_(model, drawn(2, 4, 40), device="h200", choice="sparse")
    assert digests_of(model, table, tmp_path) == [request.digest for request in asked] and len(asked) == 2


def test_convolutions(asked: list[Request], tmp_path: Path) -> None:
    model = pruned(
        nn.Conv2d(4, 8, 3, stride=2, padding=(1, 0)), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3, groups=8)
    )
    table = lospmm.nn.layers(model, drawn(2, 4, 12, 12))
    assert table.rows["0.weight"].conv == "2x4x12x12,3x3,stride=2x2,padding=1x0,dilation=1x1"
    assert table.rows["1.weight"].groups == 2 and "depthwise" in str(table.rows["2.weight"].skip)
    lospmm.nn.sparsify_(model, drawn(2, 4, 12, 12), device="h200", choice="sparse")
    assert digests_of(model, table, tmp_path) == [request.digest for request in asked]


def test_what_is_no_model() -> None:
    with pytest.raises(BadRequest, match=r"give a torch.nn.Module"):
        lospmm.nn.layers(lambda x: x, drawn(1, 2))  # type: ignore[arg-type]


def tune_into(folder: Path, table: LayerTable, options: Options) -> None:
    """Tune net.safetensors in ``folder`` into tuned/."""
    batch = Batch(open_model(folder / "net.safetensors"), table, "h200", options)
    tuned, store = ModelFolder(folder / "tuned", batch, lambda _: None), kept.open_store()
    tune_here(tuned, batch, DEVICES["h200"], store=store, watch=lambda _: nullcontext(silent))
    if options.memory == "low":
        join_layers(tuned, batch, store=store, heard=lambda _: None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of the kernels that were emulated."""
    columns: list[int] = []
    run = lospmm.Kernel.run_on_cpu

    def watched(kernel: lospmm.Kernel, b: Any, *rest: Any) -> Any:
        columns.append(kernel.manifest["n"])
        return run(kernel, b, *rest)

    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", watched)
    return columns


@torch.no_grad()
def test_a_call_takes_the_kernel_of_its_columns(ran: list[int], tmp_path: Path) -> None:
    """Of those in the folder; where cuBLAS is faster at the most columns, a call of more is dense, not in pieces."""
    torch.manual_seed(0)
    model = pruned(nn.Linear(24, 16))
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, tmp_path / "net.safetensors")
    wanted = copy.deepcopy(model)
    tune_into(tmp_path, LayerTable({"0.weight": LayerSpec(n=(1, 4, 16), bias=True)}), Options(verify="none"))

    def check(calls: dict[int, list[int]]) -> None:
        for tokens, kernels in calls.items():
            ran.clear()
            x = drawn(tokens, 24)
            assert error(model(x), exact(wanted, x)) < MAX_ERROR
            assert ran == kernels, tokens

    report = lospmm.nn.load_(model, tmp_path / "tuned", emulate=True)
    assert [(row.layer, row.n, row.advice) for row in report.rows] == [("0", n, "sparse") for n in (1, 4, 16)]
    check({1: [1], 2: [4], 4: [4], 16: [16], 33: [16, 16, 1]})
    content = json.loads((tmp_path / "tuned" / "report.json").read_text())
    content["layers"][2]["family"] = "dense"
    (tmp_path / "tuned" / "report.json").write_text(json.dumps(content))
    report = lospmm.nn.load_(model, tmp_path / "tuned", emulate=True)
    assert [(row.n, row.advice) for row in report.rows] == [(1, "sparse"), (4, "sparse"), (16, "dense")]
    check({1: [1], 4: [4], 5: [], 16: [], 33: []})
    lospmm.nn.save(model, tmp_path / "saved")
    lospmm.nn.load_(model, tmp_path / "saved", emulate=True)
    check({4: [4], 16: []})


@torch.no_grad()
def test_one_copy_serves_every_call(ran: list[int], tmp_path: Path) -> None:
    """With memory low; weights that are shared stay on the GPU."""
    torch.manual_seed(0)
    model = pruned(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False), share=0.5).half()
    model[1].weight.copy_(2 * model[0].weight)  # other data, but the same text to compile
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, tmp_path / "net.safetensors")
    wanted, rows = copy.deepcopy(model), {f"{at}.weight": LayerSpec(n=(1, 8)) for at in (0, 1)}
    tune_into(tmp_path, LayerTable(rows), Options(verify="none", dtype="float16", memory="low"))
    lospmm.nn.load_(model, tmp_path / "tuned", emulate=True)
    assert [module.lospmm_tuned.frees_weight for module in model] == [True, True]
    one, other = (bucket.kernel.artifact.files for bucket in model[0].lospmm_tuned.buckets)
    assert one["kernel.cubin"] is other["kernel.cubin"], "in memory once"
    assert one["matrix.npz"] is not one["matrix.npz"], "read when asked for"
    for tokens in (1, 2, 8, 12):
        x = drawn(tokens, 24).half()
        assert error(model(x), exact(wanted, x)) < 2e-3
    assert set(ran) == {1, 8} and len(ran) == 2 * (1 + 1 + 1 + 2)
    twice = nn.Sequential(*model, nn.Linear(24, 24, bias=False))
    lospmm.nn.restore_(model)
    twice[2].weight = twice[1].weight
    lospmm.nn.load_(twice, tmp_path / "tuned", emulate=True)
    assert [module.lospmm_tuned.frees_weight for module in twice[:2]] == [True, False]


@torch.no_grad()
def test_kernels_of_tune_model_run_in_the_model(tmp_path: Path) -> None:
    """Prepared from the state dict alone, loaded by name; a layer left to cuBLAS, and one that failed, stay dense."""
    torch.manual_seed(0)
    model = pruned(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 24), nn.Linear(24, 16), nn.Linear(16, 8))
    x = drawn(6, 2, 6, 6)
    wanted, table = exact(model, x), lospmm.nn.layers(model, x)
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, tmp_path / "net.safetensors")
    rows = table.rows | {"4.weight": LayerSpec(n=6, families="bitmap")}  # of 16 bits: none in float32
    tune_into(tmp_path, LayerTable(rows), Options(verify="none"))
    kernels = lospmm.load_model(tmp_path / "tuned")
    assert list(kernels) == ["0.weight", "2.weight", "3.weight"]
    assert kernels["2.weight"].manifest["epilogue"]["bias"] and kernels["0.weight"].manifest["n"] == 6 * 16
    report = json.loads((tmp_path / "tuned" / "report.json").read_text())
    report["layers"][2]["family"] = "dense"
    (tmp_path / "tuned" / "report.json").write_text(json.dumps(report))
    loaded = lospmm.nn.load_(model, tmp_path / "tuned", emulate=True)
    assert [(row.layer, row.advice, row.reason) for row in loaded.rows] == [
        ("0", "sparse", "loaded"),
        ("2", "sparse", "loaded"),
        ("3", "dense", "cuBLAS is faster than its kernel"),
    ]
    assert error(model(x), wanted) < MAX_ERROR
    report["layers"][0]["folder"] = "../elsewhere"
    (tmp_path / "tuned" / "report.json").write_text(json.dumps(report))
    for load in (lospmm.load_model, lambda folder: lospmm.nn.load_(model, folder)):
        with pytest.raises(BadRequest, match=r"is damaged: '../elsewhere' is not the folder of '0.weight'"):
            load(tmp_path / "tuned")
    with pytest.raises(BadRequest, match="name a folder that `lospmm tune-model` wrote"):
        lospmm.load_model(tmp_path)
