"""benchmarks.networks on small networks; the real ones are what they should be, and every variant computes the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lospmm.tuning.request import Request
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

from benchmarks import networks, networks_report  # noqa: E402
from benchmarks.inference import ahead, bert, cusparse, decoder, mobilenet, resnet, variants  # noqa: E402
from benchmarks.inference.pruned import CASES, build, by_depth, convolutions, prune  # noqa: E402
from benchmarks.inference.timing import weight_bytes  # noqa: E402
from lospmm.errors import BadRequest  # noqa: E402
from lospmm.problem.device import DEVICES  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from lospmm_datasets.networks import SPREADS, WantedPattern, drawn, real_patterns  # noqa: E402
from lospmm_datasets.shapes import read_shapes  # noqa: E402

ROOT = Path(__file__).parents[2]

#: Of float32 against float64, over a whole network.
MAX_ERROR = 1e-5

BERT, RESNET, SPARSER_RESNET, MOBILENET = CASES


def on_meta(model: Any) -> nn.Module:
    """The network in full size, without its weights."""
    with torch.device("meta"):
        return model()


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: bert.Bert(bert.Size()), 109_482_240 - 768 * 769),  # of BERT-base, without the pooler
        (lambda: resnet.ResNet(resnet.Size()), 25_557_032 - 26_560),  # of torchvision's, a bias for each two of a norm
        (lambda: mobilenet.MobileNet(mobilenet.Size()), 3_504_872 - 17_056),
        (decoder.Decoder, 134_515_008),  # of SmolLM2-135M
    ],
)
def test_the_networks_have_as_many_parameters_as_published(model: Any, parameters: int) -> None:
    assert sum(one.numel() for one in on_meta(model).parameters()) == parameters


def test_the_layers_are_those_of_the_table_of_shapes() -> None:
    """Whose m and k were derived from the papers; BERT's three of an attention as one are its alone."""
    table = {network.name: network.shapes for network in read_shapes(ROOT / "datasets" / "shapes.toml").networks}
    convolved = {name: tuple(one.weight.shape) for name, one in convolutions(on_meta(CASES[1].full.model))}
    for shape in table["ResNet-50"]:
        assert convolved[shape.layer] == (shape.m, shape.in_channels, shape.kernel, shape.kernel), shape.layer
    linear = {name: one for name, one in on_meta(BERT.full.model).named_modules() if isinstance(one, nn.Linear)}
    for shape in table["BERT-base"]:
        if shape.m != 2304:
            assert tuple(linear[shape.layer].weight.shape) == (shape.m, shape.k), shape.layer
    pointwise = {tuple(one.weight.shape[:2]) for _, one in convolutions(on_meta(MOBILENET.full.model))}
    assert {(shape.m, shape.k) for shape in table["MobileNetV2"] if shape.kernel == 1} <= pointwise


def test_lower_layers_of_bert_keep_more() -> None:
    model = bert.Bert(bert.Size(hidden=96, intermediate=384, vocabulary=9))
    patterns = by_depth(model, BERT.sparsity, ())
    assert len(patterns) == 12 * 6
    kept = sum(int(pattern.mask.sum()) for pattern in patterns.values())
    assert 1 - kept / sum(pattern.mask.size for pattern in patterns.values()) == pytest.approx(0.9099, abs=1e-4)
    first, last = (patterns[f"encoder.layer.{depth}.intermediate.dense"].sparsity for depth in (0, 11))
    assert (1 - first) / (1 - last) == pytest.approx(2, rel=1e-2)


