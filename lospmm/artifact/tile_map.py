"""The tiling space of a finished search (``space.json``): the verdict on every tile size.

One character a tile size, so that 8,192 of them are 8 KB: the letter of the constraint that removed it, or LEFT. The
same search gives the same bytes.
"""

import json
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from lospmm.errors import BadRequest
from lospmm.families.candidate import Candidate
from lospmm.space.candidates import TileSize, UnrolledPlan
from lospmm.space.constraints import CONSTRAINTS, Stage
from lospmm.space.explore import Space

SCHEMA: Literal[1] = 1

#: A tile size that no constraint removed.
LEFT = "."


@dataclass(frozen=True, slots=True)
class MappedConstraint:
    """A constraint and its letter."""

    symbol: str
    name: str
    stage: Stage
    moved: bool  # no tile size met its limit, which was therefore moved


@dataclass(frozen=True, slots=True)
class MappedCandidate:
    """A candidate's tile size and schedule, with the ranker's score; the lowest is best."""

    rows: int
    cols: int
    prefetch: int
    column_group: int
    split_k: int
    score: float | None
    thread_words: int = 1
    walks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """space.json; ``cells`` has a text for each of ``rows``, with a character for each of ``cols``."""

    schema: Literal[1] = SCHEMA
    rows: tuple[int, ...]  # the values of M1 that were named, ascending
    cols: tuple[int, ...]  # the same of N1
    constraints: tuple[MappedConstraint, ...]  # in the order in which they apply
    cells: tuple[str, ...]
    shortlist: tuple[MappedCandidate, ...]  # best first
    winner: MappedCandidate

    def to_json(self) -> str:
        """Return the map as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @property
    def size(self) -> int:
        """Tile sizes of the space."""
        return len(self.rows) * len(self.cols)

    def count(self, symbol: str) -> int:
        """Return how many tile sizes the constraint of ``symbol`` removed, or with LEFT how many are left."""
        return sum(line.count(symbol) for line in self.cells)


_MAP = TypeAdapter(TileMap)


def map_of(space: Space, shortlist: Sequence[Candidate], winner: Candidate) -> TileMap:
    """Return the map of ``space``; ``shortlist`` is in order, best first."""
    symbols = dict(zip((constraint.name for constraint in CONSTRAINTS), string.ascii_lowercase, strict=False))
    found = {verdict.tile: symbols[verdict.constraint] for verdict in space.verdicts}
    found |= {survivor.tile: LEFT for survivor in space.survivors}
    rows, cols = sorted({tile.rows for tile in found}), sorted({tile.cols for tile in found})
    return TileMap(
        rows=tuple(rows),
        cols=tuple(cols),
        constraints=tuple(
            MappedConstraint(
                symbols[constraint.name], constraint.name, constraint.stage, constraint.name in space.relaxed
            )
            for constraint in CONSTRAINTS
        ),
        cells=tuple("".join(found[TileSize(height, width)] for width in cols) for height in rows),
        shortlist=tuple(map(_mapped, shortlist)),
        winner=_mapped(winner),
    )


def _mapped(candidate: Candidate) -> MappedCandidate:
    plan: UnrolledPlan = candidate.plan
    return MappedCandidate(*plan.tile, **asdict(plan.schedule), score=candidate.score)


def parse(content: bytes, where: str) -> TileMap:
    """Return the map of a ``space.json``. Raises BadRequest."""
    try:
        return _MAP.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where} is damaged: {field or 'as a whole'}: {first['msg']}") from None
