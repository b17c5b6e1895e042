"""BERT-base, MobileNetV2 and a decoder, layer by layer, by the command, the service and ``sparsify_``."""

import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from benchmarks.inference.bert import Bert, Size  # noqa: E402
from benchmarks.inference.pruned import NETWORKS, alike  # noqa: E402
from lospmm.cli import main as cli  # noqa: E402
from lospmm.client.client import Client  # noqa: E402
from lospmm.errors import NothingFits  # noqa: E402
from lospmm.matrix.readers import VECTOR  # noqa: E402
from lospmm.model.layer_table import LayerTable  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from lospmm.tuning.request import Request  # noqa: E402
from tests.nn.models import drawn, error, exact, pruned  # noqa: E402
from tests.server.served import served  # noqa: E402

EMBEDDING = "no kernel for Embedding"
DEPTHWISE = "it is depthwise: a sum for each channel, which pruning does not shorten"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What ``sparsify_`` asks to be tuned, as digests in the model's order; nothing is."""

    def listed(*arguments: Any, **options: Any) -> list[str]:
        digests: list[str] = []

        def tune(request: Request, **_: Any) -> None:
            digests.append(request.digest)
            raise NothingFits("not tuned here")

        with monkeypatch.context() as patched:
            patched.setattr(jobs, "chosen", tune)
            patched.setattr(jobs, "search_ahead", lambda *_, **__: None)
            lospmm.nn.sparsify_(*arguments, device="h200", choice="sparse", **options)
        return digests

    return listed


@torch.no_grad()
def test_a_decoder_for_several_columns(asked: Callable[..., list[str]], tmp_path: Path) -> None:
    """The command, the service and ``sparsify_`` ask for the same kernels; a model of another process runs on them."""
    torch.manual_seed(0)
    model = pruned(nn.Linear(16, 40, bias=False), nn.SiLU(), nn.Linear(40, 16)).half()
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, net := tmp_path / "net.safetensors")
    rows = lospmm.nn.layers(model, drawn(2, 16).half()).rows
    table = LayerTable({name: replace(row, n=(1, 8, 64)) for name, row in rows.items()})
    (layers := tmp_path / "layers.toml").write_text(table.to_toml())
    words = ["tune-model", str(net), "--layers", str(layers), "--device", "h200", "--out", str(tmp_path / "out")]
    assert cli.run([*words, "--cache", "network", "--quiet"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    here = [(row["name"], row["n"], row["digest"]) for row in report["layers"] if row["skipped"] is None]
    assert [one[:2] for one in here] == [(name, n) for name in ("0.weight", "2.weight") for n in (1, 8, 64)]
    assert [(one["n"], one["layers"]) for one in report["totals"]] == [(1, 2), (8, 2), (64, 2)]
    with served() as port, Client(f"http://127.0.0.1:{port}") as client:
        there = client.tune_model(net, layers=table, device="h200", cache="network")
    assert [(one.name, one.n, one.digest) for one in there if one.skipped is None] == here
    assert asked(model, n=[1, 8, 64]) == [digest for *_, digest in here]
    wanted = copy.deepcopy(model)
    loaded = lospmm.nn.load_(model, tmp_path / "out", emulate=True)
    assert [(row.layer, row.n, row.advice) for row in loaded.rows] == [
        (name, n, "sparse") for name in "02" for n in (1, 8, 64)
    ]
    for tokens in (1, 5, 64, 70):
        x = drawn(tokens, 16).half()
        assert error(model(x), exact(wanted, x)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "tuned", "kernels", "dense"),
    [
        ("BERT-base", 12, 3, {EMBEDDING: 3}),  # two of its twelve blocks
        ("MobileNetV2", 36, 21, {DEPTHWISE: 17}),
    ],
)
def test_a_network(
    network: str,
    tuned: int,
    kernels: int,
    dense: dict[str, int],
    asked: Callable[..., list[str]],
    set_environment: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Every tensor has a row; each shape is tuned once, by the command, and the others ask for the same kernels."""
    set_environment("LOSPMM_MAX_UPLOAD_BYTES", 1 << 30)
    two_blocks = replace(NETWORKS["BERT-base"], model=lambda: Bert(Size(layers=2)))
    monkeypatch.setattr("benchmarks.inference.pruned.NETWORKS", NETWORKS | {"BERT-base": two_blocks})
    model, example = alike(network, 1, 0.99)
    net, layers = tmp_path / "net.safetensors", tmp_path / "layers.toml"
    save_file({name: one.numpy() for name, one in model.state_dict().items()}, net)
    layers.write_text((table := lospmm.nn.layers(model, example)).to_toml())
    options = {"verify": "none", "cache": "network"}
    words = ["tune-model", str(net), "--layers", str(layers), "--device", "h200", "--out", str(tmp_path / "out")]
    assert cli.run([*words, *(word for name, value in options.items() for word in (f"--{name}", value))]) == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["layers"]
    here = {row["name"]: (row["digest"], row["skipped"]) for row in rows}
    assert here.keys() == model.state_dict().keys()
    assert Counter(why for _, why in here.values() if why not in (None, VECTOR)) == dense
    digests = {name: digest for name, (digest, _) in here.items() if digest is not None}
    assert (len(digests), len(set(digests.values()))) == (tuned, kernels)
    with served() as port, net.open("rb") as file, httpx2.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{port}"
        files = {"matrix": ("net.safetensors", file), "layers": ("layers.toml", layers.read_bytes())}
        job = client.post(f"{url}/v1/models", params={"device": "h200", "wait": 60, **options}, files=files).json()
    there = {row["name"]: (row["kernel"] and row["kernel"].rpartition("/")[2], row["skipped"]) for row in job["layers"]}
    assert (job["state"], there) == ("succeeded", here)
    assert all(row["estimated_micros"] > 0 for row in job["layers"] if row["kernel"])
    assert asked(model, example, **options) == [digests[name] for name in table.rows if name in digests]
    shutil.rmtree(tmp_path)  # hundreds of megabytes
