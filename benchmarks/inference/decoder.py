"""SmolLM2-135M, a language model's decoder with tied logits, its modules named as in transformers.LlamaModel.

Without rotary positions, which have no weights.
"""

from torch import Tensor, nn
from torch.nn import functional

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
HEADS, KEY_HEADS = 9, 3


def linear(**outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(HIDDEN, count, bias=False) for name, count in outputs.items()})


class Layer(nn.Module):
    """Grouped-query attention and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        keys = HIDDEN // HEADS * KEY_HEADS
        self.self_attn = linear(q_proj=HIDDEN, k_proj=keys, v_proj=keys, o_proj=HIDDEN)
        self.mlp = linear(gate_proj=INTERMEDIATE, up_proj=INTERMEDIATE)
        self.mlp["down_proj"] = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out = self.self_attn.values()
        y = self.input_layernorm(x)
        heads = (layer(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for layer in (query, key, value))
        found = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + out(found.transpose(1, 2).flatten(2))
        gate, up, down = self.mlp.values()
        y = self.post_attention_layernorm(x)
        return x + down(functional.silu(gate(y)) * up(y))


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.norm(self.layers(self.embed_tokens(tokens))), self.embed_tokens.weight)
