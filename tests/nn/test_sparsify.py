"""Models whose layers are tuned in place: the same numbers, the same state, and a reason for what is dense."""

import copy
import json
import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.client.progress import LayerProgress  # noqa: E402
from lospmm.errors import BadRequest, NothingFits, ToolchainFault  # noqa: E402
from lospmm.nn import bound, sparsify  # noqa: E402
from lospmm.nn.sources import tuner_here  # noqa: E402
from lospmm.nn.tuning import Tuner  # noqa: E402
from lospmm.problem.problem import Problem  # noqa: E402
from lospmm.stages import Progress  # noqa: E402
from lospmm.tuning import jobs  # noqa: E402
from lospmm.tuning.options import Options  # noqa: E402
from lospmm.tuning.request import Request  # noqa: E402
from lospmm.tuning.session import AHEAD, Session  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, Mask, drawn, error, exact, perceptron, pruned  # noqa: E402
from tests.server.processes import serving  # noqa: E402


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
    assert [row["layer"] for row in json.loads(report.to_json())["layers"]] == ["0", "2"]
    assert "2 of 2 layers" in str(report) and "40 x 24" in str(report)
    lospmm.nn.restore_(model)
    assert [type(one) for one in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert lospmm.nn.status(model) == {}


def test_kernels_are_timed_as_in_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked for otherwise: that is where they will run."""
    seen: list[str] = []

    def noted(stack: ExitStack, device: str, options: Options, progress: LayerProgress | None) -> Tuner:
        seen.append(options.cache)
        return tuner_here(stack, device, options, progress)

    monkeypatch.setattr(sparsify, "tuner_here", noted)
    for options in ({}, {"cache": "cold"}, {"cache": "network"}):
        lospmm.nn.sparsify_(perceptron(), drawn(2, 24), **EMULATED, **options)
    assert seen == ["network", "cold", "network"]


def test_layers_are_begun_with_two_ahead_of_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has tuned them is gone before anything of the model is timed. A layer that fails holds up no other."""
    told: list[tuple[str, int]] = []
    read: list[int] = []
    matrix = bound.Tensors.matrix
    monkeypatch.setattr(bound.Tensors, "matrix", lambda own: read.append(own.weight.shape[0]) or matrix(own))

    def noted(stack: ExitStack, device: str, options: Options, progress: LayerProgress | None) -> Tuner:
        made = tuner_here(stack, device, options, progress)

        def ahead(problem: Problem) -> None:
            told.append(("begun", problem.matrix.m))
            if problem.matrix.m == 24:
                raise NothingFits("no kernel")

        def tune(problem: Problem, progress: Progress) -> Any:
            told.append(("tuned", problem.matrix.m))
            if problem.matrix.m == 24:
                raise NothingFits("no kernel")
            return made.tune(problem, progress)

        return replace(made, ahead=ahead, tune=tune)

    monkeypatch.setattr(sparsify, "tuner_here", noted)
    monkeypatch.setattr(sparsify, "swap", lambda *_: told.append(("swapped", 0)))
    close = Session.close
    monkeypatch.setattr(Session, "close", lambda session: told.append(("closed", 0)) or close(session))
    layers = [nn.Linear(16, 8), nn.Linear(8, 24), nn.Linear(24, 32), nn.Linear(32, 40)]
    report = lospmm.nn.sparsify_(pruned(*layers), drawn(2, 16), **EMULATED)
    assert told == [
        *(("begun", 24), ("begun", 32), ("tuned", 8)),
        *(("begun", 40), ("tuned", 24), ("tuned", 32), ("tuned", 40)),
        *(("closed", 0), ("swapped", 0), ("closed", 0)),
    ]
    assert [row.reason for row in report.rows if row.shape == (24, 8)] == ["no kernel"]
    assert sorted(read) == [8, 24, 32, 40], "once, in either thread"


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
def test_weights_are_compared_again_only_if_written_to_while_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    difference = bound.difference
    monkeypatch.setattr(bound, "difference", lambda one, *rest: read.append(len(one.weight)) or difference(one, *rest))
    model = perceptron()

    def write(layer: str, *_: object) -> None:
        if layer == "2":
            model[2].weight += 1.0

    lospmm.nn.sparsify_(model, n=10, **EMULATED)
    assert read == []
    assert lospmm.nn.status(model) == {"0": "", "2": ""}
    assert read == [40, 16]
    lospmm.nn.restore_(model)
    with pytest.warns(UserWarning, match="its weights are not those"):
        lospmm.nn.sparsify_(model, n=11, **EMULATED, progress=write)


@torch.no_grad()
def test_few_matrices_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sites, held = pruned(*(nn.Linear(24, 24) for _ in range(6)), share=0.8), [], []
    find = sparsify.find_sites

    def found(*arguments: Any) -> Any:
        sites[:], rows = find(*arguments)
        return sites, rows

    monkeypatch.setattr(sparsify, "find_sites", found)
    heard = lambda *_: held.append(sum(bool(site._matrix) for site in sites))  # noqa: E731
    assert len(lospmm.nn.sparsify_(model, n=[8, 16], **EMULATED, progress=heard).sparse) == 6
    assert max(held) <= 2 + AHEAD and not any(site._matrix for site in sites)


@torch.no_grad()
def test_a_layer_whose_files_cannot_be_made_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = jobs.chosen

    def failing() -> None:
        raise ToolchainFault("no such compiler")

    def first_fails(request: Request, **rest: Any) -> Any:
        return failing if request.problem.matrix.m == 40 else chosen(request, **rest)

    monkeypatch.setattr(jobs, "chosen", first_fails)
    rows = lospmm.nn.sparsify_(perceptron(), n=10, **EMULATED).rows
    assert [(row.layer, row.advice) for row in rows] == [("0", "dense"), ("2", "sparse")]
    assert rows[0].reason == "no such compiler"


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


@pytest.mark.slow
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
