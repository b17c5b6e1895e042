"""nn.MultiheadAttention and the encoder layers around it: the same numbers whatever the masks, and no short cuts."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

import lospmm  # noqa: E402
import lospmm.nn  # noqa: E402
from lospmm.nn.layer import SparseMultiheadAttention  # noqa: E402
from tests.nn.models import EMULATED, drawn  # noqa: E402

SIZE, HEADS, BATCH, TOKENS = 16, 2, 3, 4


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(SIZE, HEADS, **options).eval()
    nn.init.normal_(made.out_proj.weight)
    for module, name in ((made, "in_proj_weight"), (made.out_proj, "weight")):
        prune.l1_unstructured(module, name, 0.8)
    return made


def padding() -> torch.Tensor:
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[0, -1] = mask[1, -2:] = True
    return mask


CAUSAL = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), diagonal=1)

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": padding()},
    "padding, no weights": {"key_padding_mask": padding(), "need_weights": False},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal and padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": padding()},
    "numbers": {"attn_mask": drawn(TOKENS, TOKENS), "need_weights": False},
    "of each head": {"attn_mask": drawn(BATCH * HEADS, TOKENS, TOKENS)},
}


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first: bool) -> None:
    dense, sparse = attention(batch_first=batch_first), attention(batch_first=batch_first)
    shape = (BATCH, TOKENS, SIZE) if batch_first else (TOKENS, BATCH, SIZE)
    x = drawn(*shape)
    report = lospmm.nn.sparsify_(sparse, (x, x, x), **EMULATED)
    assert report.sparse == ("in_proj_weight", "out_proj")
    assert list(sparse.state_dict()) == list(dense.state_dict())
    for masks, options in MASKS.items():
        for found, wanted in zip(sparse(x, x, x, **options), dense(x, x, x, **options), strict=True):
            if wanted is None:
                assert found is None, masks
            else:
                assert torch.allclose(found, wanted, atol=1e-6), masks


@torch.no_grad()
@pytest.mark.parametrize("options", [{"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_is_not_plain_self_attention(options: dict[str, Any]) -> None:
    dense, sparse = attention(batch_first=True, **options), attention(batch_first=True, **options)
    x, other = drawn(BATCH, TOKENS, SIZE), drawn(BATCH, TOKENS, SIZE, seed=1)
    lospmm.nn.sparsify_(sparse, (x, x, x), **EMULATED)
    for arguments in ((x, x, x), (x, other, other), (x[0], x[0], x[0])):
        for found, wanted in zip(sparse(*arguments), dense(*arguments), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # PyTorch's own short cut takes them
def test_encoder_layers_call_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, 32, batch_first=True), 2).eval()
    for part in encoder.modules():
        if isinstance(part, nn.Linear):
            prune.l1_unstructured(part, "weight", 0.8)
            prune.remove(part, "weight")
        if isinstance(part, nn.MultiheadAttention):
            prune.l1_unstructured(part, "in_proj_weight", 0.8)
            prune.remove(part, "in_proj_weight")
    x = drawn(BATCH, TOKENS, SIZE)
    wanted, padded = encoder(x), encoder(x, src_key_padding_mask=padding())
    before = {name: dict(vars(one)) for name, one in encoder.named_modules()}
    report = lospmm.nn.sparsify_(encoder, x, **EMULATED)
    assert len(report.sparse) == 8 and isinstance(encoder.layers[0].self_attn, SparseMultiheadAttention)
    ran, run = [], lospmm.Kernel.run_on_cpu
    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", lambda *given: ran.append(given) or run(*given))
    assert torch.allclose(encoder(x), wanted, atol=2e-6)
    assert len(ran) == 8
    found = encoder(x, src_key_padding_mask=padding())
    assert torch.allclose(found[~padding()], padded[~padding()], atol=2e-6)  # what is padded is nobody's
    assert len(ran) == 16
    lospmm.nn.restore_(encoder)
    assert {name: dict(vars(one)) for name, one in encoder.named_modules()}.keys() == before.keys()
    assert encoder.use_nested_tensor == before[""]["use_nested_tensor"]
    assert torch.equal(encoder(x), wanted)


@torch.no_grad()
def test_only_out_proj() -> None:
    dense, sparse = (nn.MultiheadAttention(SIZE, HEADS, batch_first=True).eval() for _ in range(2))
    sparse.load_state_dict(dense.state_dict())
    for one in (dense, sparse):
        prune.l1_unstructured(one.out_proj, "weight", 0.8)
    x = drawn(BATCH, TOKENS, SIZE)
    assert lospmm.nn.sparsify_(sparse, (x, x, x), **EMULATED).sparse == ("out_proj",)
    assert torch.allclose(sparse(x, x, x)[0], dense(x, x, x)[0], atol=1e-6)
    lospmm.nn.restore_(sparse)
    assert type(sparse) is nn.MultiheadAttention
