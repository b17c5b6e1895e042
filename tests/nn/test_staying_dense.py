"""What is not put on kernels, with a reason, and models that are as they were when something goes wrong."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.errors import BadRequest, NothingFits  # noqa: E402
from lospmm.nn.layer import SparseLinear  # noqa: E402
from lospmm.nn.tuning import Tuner  # noqa: E402
from tests.nn.models import EMULATED, drawn, perceptron, pruned  # noqa: E402


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
def test_every_layer_that_stays_dense_has_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "full": nn.Linear(8, 8),
            "doubles": pruned(nn.Linear(8, 8)).to(torch.float64)[0],
            "own": Own(8, 8),
            "depthwise": pruned(nn.Conv2d(8, 8, 3, groups=8))[0],
            "circular": pruned(nn.Conv2d(8, 8, 3, padding_mode="circular"))[0],
            "uneven": pruned(nn.Conv2d(8, 8, 2, padding="same"))[0],
            "zero": pruned(nn.Linear(8, 8), share=1.0)[0],
            "unheard": pruned(nn.Conv2d(8, 8, 3))[0],
            "doubled": nn.Linear(8, 8),
            "no outputs": nn.Linear(8, 0),
            **{f"as {layout}".replace("torch.", ""): laid_out(layout) for layout in LAYOUTS},
        }
    )
    parametrize.register_parametrization(model["doubled"], "weight", Doubled())
    before = {name: type(module) for name, module in model.items()}
    report = lospmm.nn.sparsify_(model, n=8, **EMULATED)
    reasons = {row.layer: row.reason for row in report.rows}
    assert {name: next(word for word in WORDS if word in reason) for name, reason in reasons.items()} == {
        "full": "fewer zeros",
        "doubles": "float64",
        "depthwise": "depthwise",
        "circular": "circular",
        "uneven": "differs at both ends",
        "zero": "all its weights are zero",
        "unheard": "no example reached it",
        "doubled": "more than a constant mask",
        "no outputs": "a matrix has two sides",
        **{f"as {layout}".replace("torch.", ""): "make them dense first" for layout in LAYOUTS},
    }
    zeros = {row.layer: row.sparsity for row in report.rows}
    assert (zeros["full"], zeros["zero"], zeros["doubles"]) == (0.0, 1.0, None)
    table = {line.split()[0]: line.split() for line in str(report).splitlines()}
    assert (table["zero"][4], table["doubles"][4]) == ("100.0%", "-")
    assert {name: type(module) for name, module in model.items()} == before
    assert report.sparse == ()


WORDS = (
    "fewer zeros", "float64", "depthwise", "circular", "differs at both ends", "all its weights are zero",
    "no example reached it", "more than a constant mask", "a matrix has two sides", "make them dense first",
)  # fmt: skip


def test_a_model_below_the_limit_says_what_admits_it() -> None:
    report = lospmm.nn.sparsify_(pruned(nn.Linear(8, 8), nn.Linear(8, 4), share=0.25), n=8, **EMULATED)
    hint = "2 below min_sparsity, at most 25.0% zeros: min_sparsity=0.25 admits 2"
    assert str(report).splitlines()[-1] == f"0 of 2 layers run on kernels; {hint}"


LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)


def laid_out(layout: torch.layout) -> nn.Linear:
    layer = pruned(nn.Linear(8, 8))[0]
    blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse(layout=layout, **blocks), requires_grad=False)
    return layer


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_inputs_that_are_nested_or_sparse_are_multiplied_as_before() -> None:
    dense, model = perceptron()[:1], perceptron()[:1]
    lospmm.nn.sparsify_(model, n=10, **EMULATED)
    x = drawn(10, 24) * (drawn(10, 24, seed=1) > 1)
    parts = [x[:4], x[4:]]
    for given in (
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        x.to_sparse(),
        x.to_sparse_csr(),
    ):
        found, wanted = model(given), dense(given)
        pairs = zip(found.unbind(), wanted.unbind(), strict=True) if given.is_nested else [(found, wanted)]
        assert all(torch.allclose(one.to_dense(), other.to_dense()) for one, other in pairs)


@torch.no_grad()
def test_a_changed_weight_warns_once() -> None:
    model = perceptron()
    lospmm.nn.sparsify_(model, n=10, **EMULATED)
    model[0].weight.mul_(2)
    with pytest.warns(UserWarning, match="its weights are not those") as warned:
        for _ in range(3):
            assert "its weights are not those" in lospmm.nn.status(model)["0"]
        model.load_state_dict(model.state_dict())
        model(drawn(10, 24))
    assert len(warned) == 1


def test_a_layer_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perceptron(), drawn(10, 24)
    tune = Tuner.bucket

    def refusing(tuner: Tuner, site: Any, shape: Any) -> Any:
        if site.name == "0":
            raise NothingFits("no tile size fits")
        return tune(tuner, site, shape)

    monkeypatch.setattr(Tuner, "bucket", refusing)
    report = lospmm.nn.sparsify_(model, x, **EMULATED)
    assert [(row.layer, row.advice, row.reason) for row in report.rows] == [
        ("0", "dense", "no tile size fits"),
        ("2", "sparse", "asked for"),
    ]
    assert type(model[0]) is nn.Linear and type(model[2]) is SparseLinear


@pytest.mark.parametrize(
    ("request_", "error_", "words"),
    [
        ({}, BadRequest, "give an example"),
        ({"n": 2.5}, BadRequest, "n is 2.5"),
        ({"n": "16"}, BadRequest, "n is '16'"),
        ({"n": torch.tensor(2.5)}, BadRequest, "n is tensor"),
        ({"n": 4, "measur": "gpu"}, BadRequest, "'measur': no such option; did you mean measure"),
        ({"n": [4, 0]}, BadRequest, "n is 0: B must have from 1 to"),
        ({"example": np.ones((2, 3), np.float32)}, BadRequest, "the example is of type ndarray: give a tensor"),
        ({"example": "tokens"}, BadRequest, "the example is of type str: give a tensor"),
        ({"n": 4, "min_sparsity": 60}, BadRequest, "min_sparsity is 60: give a share of zeros, from 0 to 1"),
        ({"n": 4, "choice": "fast"}, BadRequest, "choice 'fast'"),
        ({"n": 4, "called": "often"}, BadRequest, "called 'often': choose eager, graph, compiled, compiled_graph"),
        ({"n": 4, "device": "abacus"}, BadRequest, "abacus"),
        ({"n": 4, "dtype": "int8"}, BadRequest, "dtype .int8."),
    ],
)
def test_a_wrong_request_leaves_the_model_as_it_was(request_: dict[str, Any], error_: Any, words: str) -> None:
    model = perceptron()
    with pytest.raises(error_, match=words):
        lospmm.nn.sparsify_(model, **{"device": "h200", **request_})
    assert type(model[0]) is nn.Linear


def test_what_is_no_model() -> None:
    with pytest.raises(BadRequest, match=r"the model is of type list: give a torch\.nn\.Module"):
        lospmm.nn.sparsify_([nn.Linear(8, 8)], n=8, device="h200")


def test_an_interruption_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron()
    bucket, calls = Tuner.bucket, []

    def interrupted(tuner: Tuner, site: Any, shape: Any) -> Any:
        calls.append(site)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return bucket(tuner, site, shape)

    monkeypatch.setattr(Tuner, "bucket", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lospmm.nn.sparsify_(model, n=8, **EMULATED)
    assert [type(one) for one in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_a_model_that_cannot_be_timed_here_is_refused_before_it_is_tuned() -> None:
    model = perceptron()
    with pytest.raises(BadRequest, match="choice measured: the model cannot be timed: it is on the CPU"):
        lospmm.nn.sparsify_(model, n=7, device="h200", progress=lambda *_: pytest.fail("tuned"))
    assert type(model[0]) is nn.Linear
