"""What is timed is the layer as it will be called; the clock itself needs a GPU."""

import gc
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

import lospmm  # noqa: E402
import lospmm.nn  # noqa: E402
from lospmm.errors import Unsupported  # noqa: E402
from lospmm.nn import choice, sparsify, timing, whole  # noqa: E402
from lospmm.nn.calling import apart, calling_of  # noqa: E402
from lospmm.nn.choice import settled  # noqa: E402
from lospmm.nn.layout import UNKNOWN  # noqa: E402
from lospmm.nn.paired import Block, Turns, in_turn  # noqa: E402
from lospmm.nn.report import ModelTimes, Report  # noqa: E402
from lospmm.nn.sparse import Sparse, made_dense  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(4, 4, 3, padding=1), nn.Conv1d(5, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.relu(self.conv(x) + x).flatten(2)[:, :1].expand(-1, 5, -1))


@pytest.mark.slow
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
    states: list[int] = []

    def micros_of(call: Callable[[], object], _device: torch.device) -> float:
        ran.clear()
        call()  # a layer that misses its kernel warns, which is an error here
        seen.append(("sparse" if ran else "dense", len(ran)))
        return 1.0 if ran else 2.0

    def on_kernels(model: nn.Module) -> int:
        return sum(isinstance(one, Sparse) and bool(one.lospmm_state.tuned) for one in model.modules())

    def block_of(model: nn.Module, example: Any, calling: Any) -> Block:
        assert example is not None and (calling.compiled, calling.captured) == (called != "eager",) * 2
        state = on_kernels(model)
        states.append(state)

        def block() -> float:
            assert on_kernels(model) == state, "a block is run in the state that it was made ready in"
            return {0: 3.0, 2: 2.0, 1: 1.0}[state]

        return block

    monkeypatch.setattr(timing, "micros_of", micros_of)
    monkeypatch.setattr(whole, "block_of", block_of)
    monkeypatch.setattr(choice, "misfit", lambda *_, **__: None)
    monkeypatch.setattr(sparsify, "misplaced", lambda *_, **__: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    x = drawn(2, 4, 8)
    models = [
        (lospmm.nn.fused(pruned(Residual())[0]), drawn(2, 4, 5, 5), 2, 2),
        (pruned(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), x, 1, 2),  # of two alike one is timed
        (attention.eval(), (x, x, x), 2, 2),
    ]
    for model, example, dense, layers in models:
        seen.clear()
        states.clear()
        report = lospmm.nn.sparsify_(model, example, device="h200", verify="none", called=called)
        assert seen == [("dense", 0)] * dense + [("sparse", 1)] * layers, str(report)
        assert states == [0, 2, 1, 2], "dense, all, half, all again"
        assert len(report.sparse) == 1, "the model is fastest with half of its layers"
        assert [row.reason for row in report.rows if row.advice == "dense"] == ["the model is faster with it dense"]
        assert report.model is not None
        assert (report.model.dense_micros, report.model.chosen_micros, report.model.given_back) == (3.0, 1.0, 1)
        assert (report.model.ratio, report.model.noise) == (1 / 3, 0)
        assert "1.0 us of 3.0 us dense, 0.333 of it (noise 0.0%); 1 layers are dense for its sake" in str(report)


@pytest.mark.parametrize("called", ["eager", "compiled"])
def test_a_model_is_timed_as_it_is_called(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(whole, "_BLOCK_SECONDS", 1e-3)
    ran: list[bool] = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            ran.append(torch.compiler.is_compiling())
            assert not self.training and not torch.is_grad_enabled()
            return self.inner(x) * scale

    model, calling = Scaled().train(), calling_of(called)
    with whole.timed_whole(model, calling):
        assert whole.block_of(model, {"x": drawn(2, 4), "scale": 2.0}, calling)() > 0
        with pytest.raises(Unsupported, match=r"the model cannot be (called|compiled): .*give called another value"):
            whole.block_of(model, {"y": drawn(2, 4)}, calling)
    assert model.training and torch.is_grad_enabled()
    assert ran and set(ran) == {called == "compiled"}


@torch.no_grad()
def test_states_of_a_compiled_model_take_turns_without_compiling_again() -> None:
    """Dense and on kernels, back and forth: each keeps what was compiled for it, and computes what it did."""
    torch.manual_seed(0)
    compiled: list[int] = []
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    prune.l1_unstructured(first, "weight", 0.8)  # a hook computes the weight of the dense layer
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(first, pruned(encoder)[0], last).eval()
    pruned(last)
    for weight in (encoder.self_attn.in_proj_weight, encoder.self_attn.out_proj.weight):
        weight.mul_(torch.rand_like(weight) < 0.2)
    x = drawn(2, 5, 8)
    wanted = exact(model, x)
    report = lospmm.nn.sparsify_(model, x, **EMULATED)
    assert len(report.sparse) == 6, str(report)

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(sum("spmm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def made() -> Callable[..., Any]:
        with_backend = partial(torch.compile, backend=backend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", with_backend)
            return apart(model, fullgraph=True)

    with whole.timed_whole(model, calling_of("compiled")):
        kinds = [type(one) for one in model.modules()]
        on_kernels = made()
        assert error(on_kernels(x), wanted) < MAX_ERROR
        with made_dense(model):
            assert not any(isinstance(one, Sparse) for one in model.modules())
            dense = made()
            assert error(dense(x), wanted) < MAX_ERROR
        for _ in range(3):
            assert error(on_kernels(x), wanted) < MAX_ERROR
            with made_dense(model):
                assert error(dense(x), wanted) < MAX_ERROR
        assert compiled == [6, 0]
        assert [type(one) for one in model.modules()] == kinds


@settings(max_examples=60)
@given(
    ratio=st.floats(0.5, 2.0),
    drift=st.floats(-0.02, 0.02),
    stalls=st.sets(st.integers(0, 29), max_size=4),
    data=st.data(),
)
def test_a_machine_that_slows_down_slows_both(
    ratio: float, drift: float, stalls: set[int], data: st.DataObject
) -> None:
    rounds = data.draw(st.integers(12, 15), label="rounds")
    calls = iter(range(2 * rounds))

    def block(micros: float) -> float:
        number = next(calls)
        return micros * (1.0 + drift) ** number * (5.0 if number in stalls else 1.0)

    found = in_turn(lambda: block(100.0), lambda: block(100.0 * ratio), rounds)
    assert found.ratio == pytest.approx(ratio, rel=1e-9 + abs(drift) * 1.03)
    assert found.rounds == rounds and next(calls, None) is None
    if ratio > 1.03:
        assert not found.is_faster


@settings(max_examples=100)
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


class Turning:
    """A model of two layers; blocks take as long as is said of so many on kernels, the first and every other time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: list[Any] = []
        self.works: list[Any] = [SimpleNamespace(gain=gain, given_back=False) for gain in (5.0, 2.0)]
        monkeypatch.setattr(gc, "collect", lambda: 0)  # a third of a second of all that tests have imported
        monkeypatch.setattr(choice, "unswap_all", lambda _: self.now.clear())
        monkeypatch.setattr(choice, "call_parts", lambda _: None)
        monkeypatch.setattr(choice, "swap", lambda works, _: self.now.extend(works))

    def ready(self, ratios: dict[int, float], again: dict[int, float]) -> Callable[[], Block]:
        tried: list[int] = []

        def ready() -> Block:
            keep = len(self.now)
            assert gc.isenabled(), "what is compiled may be collected"
            micros = 100.0 if not keep else 100.0 * (again if keep in tried else ratios).get(keep, ratios[keep])
            tried.append(keep)

            def block() -> float:
                assert not gc.isenabled()
                return micros

            return block

        return ready

    def settle(self, kept: int, *ready: Callable[[], Block]) -> choice.Settled:
        found = choice.settle(nn.Identity(), self.works[::-1], UNKNOWN, *ready)
        assert [work for work in self.works if not work.given_back] == self.works[:kept] == self.now
        return found


@pytest.mark.parametrize(
    ("ratios", "again", "kept"),
    [
        ({2: 0.7, 1: 0.8}, {}, 2),
        ({2: 0.8, 1: 0.7}, {}, 1),
        ({2: 1.2, 1: 1.1}, {}, 0),
        ({2: 0.97, 1: 0.98}, {2: 1.01}, 0),  # it was lucky
        ({2: 0.97, 1: 0.98}, {2: 0.99}, 2),
        ({2: 0.8, 1: 0.7}, {2: 0.7}, 2),  # all of them were unlucky
    ],
)
def test_what_was_chosen_has_to_be_faster_once_more(
    ratios: dict[int, float], again: dict[int, float], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning = Turning(monkeypatch)
    found = turning.settle(kept, turning.ready(ratios, again)).times
    assert found.first_micros == 100.0
    assert found.second_micros == pytest.approx(100.0 * again.get(kept, ratios[kept]) if kept else 100.0)
    assert found.ratio <= 1.0


@pytest.mark.parametrize(
    ("called", "on_gpu", "kept"),
    [
        ({2: 1.0, 1: 1.0}, {2: 0.5}, 2),
        ({2: 1.0, 1: 1.1}, {2: 1.0}, 0),
        ({2: 0.99, 1: 0.98}, {2: 0.5}, 1),  # no need to ask
        ({2: 1.01, 1: 1.0}, {2: 0.5}, 0),  # slower is slower
    ],
)
def test_of_what_is_level_the_gpu_decides(
    called: dict[int, float], on_gpu: dict[int, float], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turning = Turning(monkeypatch)
    found = turning.settle(kept, turning.ready(called, {}), turning.ready(on_gpu, {}))
    assert found.times.ratio == (called[kept] if kept else 1.0)
    assert (None if found.on_gpu is None else found.on_gpu.ratio) == (0.5 if kept == 2 else None)


def test_who_is_level_says_what_the_gpu_does() -> None:
    times = ModelTimes(
        called="compiled", dense_micros=9.0, chosen_micros=9.1, ratio=1.01, noise=0.1, given_back=0, gpu_ratio=0.5
    )
    report = Report((), times)
    assert str(report).endswith("9.1 us of 9.0 us dense, 1.010 of it (noise 10.0%); of the GPU's part 0.500")
    assert json.loads(report.to_json()) == {"layers": [], "model": asdict(times)}


@pytest.mark.parametrize(("ratio", "noise", "expected"), [(0.99, 0.001, True), (0.99, 0.08, False), (1.0, 0.0, False)])
def test_faster_is_faster_by_more_than_the_times_differ(ratio: float, noise: float, expected: bool) -> None:
    assert Turns(1.0, ratio, ratio, noise, 16).is_faster is expected
