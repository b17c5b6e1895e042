"""benchmarks.networks on small networks; the real ones are what they should be, and every variant computes the same."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lospmm.tuning.request import Request
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

from benchmarks import harness, networks, networks_report  # noqa: E402
from benchmarks.inference import ahead, bert, cusparse, decoder, mobilenet, resnet, variants  # noqa: E402
from benchmarks.inference.pruned import CASES, build, by_depth, convolutions, prune  # noqa: E402
from benchmarks.inference.timing import kernel_bytes, weight_bytes  # noqa: E402
from lospmm.errors import BadRequest  # noqa: E402
from lospmm.nn.report import Report  # noqa: E402
from lospmm.nn.sources import options_for  # noqa: E402
from lospmm.nn.sparse import Sparse  # noqa: E402
from lospmm.problem.device import DEVICES  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from lospmm_datasets.networks import SPREADS, WantedPattern, drawn, real_patterns  # noqa: E402
from lospmm_datasets.shapes import read_shapes  # noqa: E402

ROOT = Path(__file__).parents[2]

#: Against float64, over a whole network.
MAX_ERROR = {"float32": 1e-5, "float16": 1e-3}

BERT, RESNET, SPARSER_RESNET, MOBILENET, LLAMA = CASES


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
        (lambda: decoder.Decoder(decoder.Size()), 134_515_008),  # of SmolLM2-135M
        (LLAMA.full.model, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096),  # a layer of Llama-2-7B
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
        before = weight_bytes(pruned.model, torch.device("cpu"))
        left = cusparse.replace(pruned.model, dict(pruned.patterns))
        replaced = [one for one in pruned.model.modules() if type(one).__module__ == cusparse.__name__]
        assert len(replaced) == len(pruned.patterns) - len(left) > 0
        assert all(pruned.model.get_submodule(name).kernel_size == (3, 3) for name in left)
        torch.testing.assert_close(pruned.model(pruned.example), expected, rtol=1e-4, atol=1e-5)
        assert weight_bytes(pruned.model, torch.device("cpu")) < before


@pytest.mark.parametrize("case", [BERT, RESNET], ids=lambda case: case.network)
def test_what_is_tuned_ahead_is_what_sparsify_asks_for(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, h200 = ("float32" if case is BERT else "float16"), DEVICES["h200"]
    pruned = build(case.toy, case, 2, dtype=getattr(torch, dtype))
    options = replace(ahead.options_of("none", None), dtype=dtype)
    model = variants.for_kernels(pruned.model)
    ready = {Request(one, options_for(one, options)).digest for one in ahead.problems(model, pruned.example, h200)}
    assert len(ready) == len(pruned.patterns)
    asked: list[str] = []
    tune = jobs.chosen

    def listed(request: Request, **rest: Any) -> Any:
        asked.append(request.digest)
        return tune(request, **rest)

    monkeypatch.setattr(jobs, "chosen", listed)
    ahead.sparsify(model, pruned.example, "eager", way=ahead.Way(h200, options, None))
    assert set(asked) == ready


def run(out: Path, *words: str) -> tuple[int, list[Mapping[str, Any]]]:
    code = networks.main(["--toy", "--batch", "2", "--measure", "none", "--out", str(out), *words])
    return code, [json.loads(line) for line in (out / "networks.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), [(BERT, "float32"), (RESNET, "float16"), (MOBILENET, "float32")])
def test_a_network_on_its_kernels(case: Any, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["dense, eager", "cusparse, eager", "lospmm, eager"]
    if dtype == "float16":  # in which PyTorch has no sparse weights on a CPU
        ways = ["dense, eager, float16", "lospmm, eager, float16"]
    words = [word for way in ways for word in ("--variant", way)]
    code, lines = run(tmp_path, "--case", case.name, "--dtype", dtype, *words)
    assert code == 0, lines
    assert [line["variant"] for line in lines] == ways
    for line in lines:
        assert 0 < line["error"] < MAX_ERROR[dtype] and line["micros"] > 0
        assert (line["graph_micros"], line["peak_bytes"]) == (None, None)
        assert (
            line["case"] == f"toy {case.name}" and line["batch"] == 2 and line["versions"]["torch"] == torch.__version__
        )
    *_, kernels = lines
    pruned = [layer for layer in kernels["layers"] if layer["pattern"] is not None]
    assert len(pruned) == kernels["pruned_layers"]
    most = {"float32": 1e-6, "float16": 1e-3}[dtype]
    assert all(layer["advice"] == "sparse" and 0 < layer["error"] < most for layer in pruned), pruned
    assert all(layer["advice"] == "dense" for layer in kernels["layers"] if layer["pattern"] is None)
    printed = capsys.readouterr().out
    assert f"toy {case.name}, batch 2, {ways[-1]}: " in printed
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
    code, again = run(tmp_path, "--resume", *words)
    assert code == 0 and not [line for line in again if "failure" in line]
    assert [line["variant"] for line in again] == ["dense, eager", "cusparse, eager"]
    assert again[0] == next(line for line in lines if line["variant"] == "dense, eager")


def test_one_model_of_a_decoder_layer_runs_every_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of all of them, made for one token; the other networks have no such variant."""
    asked: list[tuple[Any, ...]] = []

    def sparsify(_model: nn.Module, example: Any, called: str, **rest: Any) -> Report:
        asked.append((tuple(example.shape), called, rest["n"], rest["memory"]))
        return Report(())

    monkeypatch.setattr(networks, "sparsify", sparsify)
    low = "lospmm, eager, float16, low"
    words = ("--dtype", "float16", "--variant", low, "--case", BERT.name, "--case", LLAMA.name)
    assert networks.main(["--toy", "--out", str(tmp_path), "--case", LLAMA.name]) == 0
    assert not list(tmp_path.iterdir()), "in float32 it is not measured"
    code, lines = run(tmp_path, *words)
    assert code == 0 and asked == [((1, 1, 32), "graph", (1, 8, 512), "low")]
    assert [(line["case"], line["batch"], line["variant"]) for line in lines] == [
        (f"toy {LLAMA.name}", tokens, low) for tokens in (1, 8, 512)
    ]
    assert all(0 < line["error"] < 1e-3 for line in lines)
    assert run(tmp_path, "--resume", *words) == (0, lines) and len(asked) == 1
    code, lines = run(tmp_path, "--decoders", "2", *words)
    assert (
        code == 0
        and [(line["case"], line["pruned_layers"]) for line in lines[3:]] == [(f"toy {LLAMA.name}, 2 of them", 14)] * 3
    )


