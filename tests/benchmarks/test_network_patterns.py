"""Where the zeros of pruned networks are: drawn as densely and as unevenly as they should be, real ones unchanged."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.errors import BadRequest
from lospmm_datasets.networks import (
    NEAR,
    SPREADS,
    Mask,
    WantedPattern,
    channels_first,
    depth_sparsities,
    drawn,
    real,
    real_patterns,
    shuffled,
)
from tests.fixtures.files import smtx
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers


def unevenness(counts: np.ndarray) -> float:
    """The coefficient of variation."""
    return float(counts.std() / counts.mean())


def kinds(mask: Mask, taps: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Of each row how many, and of each channel how many of each tap, sorted: what shuffling keeps."""
    by_channel = mask.sum(0).reshape(-1, taps)
    return sorted(mask.sum(1).tolist()), sorted(map(tuple, by_channel.tolist()))


@given(st.integers(1, 24), st.floats(0, 0.99), st.floats(1, 3))
def test_depth_sparsities_have_their_mean_and_ratio(depth: int, sparsity: float, ratio: float) -> None:
    if (1 - sparsity) * 2 * ratio / (1 + ratio) > 1:
        sparsity = 0.5
    found = depth_sparsities(sparsity, depth, ratio)
    assert len(found) == depth and np.mean(found) == pytest.approx(sparsity)
    assert list(found) == sorted(found)
    if depth > 1:
        assert (1 - found[0]) == pytest.approx(ratio * (1 - found[-1]))


def test_densities_that_there_are_not() -> None:
    with pytest.raises(BadRequest, match=r"sparsity 0\.1 over 3 layers"):
        depth_sparsities(0.1, 3, 2.0)
    with pytest.raises(BadRequest, match=r"sparsity 1\.5"):
        depth_sparsities(1.5, 1)
    with pytest.raises(BadRequest, match="10 columns of 9 taps"):
        drawn(WantedPattern(4, 10, 0.5, 9), SPREADS["magnitude"], 0)


@given(st.integers(1, 20), st.integers(1, 12), st.sampled_from([1, 4, 9]), st.floats(0, 1), st.integers(0, 9))
def test_drawn_patterns_have_their_sparsity(m: int, channels: int, taps: int, sparsity: float, seed: int) -> None:
    wanted = WantedPattern(m, channels * taps, sparsity, taps)
    pattern = drawn(wanted, SPREADS["learned"], seed)
    assert pattern.mask.shape == (m, channels * taps)
    assert int(pattern.mask.sum()) == round((1 - sparsity) * pattern.mask.size)
    assert np.array_equal(pattern.mask, drawn(wanted, SPREADS["learned"], seed).mask)
    assert str(seed) in pattern.origin


@needs_real_layers
@pytest.mark.parametrize(
    ("spread", "named", "apart"),
    [
        ("magnitude", "rn50/magnitude_pruning/0.9/bottleneck_1_block_group3", 0.1),
        ("learned", "l0_regularization/0.9/", 0.1),
    ],
)
def test_drawn_patterns_are_as_uneven_as_real_ones(spread: str, named: str, apart: float) -> None:
    (one,) = (one for one in real_patterns(REAL_LAYERS) if named in one.name)
    like = real([one], WantedPattern(one.m, one.k, one.sparsity))
    assert like is not None
    pattern = drawn(WantedPattern(one.m, one.k, one.sparsity), SPREADS[spread], 0)
    for axis in (0, 1):
        assert unevenness(pattern.mask.sum(axis)) == pytest.approx(unevenness(like.mask.sum(axis)), abs=apart)


@given(st.integers(1, 8), st.integers(1, 5), st.sampled_from([1, 4, 9]), st.integers(0, 5))
def test_orders(m: int, channels: int, taps: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((m, channels * taps)) < 0.4
    other = channels_first(mask, taps)
    for channel in range(channels):
        for tap in range(taps):
            assert np.array_equal(other[:, channel * taps + tap], mask[:, tap * channels + channel])
    assert kinds(shuffled(mask, taps, seed), taps) == kinds(mask, taps)


@needs_real_layers
def test_taps_come_last_in_every_real_convolution() -> None:
    """Pruning spares some input channels: in the right order, all taps of a channel are pruned alike."""
    found = [one for one in real_patterns(REAL_LAYERS) if "bottleneck_2" in one.name or "3x3" in one.name]
    assert {one.path.suffix for one in found} == {".smtx", ".npz"}
    for one in found:
        pattern = real([one], WantedPattern(one.m, one.k, one.sparsity, 9))
        assert pattern is not None
        counts = pattern.mask.sum(0).astype(float)
        by_channel = counts.reshape(-1, 9).mean(1).var() / counts.var()
        assert by_channel > 1.5 / 9, one.name  # 1/9 where channels make no difference


@needs_real_layers
def test_the_nearest_real_pattern_and_then_its_like() -> None:
    found = real_patterns(REAL_LAYERS)
    wanted = WantedPattern(256, 1024, 0.95)
    first, second = real(found, wanted, 0), real(found, wanted, 1)
    assert first is not None and second is not None
    assert first.origin.endswith("magnitude_pruning/0.95/bottleneck_1_block_group3_1_1.smtx")
    assert second.origin.startswith(first.origin) and not np.array_equal(first.mask, second.mask)
    assert kinds(first.mask, 1) == kinds(second.mask, 1)
    assert first.sparsity == pytest.approx(0.95, abs=1e-4)
    assert real(found, WantedPattern(256, 1024, 0.5)) is None
    assert not [one for one in found if "random" in one.name]


def test_a_folder_of_patterns(tmp_path: Path) -> None:
    assert real_patterns(tmp_path) == real_patterns(tmp_path / "none") == ()
    (tmp_path / "a.smtx").write_bytes(smtx(np.array([[0, 1, 0, 0], [1, 0, 0, 1]])))
    (one,) = real_patterns(tmp_path)
    pattern = real([one], WantedPattern(2, 4, one.sparsity + NEAR / 2, 2))
    assert pattern is not None and pattern.origin == "a.smtx"
    assert pattern.mask.tolist() == [[False, False, True, False], [True, False, False, True]]
    assert real([one], WantedPattern(2, 4, one.sparsity + 2 * NEAR, 2)) is None
