"""What is timed is the layer as it will be called; the clock itself needs a GPU."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

import lospmm  # noqa: E402
import lospmm.nn  # noqa: E402
from lospmm.errors import Unsupported  # noqa: E402
from lospmm.nn import choice, timing  # noqa: E402
from lospmm.nn.calling import calling_of, settled  # noqa: E402
from lospmm.nn.layer import Sparse  # noqa: E402
from lospmm.nn.layout import UNKNOWN  # noqa: E402
from lospmm.nn.report import from_json  # noqa: E402
from tests.nn.models import drawn, pruned  # noqa: E402


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(4, 4, 3, padding=1), nn.Conv1d(5, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.relu(self.conv(x) + x).flatten(2)[:, :1].expand(-1, 5, -1))


@torch.no_grad()
@pytest.mark.parametrize("called", ["eager", "compiled_graph"])
def test_layers_are_timed_on_their_kernels(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    for weight in (attention.in_proj_weight, attention.out_proj.weight):
        weight.mul_(torch.rand_like(weight) < 0.2)
    ran: list[lospmm.Kernel] = []
    run = lospmm.Kernel.run_on_cpu
    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", lambda *given: ran.append(given[0]) or run(*given))
    seen: list[tuple[str, int]] = []
    whole: list[int] = []

    def micros_of(call: Callable[[], object], _device: torch.device) -> float:
        ran.clear()
        call()  # a layer that misses its kernel warns, which is an error here
        seen.append(("sparse" if ran else "dense", len(ran)))
        return 1.0 if ran else 2.0

    def model_micros(model: nn.Module, example: Any, calling: Any) -> float:
        assert example is not None and (calling.compiled, calling.captured) == (called != "eager",) * 2
        whole.append(sum(isinstance(one, Sparse) and bool(one.lospmm_state.tuned) for one in model.modules()))
        return {0: 3.0, 2: 2.0, 1: 1.0}[whole[-1]]

    monkeypatch.setattr(timing, "micros_of", micros_of)
    monkeypatch.setattr(timing, "model_micros", model_micros)
    monkeypatch.setattr(choice, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x = drawn(2, 4, 8)
    models = [
        (lospmm.nn.fused(pruned(Residual())[0]), drawn(2, 4, 5, 5), 2, 2),
        (pruned(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), x, 1, 2),  # of two alike one is timed
        (attention.eval(), (x, x, x), 2, 2),
    ]
    for model, example, dense, layers in models:
        seen.clear()
        whole.clear()
        report = lospmm.nn.sparsify_(model, example, device="h200", verify="none", called=called)
        assert seen == [("dense", 0)] * dense + [("sparse", 1)] * layers, str(report)
        assert whole == [0, 2, 1, 0, 1], "dense, all, half; and the dense one and the best again"
        assert len(report.sparse) == 1, "the model is fastest with half of its layers"
        assert [row.reason for row in report.rows if row.advice == "dense"] == ["the whole model is faster so"]
        assert report.model is not None
        assert (report.model.dense_micros, report.model.chosen_micros, report.model.given_back) == (3.0, 1.0, 1)
        assert "1.0 us of 3.0 us dense; 1 layers are dense for its sake" in str(report)
        assert from_json(report.to_json()) == report


@torch.no_grad()
@pytest.mark.parametrize("called", ["eager", "compiled"])
def test_a_model_is_timed_as_it_is_called(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    compile_ = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model, **rest: compiled.append(model) or compile_(model, **rest))
    monkeypatch.setattr(timing, "_BLOCK_SECONDS", 1e-3)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.inner(x) * scale

    model = Scaled().train()
    assert timing.model_micros(model, {"x": drawn(2, 4), "scale": 2.0}, calling_of(called)) > 0
    assert model.training
    assert compiled == ([model] if called == "compiled" else [])
    with pytest.raises(Unsupported, match=r"the model cannot be (called|compiled): .*give called another value"):
        timing.model_micros(model, {"y": drawn(2, 4)}, calling_of(called))


@settings(max_examples=300)
@given(times=st.lists(st.floats(1.0, 9.0), min_size=1, max_size=200))
def test_a_model_never_takes_longer_than_the_dense_one(times: list[float]) -> None:
    tried = [0]

    def measure(keep: int) -> float:
        assert keep not in tried
        tried.append(keep)
        return times[keep]

    keep, micros = settled(len(times) - 1, times[0], measure)
    assert micros == times[keep] == min(times[one] for one in tried)
    assert len(tried) <= 1 + (len(times) - 1).bit_length() + 2


def test_layers_are_given_back_until_the_model_is_faster() -> None:
    # Each layer that is kept beyond the first 40 costs the others more than it gains.
    keep, micros = settled(52, 100.0, lambda keep: 100.0 - min(keep, 40) + 5 * max(0, keep - 40))
    assert (keep, micros) == (39, 61.0)
    assert settled(52, 100.0, lambda keep: 100.0 + keep) == (0, 100.0)
    assert settled(52, 100.0, lambda keep: 100.0 - keep) == (52, 48.0)


@pytest.mark.parametrize(
    ("times", "expected", "dense"),
    [
        # dense, both, one; dense and the best again
        ([9.0, 6.0, 7.0, 9.5, 6.5], (9.0, 6.0), [False, False]),
        ([9.0, 8.0, 7.0, 8.5, 7.5], (8.5, 7.0), [False, True]),
        ([9.0, 8.0, 7.0, 6.5, 7.5], (6.5, 6.5), [True, True]),  # the dense model was slow for a while
        ([9.0, 9.5, 10.0], (9.0, 9.0), [True, True]),
    ],
)
def test_the_choice_and_the_dense_model_are_timed_twice(
    times: list[float], expected: tuple[float, float], dense: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[Any]] = []
    monkeypatch.setattr(choice, "unswap", lambda _: None)
    monkeypatch.setattr(choice, "call_parts", lambda _: None)
    monkeypatch.setattr(choice, "swap", lambda works, _: kept.append(works))
    works: list[Any] = [SimpleNamespace(gain=gain, given_back=False) for gain in (5.0, 2.0)]
    assert choice.settle(nn.Identity(), works[::-1], UNKNOWN, partial(next, iter(times))) == expected
    assert [work.given_back for work in works] == dense
    assert kept[-1] == [work for work in works if not work.given_back]
    assert len(kept) == len(times) + 1
