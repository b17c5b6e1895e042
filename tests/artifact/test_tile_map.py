"""space.json: every tile size of a search with what became of it, the same bytes for the same search."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.artifact.tile_map import LEFT, parse
from lospmm.errors import BadRequest
from lospmm.families.candidate import unrolled
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize
from lospmm.space.constraints import CONSTRAINTS
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.tuning.known import Known
from lospmm.tuning.log import tile_map
from lospmm.tuning.trial import Trial
from lospmm.tuning.unrolled import search
from tests.fixtures.lookup_runner import measurement_of
from tests.space.test_explore import random_matrix


def searched(m: int = 60, n: int = 9000, seed: int = 4) -> Known:
    problem = Problem(random_matrix(m, 40, 0.2, seed=seed), n, DEVICES["h200"])
    return Known((), {}, choice=search(problem, estimate_micros, 5, Stages()))


KNOWN = searched()
assert KNOWN.choice is not None
CHOICE = KNOWN.choice
WHOLE = json.loads(tile_map(KNOWN).to_json())


@settings(deadline=None)
@given(m=st.integers(1, 90), n=st.integers(1, 4000), seed=st.integers(0, 3))
def test_every_tile_size_has_what_became_of_it(m: int, n: int, seed: int) -> None:
    known = searched(m, n, seed)
    found, choice = tile_map(known), known.choice
    assert choice is not None
    assert parse(found.to_json().encode(), "here") == found
    assert found.size == choice.space.size
    names = {constraint.symbol: constraint.name for constraint in found.constraints}
    cells = {
        TileSize(rows, cols): symbol
        for rows, line in zip(found.rows, found.cells, strict=True)
        for cols, symbol in zip(found.cols, line, strict=True)
    }
    assert {tile: names[symbol] for tile, symbol in cells.items() if symbol != LEFT} == {
        verdict.tile: verdict.constraint for verdict in choice.space.verdicts
    }
    assert {tile for tile, symbol in cells.items() if symbol == LEFT} == {
        survivor.tile for survivor in choice.space.survivors
    }
    assert found.count(LEFT) == len(choice.space.survivors)
    assert [constraint.name for constraint in found.constraints] == [constraint.name for constraint in CONSTRAINTS]
    assert {constraint.name for constraint in found.constraints if constraint.moved} == set(choice.space.relaxed)


def test_the_same_search_gives_the_same_bytes() -> None:
    assert tile_map(searched()).to_json() == tile_map(KNOWN).to_json()
    assert len(tile_map(KNOWN).to_json()) < 2 * CHOICE.space.size + 4000


def test_the_shortlist_has_its_scores_and_the_winner_is_its_first() -> None:
    found = tile_map(KNOWN)
    assert [entry.score for entry in found.shortlist] == [one.score for one in CHOICE.shortlist]
    assert [(entry.rows, entry.cols) for entry in found.shortlist] == [one.plan.tile for one in CHOICE.shortlist]
    assert found.winner == found.shortlist[0]


def test_a_winner_that_only_timing_found_has_its_score() -> None:
    plan = CHOICE.winner.plan
    neighbour = unrolled(replace(plan, schedule=replace(plan.schedule, prefetch=plan.schedule.prefetch + 1)), 1.25)
    found = tile_map(replace(KNOWN, trials=(Trial(neighbour, measurement_of(9.0)),)))
    assert (found.winner.score, found.winner.prefetch) == (1.25, plan.schedule.prefetch + 1)
    assert found.winner not in found.shortlist


def changed(**fields: Any) -> bytes:
    return json.dumps({**WHOLE, **fields}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "as a whole: Invalid JSON"),
        (b"[" * 100_000, "as a whole: "),
        (b"{}", "rows: Field required"),
        (changed(schema=2), "schema: Input should be 1"),
    ],
)
def test_what_is_damaged_is_refused_with_the_place(content: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=f"^here is damaged: {words}"):
        parse(content, "here")
