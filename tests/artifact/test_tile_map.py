"""space.json: every tile size of a search with what became of it, the same bytes for the same search."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.artifact.tile_map import LEFT, parse
from lospmm.errors import BadRequest
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import TileSize
from lospmm.space.constraints import CONSTRAINTS
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.tuning.outcome import tile_map
from lospmm.tuning.search import Choice, search
from lospmm.tuning.trial import Trial
from tests.space.test_explore import random_matrix


def searched(m: int = 60, n: int = 9000, seed: int = 4) -> Choice:
    problem = Problem(random_matrix(m, 40, 0.2, seed=seed), n, DEVICES["h200"])
    return search(problem, estimate_micros, 5, Stages(), lockstep=128)


CHOICE = searched()
WHOLE = json.loads(tile_map(CHOICE).to_json())


@settings(deadline=None)
@given(m=st.integers(1, 90), n=st.integers(1, 4000), seed=st.integers(0, 3))
def test_every_tile_size_has_what_became_of_it(m: int, n: int, seed: int) -> None:
    choice = searched(m, n, seed)
    found = tile_map(choice)
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
    assert tile_map(searched()).to_json() == tile_map(CHOICE).to_json()
    assert len(tile_map(CHOICE).to_json()) < 2 * CHOICE.space.size + 4000


def test_the_shortlist_has_its_scores_and_the_winner_is_its_first() -> None:
    found = tile_map(CHOICE)
    assert [entry.score for entry in found.shortlist] == [scored.score for scored in CHOICE.shortlist]
    assert [(entry.rows, entry.cols) for entry in found.shortlist] == [s.candidate.tile for s in CHOICE.shortlist]
    assert found.winner == found.shortlist[0]


def test_a_winner_that_only_timing_found_has_its_score() -> None:
    neighbour = replace(CHOICE.winner, schedule=replace(CHOICE.winner.schedule, lockstep=0))
    trial = Trial(neighbour, 1.25, Measurement(Timing(9.0, 0.01, 15), 2e-7, None))
    found = tile_map(replace(CHOICE, winner=neighbour, trials=(trial,)))
    assert (found.winner.score, found.winner.lockstep) == (1.25, 0)
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
        (changed(rows=[]), "rows: expected ascending numbers"),
        (changed(cols=[64, 32]), "cols: expected ascending numbers"),
        (changed(rows=[0, 1]), "rows: expected ascending numbers"),
        (changed(cells=["."]), "cells: expected 60 texts of 32 characters"),
        (changed(cells=["?" * 32] * 60), r"cells: '\?' is no constraint"),
        (changed(rows=list(range(1, 4000)), cols=list(range(1, 4000))), "15992001 tile sizes"),
        (changed(constraints=[{**WHOLE["constraints"][0], "symbol": ""}]), "constraints: each needs a character"),
        (changed(constraints=WHOLE["constraints"] * 2), "constraints: each needs a character"),
        (changed(winner={**WHOLE["winner"], "rows": 999}), r"999 x \d+ is not among the tile sizes"),
    ],
)
def test_what_is_damaged_is_refused_with_the_place(content: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=f"^here is damaged: {words}"):
        parse(content, "here")


@given(field=st.sampled_from(sorted(WHOLE)), value=st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_value_of_any_field_is_refused_or_drawn(field: str, value: object) -> None:
    try:
        found = parse(changed(**{field: value}), "here")
    except BadRequest:
        return
    assert found.size == sum(map(len, found.cells))