@needs_real_layers
@pytest.mark.parametrize(("case", "real"), [(RESNET, 40), (SPARSER_RESNET, 29)])
def test_resnet_has_real_patterns_where_there_are_some(case: Any, real: int) -> None:
    patterns = case.patterns(on_meta(case.full.model), case.sparsity, real_patterns(REAL_LAYERS))
    assert len(patterns) == 52 and "conv1" not in patterns and "fc" not in patterns
    origins = [pattern.origin for pattern in patterns.values()]
    assert sum(not origin.startswith("drawn") for origin in origins) == real
    assert len({pattern.mask.tobytes() for pattern in patterns.values()}) == 52
    assert all(pattern.sparsity == pytest.approx(case.sparsity, abs=0.0151) for pattern in patterns.values())


@torch.no_grad()
def test_pruning_keeps_outputs_as_large_as_they_were() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(64, 32, 3, bias=False), torch.randn(4, 64, 8, 8)
    before = float(layer(x).std())
    pattern = drawn(WantedPattern(32, 576, 0.9, 9), SPREADS["magnitude"], 0)
    prune(layer, pattern)
    assert (layer.weight.detach().view(32, 576).numpy() != 0).tolist() == pattern.mask.tolist()
    assert float(layer(x).std()) == pytest.approx(before, rel=0.1)


@torch.no_grad()
def test_cusparse_stands_for_linear_layers_and_pointwise_convolutions() -> None:
    for case in CASES:
        pruned = build(case.toy, case, 2)
        expected = pruned.model(pruned.example)
        before = weight_bytes(pruned.model)
        left = cusparse.replace(pruned.model, dict(pruned.patterns))
        replaced = [one for one in pruned.model.modules() if type(one).__module__ == cusparse.__name__]
        assert len(replaced) == len(pruned.patterns) - len(left) > 0
        assert all(pruned.model.get_submodule(name).kernel_size == (3, 3) for name in left)
        torch.testing.assert_close(pruned.model(pruned.example), expected, rtol=1e-4, atol=1e-5)
        assert weight_bytes(pruned.model) < before


