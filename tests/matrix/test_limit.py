"""The hint for a model whose layers are all below min_sparsity."""

import pytest

from lospmm.matrix.limit import limit_hint


@pytest.mark.parametrize(
    ("shares", "hint"),
    [
        ([], ""),
        ([0.499, 0.5, 0.504], "; 3 below --min-sparsity, at most 50.4% zeros: --min-sparsity 0.5 admits 2"),
        ([0.0, 0.001], "; 2 below --min-sparsity, at most 0.1% zeros: are they pruned?"),
    ],
)
def test_the_hint(shares: list[float], hint: str) -> None:
    assert limit_hint(shares, "--min-sparsity ") == hint
