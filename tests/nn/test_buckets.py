"""Calls of other numbers of columns than a kernel was made for: buckets, pieces, and any order of memory."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn import operator  # noqa: E402
from lospmm.nn.layer import pieces  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, perceptron, pruned  # noqa: E402


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
def test_a_compiled_graph_serves_every_number_of_columns_in_as_many_pieces(
    served: tuple[nn.Sequential, nn.Linear],
) -> None:
    model, dense = served
    torch._dynamo.reset()
    graphs: list[object] = []

    def noted(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=noted, fullgraph=True, dynamic=True)
    for tokens, made in ((17, 1), (20, 1), (31, 1), (49, 2), (60, 2)):
        x = drawn(tokens, 12)
        assert error(compiled(x), dense(x.double())) < MAX_ERROR and len(graphs) == made, tokens


@pytest.mark.slow
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
