"""Which columns share a step: every column once, no queue beyond its turns, and no more products than in the order of
masks.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.families import steps
from lospmm.families.steps import deal


def drawn(seed: int, count: int, streams: int, subgroups: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    queue = np.sort(rng.integers(0, 4 * streams, size=count))
    return queue, rng.integers(1, 1 << subgroups, size=count).astype(np.uint8)


def unions(queue: np.ndarray, masks: np.ndarray, step: np.ndarray, streams: int) -> np.ndarray:
    """The masks of all steps of all streams, (streams, steps)."""
    found = np.zeros((streams, int(step.max(initial=-1)) + 1), np.uint8)
    np.bitwise_or.at(found, (queue // 4, step), masks)
    return found


@given(
    st.integers(0, 999),
    st.integers(0, 200),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([2, 4]),
)
def test_every_column_has_a_place_of_its_own(seed: int, count: int, streams: int, subgroups: int, each: int) -> None:
    queue, masks = drawn(seed, count, streams, subgroups)
    step, turn = deal(queue, masks, queues=4 * streams, subgroups=subgroups, each=each)
    places = set(zip(queue.tolist(), step.tolist(), turn.tolist(), strict=True))
    assert len(places) == count
    assert not count or (turn.min() >= 0 and turn.max() < each)
    filled = np.bincount(queue // 4 * (count + 1) + step, minlength=streams * (count + 1)).reshape(streams, -1) > 0
    assert all(row[: int(row.sum())].all() for row in filled), "no stream has a step without columns before its last"


@pytest.mark.parametrize("subgroups", [2, 3, 4])
def test_unions_take_fewer_products_than_the_order_of_masks(subgroups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, masks = drawn(1, 2000, 4, subgroups)
    counts = {}
    for searched in (0, 4):
        monkeypatch.setattr(steps, "MAX_SEARCHED", searched)
        step, _ = deal(queue, masks, queues=16, subgroups=subgroups, each=4)
        counts[searched] = int(np.bitwise_count(unions(queue, masks, step, 4)).sum())
    assert counts[4] < counts[0]
