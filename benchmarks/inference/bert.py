"""BERT's encoder (Devlin et al., NAACL 2019) in plain PyTorch, its modules named as in transformers.BertModel."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """BERT-base, unless said otherwise."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocabulary: int = 30522
    positions: int = 512
    norm_epsilon: float = 1e-12


class Embeddings(nn.Module):
    """Tokens (batch, length) to features (batch, length, hidden), all of the first segment."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(size.vocabulary, size.hidden)
        self.position_embeddings = nn.Embedding(size.positions, size.hidden)
        self.token_type_embeddings = nn.Embedding(2, size.hidden)
        self.LayerNorm = nn.LayerNorm(size.hidden, eps=size.norm_epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: tokens.shape[1]]
        return self.LayerNorm(self.word_embeddings(tokens) + self.token_type_embeddings.weight[0] + positions)


class SelfAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.hidden, size.hidden)
        self.key = nn.Linear(size.hidden, size.hidden)
        self.value = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return found.transpose(1, 2).reshape(batch, length, hidden)


class Output(nn.Module):
    """A linear layer, the residual and its norm."""

    def __init__(self, features: int, size: Size) -> None:
        super().__init__()
        self.dense = nn.Linear(features, size.hidden)
        self.LayerNorm = nn.LayerNorm(size.hidden, eps=size.norm_epsilon)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self = SelfAttention(size)
        self.output = Output(size.hidden, size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dense = nn.Linear(size.hidden, size.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.intermediate = Intermediate(size)
        self.output = Output(size.intermediate, size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attention(x, mask)
        return self.output(self.intermediate(attended), attended)


class Encoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Bert(nn.Module):
    """Tokens (batch, length) to features (batch, length, hidden), without the pooler.

    ``attended`` (batch, length) is 1 where a token is one and 0 where a sentence has ended; None: all are tokens.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embeddings = Embeddings(size)
        self.encoder = Encoder(size)

    def forward(self, tokens: Tensor, attended: Tensor | None = None) -> Tensor:
        mask = None if attended is None else attended[:, None, None, :].to(torch.bool)
        return self.encoder(self.embeddings(tokens), mask)
