"""Which layers are put on kernels: those that are timed to be faster, in their model."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn import choice, sparsify, timing, whole  # noqa: E402
from lospmm.nn.layer import SparseLinear  # noqa: E402
from lospmm.nn.sparse import Sparse  # noqa: E402
from tests.nn.models import MAX_ERROR, Mask, drawn, error, pruned  # noqa: E402


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
    monkeypatch.setattr(sparsify, "misplaced", lambda *_, **__: None)
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


class Unregistered(Mask):
    """A mask that is no buffer, so that one has to be made."""

    def __init__(self, mask: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.mask = mask


@torch.no_grad()
@pytest.mark.parametrize(("fastest", "kept"), [(1, ("0",)), (0, ())])
def test_masks_outlive_the_trials_of_a_model(
    fastest: int, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), drawn(16, 8)
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Unregistered(torch.rand(8, 8) < 0.2))
    wanted, keys = model(x).double(), list(model.state_dict())
    monkeypatch.setattr(choice, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(sparsify, "misplaced", lambda *_, **__: None)
    monkeypatch.setattr(timing, "dense_micros", lambda *_, **__: 4.0)
    monkeypatch.setattr(timing, "sparse_micros", lambda site, *_, **__: 1.0 + int(site.name))

    def micros() -> float:
        assert error(model(x), wanted) < MAX_ERROR
        return 1.0 + abs(fastest - sum(isinstance(one, Sparse) for one in model))

    monkeypatch.setattr(whole, "block_of", lambda *_: micros)
    report = lospmm.nn.sparsify_(model, x, device="h200", verify="none")
    assert report.sparse == kept
    assert [row.reason for row in report.rows if row.advice == "dense"] == ["the model is faster with it dense"] * (
        2 - fastest
    )
    assert error(model(x), wanted) < MAX_ERROR
    assert list(model.state_dict()) == keys
    assert [[name for name in one._buffers if "mask" in name] for one in model] == [
        ["lospmm_weight_mask"]
    ] * fastest + [[]] * (2 - fastest)
    lospmm.nn.restore_(model)
    assert error(model(x), wanted) < MAX_ERROR and list(model.state_dict()) == keys