def test_kernels_in_one_file_count_once() -> None:
    def layer(*files: str) -> Any:
        kernels = [
            SimpleNamespace(artifact=SimpleNamespace(manifest={"cubin_sha256": file}), cubin=bytes(len(file)))
            for file in files
        ]
        module = Sparse()
        tuned = SimpleNamespace(buckets=[SimpleNamespace(kernel=kernel) for kernel in kernels])
        module.lospmm_state = SimpleNamespace(tuned={"weight": tuned}, bound={})
        return module

    model = nn.Sequential(layer("one", "one", "three"), layer("one"), nn.Linear(2, 3))
    assert kernel_bytes(model) == len("one") + len("three")
    assert weight_bytes(model, torch.device("cpu")) == 9 * 4
    assert weight_bytes(model, torch.device("cuda")) == 0, "it is in host memory"


def test_no_gpu_and_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert networks.main(["--out", str(tmp_path)]) == 2
        assert "finds no GPU on this machine" in capsys.readouterr().err
    (tmp_path / "networks.jsonl").write_text("{}\n")
    with pytest.raises(BadRequest, match="not the lines of this benchmark"):
        harness.read_results(tmp_path / "networks.jsonl", networks.key)


def line(variant: str, micros: float, **rest: Any) -> dict[str, Any]:
    figures = {"noise": 0.01, "graph_micros": micros / 2, "peak_bytes": 1 << 20, "error": 1e-7}
    held = {"weight_bytes": 3 << 20, "kernel_bytes": 1 << 20}
    return {"case": "BERT-base 91%", "batch": 32, "variant": variant, "micros": micros, **figures, **held, **rest}


def beside(ratio: float, noise: float) -> dict[str, Any]:
    turns = {"first_micros": 1000.0, "second_micros": 1000.0 * ratio, "ratio": ratio, "noise": noise, "rounds": 16}
    return {"called": turns, "graph": {**turns, "ratio": ratio / 2}}


def test_speedups_and_where_the_time_goes() -> None:
    layers = [
        {"advice": "sparse", "dense_micros": 900.0, "sparse_micros": 300.0, "error": 2e-7},
        {"advice": "dense", "dense_micros": 50.0, "sparse_micros": 60.0},
        {"advice": "dense", "dense_micros": None, "sparse_micros": None},
    ]
    lines = [
        line("dense, compiled", 3000.0),
        line("lospmm, compiled", 1500.0, layers=layers, beside=beside(0.5, 0.004)),
        line("lospmm, eager", 1500.0),  # of before dense networks took turns
        line("lospmm, compiled, float16", 1025.0, beside=beside(1.025, 0.008), batch=8),
        {"case": "BERT-base 91%", "batch": 32, "variant": "cusparse, eager", "failure": "RuntimeError: none"},
    ]
    assert networks_report.speedups(lines).splitlines() == [
        "BERT-base 91%, batch 32, lospmm, compiled: 2.00 x dense (+- 0.004)",
        "BERT-base 91%, batch 8, lospmm, compiled, float16: 0.98 x dense (+- 0.002)",
        "BERT-base 91%, lospmm, compiled: 0.75 ms; 1 layers on kernels 0.30 ms (dense 0.90), "
        "1 pruned layers left dense 0.05 ms, all else 0.40 ms; error of a layer 2.0e-07 at most",
    ]
    table = networks_report.table(lines).splitlines()
    assert len(table) == 6 and "FAILED  RuntimeError: none" in table[-1] and "  3 + 1  " in table[1]
    found = networks_report.find(lines, "BERT-base 91%", "lospmm, compiled", 32)
    graph = networks_report.speedup(found, "graph")
    assert found is lines[1] and graph is not None and graph.times == 4.0
    assert networks_report.find(lines, "BERT-base 91%", "lospmm, compiled", 8) is None
    assert [networks_report.speedup(one) for one in (lines[2], lines[4], None)] == [None] * 3
