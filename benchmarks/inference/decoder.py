"""A language model's decoder with tied logits, its modules named as in transformers.LlamaModel.

Without rotary positions, which have no weights, and without a cache of keys and values.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """SmolLM2-135M, unless said otherwise."""

    layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    vocabulary: int = 49152
    heads: int = 9
    key_heads: int = 3


LLAMA_2_7B = Size(layers=32, hidden=4096, intermediate=11008, vocabulary=32000, heads=32, key_heads=32)


def linear(hidden: int, **outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(hidden, count, bias=False) for name, count in outputs.items()})


class Layer(nn.Module):
    """Grouped-query attention and a gated product, of features (batch, length, hidden)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, self.width = size.hidden, size.hidden // size.heads
        keys = self.width * size.key_heads
        self.self_attn = linear(hidden, q_proj=hidden, k_proj=keys, v_proj=keys, o_proj=hidden)
        self.mlp = linear(hidden, gate_proj=size.intermediate, up_proj=size.intermediate)
        self.mlp["down_proj"] = nn.Linear(size.intermediate, hidden, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out = self.self_attn.values()
        y = self.input_layernorm(x)
        heads = (layer(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (query, key, value))
        found = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + out(found.transpose(1, 2).flatten(2))
        gate, up, down = self.mlp.values()
        y = self.post_attention_layernorm(x)
        return x + down(functional.silu(gate(y)) * up(y))


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.norm(self.layers(self.embed_tokens(tokens))), self.embed_tokens.weight)
