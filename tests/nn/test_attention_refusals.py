"""Attention that PyTorch computes by itself has no kernels, and what PyTorch refuses is refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from tests.nn.models import EMULATED, drawn  # noqa: E402
from tests.nn.test_attention import BATCH, HEADS, SIZE, TOKENS, attention  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"add_bias_kv": True}, "its attention has add_bias_kv"),
        ({"add_zero_attn": True}, "its attention has add_zero_attn"),
    ],
)
def test_attention_that_no_kernel_would_be_called_of(options: dict[str, Any], reason: str) -> None:
    dense, model = attention(batch_first=True, **options), attention(batch_first=True, **options)
    x = drawn(BATCH, TOKENS, SIZE)
    report = lospmm.nn.sparsify_(model, (x, x, x), **EMULATED)
    assert [(row.layer, row.advice) for row in report.rows] == [("in_proj_weight", "dense"), ("out_proj", "dense")]
    assert all(row.reason.startswith(reason) for row in report.rows)
    assert type(model) is nn.MultiheadAttention and torch.equal(model(x, x, x)[0], dense(x, x, x)[0])


@torch.no_grad()
def test_keys_of_their_own_size() -> None:
    model = nn.MultiheadAttention(SIZE, HEADS, kdim=8, vdim=8, batch_first=True)
    other = drawn(BATCH, TOKENS, 8)
    report = lospmm.nn.sparsify_(model, (drawn(BATCH, TOKENS, SIZE), other, other), **EMULATED, min_sparsity=0.0)
    assert {row.layer: row.reason for row in report.rows} == dict.fromkeys(
        ("in_proj_weight", "out_proj"), "its keys and values have sizes of their own"
    )


WRONG: dict[str, dict[str, Any]] = {
    "bytes": {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.uint8)},
    "a row": {"attn_mask": torch.zeros(1, TOKENS)},
    "four dimensions": {"attn_mask": torch.zeros(BATCH, HEADS, TOKENS, TOKENS)},
    "one head": {"attn_mask": torch.zeros(BATCH, TOKENS, TOKENS)},
    "flat padding": {"key_padding_mask": torch.zeros(BATCH * TOKENS, dtype=torch.bool)},
    "padding of the batch": {"key_padding_mask": torch.zeros(TOKENS, BATCH, dtype=torch.bool)},
    "doubles": {"attn_mask": torch.zeros(TOKENS, TOKENS, dtype=torch.float64)},
    "integers": {"key_padding_mask": torch.zeros(BATCH, TOKENS, dtype=torch.int64)},
}


@torch.no_grad()
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_masks_are_refused_as_pytorch_does(wrong: str, batch_first: bool, need_weights: bool) -> None:
    dense, model = attention(batch_first=batch_first), attention(batch_first=batch_first)
    x = drawn(BATCH, TOKENS, SIZE) if batch_first else drawn(TOKENS, BATCH, SIZE)
    assert lospmm.nn.sparsify_(model, (x, x, x), **EMULATED).sparse
    masks = {**WRONG[wrong], "need_weights": need_weights}
    with pytest.raises((RuntimeError, AssertionError)) as refused:
        dense(x, x, x, **masks)
    with pytest.raises(type(refused.value)):
        model(x, x, x, **masks)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_hint_without_a_mask_is_left_to_pytorch(batch_first: bool) -> None:
    dense, model = attention(batch_first=batch_first), attention(batch_first=batch_first)
    x = drawn(BATCH, TOKENS, SIZE)
    assert lospmm.nn.sparsify_(model, (x, x, x), **EMULATED).sparse
    if batch_first:
        assert torch.allclose(model(x, x, x, is_causal=True)[0], dense(x, x, x, is_causal=True)[0], atol=1e-6)
        return
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        model(x, x, x, is_causal=True)


@torch.no_grad()
def test_keys_of_another_batch_are_refused() -> None:
    model, x = attention(batch_first=True), drawn(BATCH, TOKENS, SIZE)
    lospmm.nn.sparsify_(model, (x, x, x), **EMULATED)
    for key in (x[:1], x[0]):
        with pytest.raises((RuntimeError, AssertionError)):
            model(x, key, key)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:lospmm")
def test_without_a_batch_the_weights_are_those_of_now() -> None:
    dense, model = attention(batch_first=True), attention(batch_first=True)
    x = drawn(BATCH, TOKENS, SIZE)
    lospmm.nn.sparsify_(model, (x, x, x), **EMULATED)
    for one in (dense, model):
        one.in_proj_weight_orig.copy_(drawn(3 * SIZE, SIZE))
        one.out_proj.weight_orig.copy_(drawn(SIZE, SIZE))
    dense.out_proj(x)  # whose hook attention does not call
    assert torch.allclose(model(x[0], x[0], x[0])[0], dense(x[0], x[0], x[0])[0], atol=1e-6)
    dense, model = dense.double(), model.double()
    dense.out_proj(x.double())
    one = x[0].double()
    assert torch.allclose(model(one, one, one)[0], dense(one, one, one)[0])
