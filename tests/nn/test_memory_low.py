"""Layers with ``memory="low"``: every call runs on kernels that share one copy of the weights."""

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

import lospmm.nn  # noqa: E402
from tests.nn.models import drawn, error, exact, pruned  # noqa: E402

LOW = {"device": "h200", "memory": "low", "families": "bitmap", "verify": "none"}


@torch.no_grad()
def test_every_call_runs_on_one_cubin(tmp_path: Path) -> None:
    model = pruned(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), share=0.5).half()
    model[2].weight.copy_(-model[0].weight)  # other data, but the same text to compile
    wanted, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    report = lospmm.nn.sparsify_(model, n=[1, 20], **LOW)
    assert [(row.layer, row.n, row.advice) for row in report.rows] == [
        ("0", 1, "sparse"), ("0", 24, "sparse"), ("2", 1, "sparse"), ("2", 24, "sparse")
    ]  # fmt: skip
    for module in (model[0], model[2]):
        tuned = module.lospmm_tuned
        assert tuned.sizes == ((1, 1), (1, 24)) and tuned.frees_weight
        assert len({bucket.kernel.cubin for bucket in tuned.buckets}) == 1
    for columns in (1, 2, 24, 60):
        x = drawn(columns, 40).half()
        assert error(model(x), exact(wanted, x)) < 2e-3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    lospmm.nn.save(model, tmp_path / "low")
    loaded = copy.deepcopy(wanted)
    lospmm.nn.load_(loaded, tmp_path / "low", emulate=True)
    assert loaded[0].lospmm_tuned.frees_weight and error(loaded(x), exact(wanted, x)) < 2e-3


@torch.no_grad()
def test_layers_without_such_kernels_stay_dense() -> None:
    single, window = pruned(nn.Linear(8, 16), share=0.5), pruned(nn.Conv2d(1, 3, 3), share=0.5).half()
    report = lospmm.nn.sparsify_(single, n=8, **LOW).rows
    report += lospmm.nn.sparsify_(window, drawn(1, 1, 8, 8).half(), **LOW).rows
    assert [row.advice for row in report] == ["dense", "dense"]
    assert "choose dtype float16 or bfloat16" in report[0].reason and "no convolutions" in report[1].reason


@torch.no_grad()
def test_masked_and_shared_weights_stay_where_they_are() -> None:
    masked, shared, twin = (nn.Linear(16, 16).half() for _ in range(3))
    twin.weight = shared.weight
    model = nn.Sequential(masked, shared, twin)
    with torch.no_grad():
        prune.l1_unstructured(masked, "weight", 0.5)
        shared.weight[:, ::2] = 0
    report = lospmm.nn.sparsify_(model, n=8, **LOW)
    assert report.sparse == ("0", "1", "2")
    assert not any(module.lospmm_tuned.frees_weight for module in model)
