"""Convolutions through their kernels, against PyTorch's own in float64, over drawn shapes."""

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@torch.no_grad()
@settings(max_examples=16)
@given(
    window=PAIRS,
    stride=PAIRS,
    padding=st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["same", "valid"])),
    dilation=PAIRS,
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 7), st.integers(1, 7)),
    bias=st.booleans(),
    groups=st.sampled_from([1, 1, 2, 3]),
)
def test_a_convolution_is_pytorchs(
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    dilation: tuple[int, int],
    sizes: tuple[int, int, int, int],
    bias: bool,
    groups: int,
) -> None:
    torch.manual_seed(0)
    uneven = any(step * (size - 1) % 2 for step, size in zip(dilation, window, strict=True))
    assume(padding != "same" or (stride == (1, 1) and not uneven))
    around = (0, 0) if isinstance(padding, str) else padding
    reach = [d * (w - 1) + 1 for d, w in zip(dilation, window, strict=True)]
    fits = all(size + 2 * pad >= far for size, pad, far in zip(sizes[2:], around, reach, strict=True))
    assume(padding == "same" or fits)
    channels = sizes[1] if groups == 1 else groups * (1 + sizes[1])  # one channel a group is depthwise
    layer = nn.Conv2d(channels, 5 if groups == 1 else 6, window, stride, padding, dilation, groups, bias=bias)
    model = pruned(layer, share=0.5)
    x = drawn(sizes[0], channels, *sizes[2:])
    wanted = exact(model, x)
    report = lospmm.nn.sparsify_(model, x, min_sparsity=0.0, **EMULATED)
    assert report.sparse == ("0",), str(report)
    found = model(x)
    if wanted.abs().max() > 0:
        assert error(found, wanted) < MAX_ERROR


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 2, "same"])
def test_of_one_dimension(padding: int | str) -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Conv1d(4, 8, 3, padding=padding)), drawn(2, 4, 9)
    wanted = exact(model, x)
    assert lospmm.nn.sparsify_(model, x, **EMULATED).sparse == ("0",)
    assert error(model(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_other_shapes_and_orders_of_memory() -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Conv2d(4, 8, 3, padding=1)), drawn(2, 4, 6, 7)
    others = [
        drawn(2, 4, 6, 7).to(memory_format=torch.channels_last),
        drawn(3, 4, 6, 7),
        drawn(4, 5, 5),
        x.transpose(2, 3),
    ]
    wanted = [exact(model, other) for other in others]
    lospmm.nn.sparsify_(model, [x], **EMULATED)
    for other, want in zip(others, wanted, strict=True):
        assert error(model(other), want) < MAX_ERROR


@torch.no_grad()
def test_fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an input of as many images as a kernel has, where they are half of these or more."""
    torch.manual_seed(0)
    model, x = pruned(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()), drawn(5, 4, 6, 7)
    graph, wanted = lospmm.nn.fused(model), exact(model, x)
    lospmm.nn.sparsify_(graph, x, **EMULATED)
    ran: list[tuple[int, ...]] = []
    run = lospmm.Kernel.run_on_cpu
    monkeypatch.setattr(
        lospmm.Kernel, "run_on_cpu", lambda kernel, b, *rest: ran.append(b.shape) or run(kernel, b, *rest)
    )
    for images, kernels in ((5, 1), (4, 1), (3, 1), (2, 0), (1, 0)):
        ran.clear()
        found = graph(x[:images])
        assert found.shape == (images, 8, 6, 7) and found.is_contiguous()
        assert error(found, wanted[:images]) < MAX_ERROR
        assert ran == [(5, 4, 6, 7)] * kernels
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True)
    assert error(compiled(x[:4]), wanted[:4]) < MAX_ERROR


@torch.no_grad()
def test_a_graph_of_convolutions() -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 6, 1)), drawn(2, 4, 7, 7)
    wanted = exact(model, x)
    assert lospmm.nn.sparsify_(model, x, **EMULATED).sparse == ("0", "2")
    torch._dynamo.reset()
    assert error(torch.compile(model, backend="aot_eager", fullgraph=True)(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_groups_are_zeros_of_a_larger_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = pruned(nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv1d(12, 6, 3, groups=2), share=0.7)
    model.insert(2, nn.Flatten(2))
    layer, line, x = model[0], model[3], drawn(2, 8, 5, 6)
    wanted, untouched = exact(model, x), copy.deepcopy(model)
    report = lospmm.nn.sparsify_(model, x, **EMULATED)
    assert report.sparse == ("0", "3"), str(report)
    assert [row.shape for row in report.rows] == [(12, 8 * 9), (6, 12 * 3)]
    for row, one in zip(report.rows, (layer, line), strict=True):
        assert row.sparsity == float((one.weight == 0).double().mean())
    assert error(model(x), wanted) < MAX_ERROR
    assert not any(lospmm.nn.status(model).values())
    lospmm.nn.save(model, tmp_path / "tuned")
    lospmm.nn.load_(untouched, tmp_path / "tuned", emulate=True)
    assert not any(lospmm.nn.status(untouched).values()) and error(untouched(x), wanted) < MAX_ERROR
    with pytest.warns(UserWarning, match="not those"):
        layer.weight.mul_(2.0)
        found = model(x)
    lospmm.nn.restore_(model)
    assert torch.allclose(found, model(x), atol=1e-5)


def test_a_depthwise_convolution_stays_dense() -> None:
    (row,) = lospmm.nn.sparsify_(pruned(nn.Conv2d(4, 8, 3, groups=4)), drawn(1, 4, 5, 5), **EMULATED).rows
    assert row.advice == "dense" and row.reason.startswith("it is depthwise")