@pytest.mark.parametrize("case", [BERT, RESNET], ids=lambda case: case.network)
def test_what_is_tuned_ahead_is_what_sparsify_asks_for(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned, options, h200 = build(case.toy, case, 2), ahead.options_of("none", None), DEVICES["h200"]
    model = variants.for_kernels(pruned.model)
    ready = {Request(one, options).digest for one in ahead.problems(model, pruned.example, h200)}
    assert len(ready) == len(pruned.patterns)
    asked: list[str] = []
    tune = jobs.tune

    def listed(request: Request, **rest: Any) -> Any:
        asked.append(request.digest)
        return tune(request, **rest)

    monkeypatch.setattr(jobs, "tune", listed)
    ahead.sparsify(model, pruned.example, "eager", way=ahead.Way(h200, options, None))
    assert set(asked) == ready


def run(out: Path, *words: str) -> tuple[int, list[Mapping[str, Any]]]:
    code = networks.main(["--toy", "--batch", "2", "--measure", "none", "--out", str(out), *words])
    return code, [json.loads(line) for line in (out / "networks.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", [BERT, RESNET, MOBILENET], ids=lambda case: case.network)
def test_a_network_on_its_kernels(case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ("dense, eager", "cusparse, eager", "lospmm, eager")
    code, lines = run(tmp_path, "--case", case.name, *(word for way in ways for word in ("--variant", way)))
    assert code == 0, lines
    assert [line["variant"] for line in lines] == list(ways)
    for line in lines:
        assert 0 < line["error"] < MAX_ERROR and line["micros"] > 0
        assert (line["graph_micros"], line["peak_bytes"]) == (None, None)
        assert (
            line["case"] == f"toy {case.name}" and line["batch"] == 2 and line["versions"]["torch"] == torch.__version__
        )
    *_, kernels = lines
    pruned = [layer for layer in kernels["layers"] if layer["pattern"] is not None]
    assert len(pruned) == kernels["pruned_layers"]
    assert all(layer["advice"] == "sparse" and 0 < layer["error"] < 1e-6 for layer in pruned), pruned
    assert all(layer["advice"] == "dense" for layer in kernels["layers"] if layer["pattern"] is None)
    printed = capsys.readouterr().out
    assert f"toy {case.name}, eager, TF32 off: " in printed
    assert (tmp_path / "networks.png").stat().st_size > 1000


def test_a_variant_that_fails_has_a_line_and_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(variants, "MODELS", {**variants.MODELS, "cusparse": broken})
    words = ("--case", MOBILENET.name, "--variant", "cusparse, eager", "--variant", "dense, eager")
    code, lines = run(tmp_path, *words)
    assert code == 1
    assert {line["variant"]: line.get("failure") for line in lines} == {
        "cusparse, eager": "RuntimeError: out of memory",
        "dense, eager": None,
    }
    monkeypatch.undo()
    code, again = run(tmp_path, "--case", MOBILENET.name, "--variant", "cusparse, eager")
    assert code == 0 and len(again) == 2
    assert not [line for line in again if "failure" in line]


def test_no_gpu_and_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert networks.main(["--out", str(tmp_path)]) == 2
        assert "finds no GPU on this machine" in capsys.readouterr().err
    (tmp_path / "networks.jsonl").write_text("{}\n")
    with pytest.raises(BadRequest, match="not the lines of this benchmark"):
        networks.read_results(tmp_path / "networks.jsonl")


def line(variant: str, micros: float, **rest: Any) -> dict[str, Any]:
    figures = {"noise": 0.01, "graph_micros": micros / 2, "peak_bytes": 1 << 20, "weight_bytes": 1, "error": 1e-7}
    return {"case": "BERT-base 91%", "variant": variant, "micros": micros, **figures, **rest}


def beside(ratio: float, noise: float) -> dict[str, Any]:
    turns = {"first_micros": 1000.0, "second_micros": 1000.0 * ratio, "ratio": ratio, "noise": noise, "rounds": 16}
    return {"called": turns, "graph": None}


def test_what_was_promised() -> None:
    layers = [
        {"advice": "sparse", "dense_micros": 900.0, "sparse_micros": 300.0, "error": 2e-7},
        {"advice": "dense", "dense_micros": 50.0, "sparse_micros": 60.0},
        {"advice": "dense", "dense_micros": None, "sparse_micros": None},
    ]
    lines = [
        line("dense, compiled", 3000.0),
        line("lospmm, compiled", 1500.0, layers=layers, beside=beside(0.5, 0.004)),
        line("lospmm, eager", 1500.0),  # of before dense networks took turns
        line("lospmm, compiled, TF32", 1025.0, beside=beside(1.025, 0.008)),
        line("lospmm, eager, TF32", 1010.0, beside=beside(1.025, 0.08)),
        {"case": "BERT-base 91%", "variant": "cusparse, eager", "failure": "RuntimeError: none"},
    ]
    text = networks_report.promises(lines).splitlines()
    assert text == [
        "BERT-base 91%, TF32 off: 2.00 x dense (+- 0.004), promised 1.8: kept",
        "BERT-base 91%, TF32 on: 0.98 x dense (+- 0.002), promised 1.0: NOT KEPT",
        "BERT-base 91%, eager, TF32 on: 0.98 x dense (+- 0.019); never slower: kept",
        "BERT-base 91%, compiled, TF32 off: 2.00 x dense (+- 0.004); never slower: kept",
        "BERT-base 91%, compiled, TF32 on: 0.98 x dense (+- 0.002); never slower: NOT KEPT",
        "BERT-base 91%, lospmm, compiled: 0.75 ms; 1 layers on kernels 0.30 ms (dense 0.90), "
        "1 pruned layers left dense 0.05 ms, all else 0.40 ms; error of a layer 2.0e-07 at most",
    ]
    table = networks_report.table(lines).splitlines()
    assert len(table) == 7 and "FAILED  RuntimeError: none" in table[-1]
    assert networks_report.speedup(lines, "BERT-base 91%", compiled=False, tf32=False) is None
