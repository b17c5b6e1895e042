"""Layers below min_sparsity, and the hint for a model of them alone."""

import pytest

from lospmm.matrix.limit import limit_hint, too_few


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


def test_pruning_to_the_limit_may_lack_a_zero() -> None:
    assert too_few(0.59997, 0.6) is None and too_few(0.99996, 0.99996) is None
    assert too_few(0.5994, 0.6) == "fewer zeros than the 60% of min_sparsity"
