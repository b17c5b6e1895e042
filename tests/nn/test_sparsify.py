"""Models whose layers are tuned in place: the same numbers, the same state, and a reason for what is dense."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.errors import BadRequest, NothingFits  # noqa: E402
from lospmm.nn import choice, operator, timing, whole  # noqa: E402
from lospmm.nn import report as report_module  # noqa: E402
from lospmm.nn.layer import Sparse, SparseLinear, pieces  # noqa: E402
from lospmm.nn.tuning import Tuner  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402
from tests.server.processes import serving  # noqa: E402


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return pruned(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16, bias=False))


@torch.no_grad()
def test_a_model_runs_on_its_kernels() -> None:
    model, x = perceptron(), drawn(2, 5, 24)
    wanted = exact(model, x)
    report = lospmm.nn.sparsify_(model, x, **EMULATED)
    assert report.sparse == ("0", "2")
    assert [(row.layer, row.shape, row.n, row.advice) for row in report.rows] == [
        ("0", (40, 24), 10, "sparse"),
        ("2", (16, 40), 10, "sparse"),
    ]
    assert lospmm.nn.status(model) == {"0": "", "2": ""}
    found = model(x)
    assert error(found, wanted) < MAX_ERROR
    assert found.is_contiguous()
    assert torch.equal(model[2](input=model[1](model[0](input=x))), found)
    assert report_module.from_json(report.to_json()) == report
    assert "2 of 2 layers" in str(report) and "40 x 24" in str(report)
    lospmm.nn.restore_(model)
    assert [type(one) for one in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert lospmm.nn.status(model) == {}


@pytest.fixture(scope="module")
def served() -> tuple[nn.Sequential, nn.Linear]:
    torch.manual_seed(1)
    model = pruned(nn.Linear(12, 20))
    dense = copy.deepcopy(model[0])
    lospmm.nn.sparsify_(model, n=[4, 32], **EMULATED)
    return model, dense.double()


@torch.no_grad()
@settings(max_examples=25)
@given(shape=st.lists(st.integers(1, 5), max_size=3), order=st.randoms(use_true_random=False), stride=st.integers(1, 2))
def test_any_leading_dimensions_in_any_order_of_memory(
    served: tuple[nn.Sequential, nn.Linear], shape: list[int], order: Any, stride: int
) -> None:
    model, dense = served
    axes = list(range(len(shape) + 1))
    order.shuffle(axes)
    sizes = [*shape, 12 * stride]
    x = drawn(*(sizes[axis] for axis in axes)).permute([axes.index(axis) for axis in range(len(axes))])[..., ::stride]
    found = model(x)
    assert found.shape == (*shape, 20) and error(found, dense(x.double())) < MAX_ERROR


@torch.no_grad()
def test_calls_take_the_smallest_bucket_that_holds_them(
    served: tuple[nn.Sequential, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dense = served
    ran: list[int] = []
    run = lospmm.Kernel.run_on_cpu

    def watched(kernel: lospmm.Kernel, b: Any, *rest: Any) -> Any:
        ran.append(b.shape[1])
        return run(kernel, b, *rest)

    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", watched)
    fits = ((1, []), (2, [4]), (4, [4]), (5, []), (16, [32]), (32, [32]), (0, []))
    # More than any holds: in pieces, of which the last may fill a bucket enough, or be dense.
    larger = ((33, [32]), (34, [32, 4]), (40, [32]), (50, [32, 32]), (64, [32, 32]), (100, [32, 32, 32, 4]))
    for tokens, bucket in (*fits, *larger):
        ran.clear()
        x = drawn(tokens, 12)
        found = model(x)
        assert ran == bucket, tokens
        assert found.shape == (tokens, 20)
        if tokens:
            assert error(found, dense(x.double())) < MAX_ERROR


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=4),
    n=st.integers(0, 300),
)
def test_pieces_are_next_to_each_other_and_each_has_a_kernel(sizes: list[tuple[int, int]], n: int) -> None:
    buckets = tuple(sorted(((least, least + more) for least, more in sizes), key=lambda one: one[1]))
    found = pieces(buckets, n)
    ends = [0, *(end for _, end in found)]
    assert [first for first, _ in found] == ends[:-1] and ends[-1] <= n
    assert all(any(least <= end - first <= most for least, most in buckets) for first, end in found)
    rest = n - ends[-1]
    assert not any(least <= rest <= most for least, most in buckets) or rest == 0
    assert rest < (buckets[-1][1] if buckets else n + 1)


@torch.no_grad()
def test_more_columns_than_any_kernel_has_stay_in_the_layout_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perceptron(), drawn(23, 24)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, drawn(10, 24), **EMULATED)
    assert model[0].lospmm_tuned.features_first
    assert not model[0](x).is_contiguous()
    monkeypatch.setattr(operator, "dense_product", None)
    assert error(model(x), wanted) < MAX_ERROR and model(x).is_contiguous()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(compiled(x), wanted) < MAX_ERROR
    assert error(compiled(x.view(1, 23, 24)), wanted.view(1, 23, 16)) < MAX_ERROR


@torch.no_grad()
def test_the_state_of_a_model_is_that_of_the_dense_one() -> None:
    model, x = perceptron(), drawn(10, 24)
    before = copy.deepcopy(model)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    state = model.state_dict()
    assert list(state) == list(before.state_dict())
    assert all(torch.equal(state[name], one) for name, one in before.state_dict().items())
    fresh = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16, bias=False))
    fresh.load_state_dict(state)
    assert error(fresh(x), wanted) < MAX_ERROR
    model.load_state_dict(before.state_dict())
    assert lospmm.nn.status(model) == {"0": "", "2": ""}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert lospmm.nn.status(other) == {"0": "", "2": ""}
        assert error(other(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_other_weights_are_dense_until_the_tuned_ones_are_back() -> None:
    model, x = perceptron(), drawn(10, 24)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    kept = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="its weights are not those that its kernels were tuned for"):
        model[0].weight.mul_(2.0)
        found = model(x)
    assert torch.equal(model(x), found)  # and no second warning, which would be an error
    with pytest.warns(UserWarning, match="its weights are not those"):
        dense = copy.deepcopy(model)
    lospmm.nn.restore_(dense)
    assert error(found, exact(dense, x)) < MAX_ERROR
    with pytest.warns(UserWarning, match="its bias is not the one in the code"):
        model[0].weight.mul_(0.5)
        model[0].bias.add_(1.0)
        model(x)
    model.load_state_dict(kept)
    assert lospmm.nn.status(model) == {"0": "", "2": ""}


@torch.no_grad()
def test_what_does_not_fit_is_dense_with_a_reason() -> None:
    model, x = perceptron(), drawn(10, 24)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    with pytest.warns(UserWarning, match="float64, and its kernels take float32"):
        model.double()
    assert error(model(x.double()), wanted) < MAX_ERROR
    model.float()
    assert lospmm.nn.status(model) == {"0": "", "2": ""}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).shape == wanted.shape


@torch.no_grad()
@pytest.mark.parametrize("form", ["prune", "parametrize"])
def test_masked_weights(form: str) -> None:
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(24, 16)).eval(), drawn(10, 24)
    if form == "prune":
        prune.l1_unstructured(model[0], "weight", 0.85)
    else:
        parametrize.register_parametrization(model[0], "weight", Mask(torch.rand(16, 24) < 0.15))
    wanted, keys, original = model(x).double(), list(model.state_dict()), type(model[0])
    assert lospmm.nn.sparsify_(model, x, **EMULATED).sparse == ("0",)
    assert error(model(x), wanted) < MAX_ERROR
    assert list(model.state_dict()) == keys
    with pytest.warns(UserWarning, match="its weights are not those"):
        (model[0].weight_mask if form == "prune" else model[0].parametrizations.weight.original).zero_()
        assert torch.equal(model(x), model[0].bias.expand(10, 16))
    lospmm.nn.restore_(model)
    assert type(model[0]) is original and list(model.state_dict()) == keys
    assert torch.equal(model(x), model[0].bias.expand(10, 16))


class Mask(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


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
        "doubled": "more than a mask",
    }
    assert {name: type(module) for name, module in model.items()} == before
    assert report.sparse == ()


WORDS = (
    "fewer zeros", "float64", "depthwise", "circular", "differs at both ends", "all its weights are zero",
    "no example reached it", "more than a mask",
)  # fmt: skip


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


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


def test_what_cannot_be_timed_here_stays_dense() -> None:
    model = perceptron()
    told: list[tuple[str, str]] = []
    report = lospmm.nn.sparsify_(
        model, n=7, device="h200", verify="none", progress=lambda layer, stage, *_: told.append((layer, stage))
    )
    assert {row.reason.partition(":")[0] for row in report.rows} == {"it cannot be timed here"}
    assert type(model[0]) is nn.Linear
    assert {("0", "emit"), ("2", "compile")} <= set(told)


@torch.no_grad()
def test_the_faster_are_chosen_and_their_neighbours_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = pruned(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = drawn(16, 8)
    # The last is slow; the one before it is worth it only while it need not transpose what it computes.
    times = {"0": (2.0, 1.0), "2": (3.0, 3.5), "4": (12.0, 11.0)}

    def sparse_micros(site: Any, shape: Any, *, fed_first: bool, sharing: int, contexts: object) -> float:
        assert (shape, sharing, contexts) == ((16,), 1, None)
        return times[site.name][0 if site.module.lospmm_tuned.features_first or fed_first else 1]

    monkeypatch.setattr(choice, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(timing, "dense_micros", lambda *_, **__: 4.0)
    monkeypatch.setattr(timing, "sparse_micros", sparse_micros)
    monkeypatch.setattr(whole, "block_of", lambda model, *_: lambda: 9.0 if type(model[0]) is SparseLinear else 12.0)
    report = lospmm.nn.sparsify_(model, x, device="h200", verify="none")
    assert [(row.layer, row.advice, row.sparse_micros) for row in report.rows] == [
        ("0", "sparse", 2.0),
        ("2", "sparse", 3.0),
        ("4", "dense", 12.0),
    ]
    assert [one.lospmm_tuned.features_first for one in (model[0], model[2])] == [True, False]
    assert [one.lospmm_state.tuned["weight"].buckets[0].least for one in (model[0], model[2])] == [8, 12]
    assert "take 9.0 us of 12.0 us dense" in str(report)


@torch.no_grad()
@pytest.mark.parametrize(("fastest", "kept"), [(1, ("0",)), (0, ())])
def test_masks_outlive_the_trials_of_a_model(
    fastest: int, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), drawn(16, 8)
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Mask(torch.rand(8, 8) < 0.2))
    wanted, keys = model(x).double(), list(model.state_dict())
    monkeypatch.setattr(choice, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(timing, "dense_micros", lambda *_, **__: 4.0)
    monkeypatch.setattr(timing, "sparse_micros", lambda site, *_, **__: 1.0 + int(site.name))

    def micros() -> float:
        assert error(model(x), wanted) < MAX_ERROR
        return 1.0 + abs(fastest - sum(isinstance(one, Sparse) for one in model))

    monkeypatch.setattr(whole, "block_of", lambda *_: micros)
    report = lospmm.nn.sparsify_(model, x, device="h200", verify="none")
    assert report.sparse == kept
    assert [row.reason for row in report.rows if row.advice == "dense"] == ["the whole model is faster so"] * (
        2 - fastest
    )
    assert error(model(x), wanted) < MAX_ERROR
    assert list(model.state_dict()) == keys
    assert [[name for name in one._buffers if "mask" in name] for one in model] == [
        ["lospmm_weight_mask"]
    ] * fastest + [[]] * (2 - fastest)
    lospmm.nn.restore_(model)
    assert error(model(x), wanted) < MAX_ERROR and list(model.state_dict()) == keys


@torch.no_grad()
def test_by_a_service(tmp_path: Path) -> None:
    model, x = perceptron(), drawn(10, 24)
    wanted = exact(model, x)
    with serving(tmp_path) as (_, port):
        options = {"device": "h200", "choice": "sparse"}
        report = lospmm.nn.sparsify_(model, x, server=f"http://127.0.0.1:{port}", **options)
        with pytest.raises(BadRequest, match="a service decides that itself"):
            lospmm.nn.sparsify_(model, x, server=f"http://127.0.0.1:{port}", measure="none", **options)
        lospmm.nn.sparsify_(model, x, server=f"http://127.0.0.1:{port}", **options)
        convolution, image = pruned(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()), drawn(2, 4, 5, 5)
        convolved = exact(convolution, image)
        graph = lospmm.nn.fused(convolution)
        assert lospmm.nn.sparsify_(graph, image, server=f"http://127.0.0.1:{port}", **options).sparse == ("0",)
    assert report.sparse == ("0", "2")
    assert error(model(x), wanted) < MAX_ERROR and error(graph(image), convolved) < MAX_ERROR
    assert all(one.lospmm_tuned.buckets[0].fuses for one in (model[0], model[2], getattr(graph, "0")))
    assert json.loads(report.to_json())["layers"][0]["kind"] == "Linear"
