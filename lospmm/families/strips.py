"""Part of hyb: strips of rows with dense blocks (BSR), and all other rows in buckets, in one launch.

A block of ``side`` x ``side`` elements is dense if at least ``fill`` percent of them are nonzero; a strip of ``side``
rows, in the order of the matrix, belongs to this part if dense blocks hold half of its nonzeros. A team of threads
has a strip: it reads each row of B that a block needs once for all of the strip's rows, and nonzeros outside of the
blocks as lists of entries. So no row of C is written by two parts. Which blocks are dense, and how large they are, is
searched.

The zeros of a block are multiplied like its other elements: an infinity or a NaN of B may reach other rows of a
strip.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lospmm.families import buckets
from lospmm.families.blocks import strips_of
from lospmm.families.buckets import Buckets
from lospmm.families.lists import WARP, Lane, common_settings, entry_words, grid_of, lanes, pack_lists
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import Traffic, micros_of
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Launch, Problem, ceil_div

SIDES = (4, 8)
FILLS = (40, 75)  # percent
GROUP, WARPS = 4, (4, 8)
WORK = (32, 256)

#: The least share of A's nonzeros in the strips' blocks for which there are plans.
LEAST_SHARE = 0.3

#: The most places of blocks, per nonzero, that are numbered; and nonzeros of the sample for a forecast.
MAX_NUMBERED = 4
SAMPLED_NONZEROS = 1 << 17

#: Of a strip's nonzeros in dense blocks.
STRIP_SHARE = 0.5

REGISTERS = 168


@dataclass(frozen=True, slots=True)
class Strips:
    """A plan: size and density of blocks, and the layout of teams."""

    vector: int
    team: int
    group: int
    work: int  # rows of B that a team reads for a strip, about; entries of a row's
    warps: int
    side: int
    fill: int

    @property
    def lane(self) -> Lane:
        """Layout of a row of C over threads."""
        return Lane(self.vector, self.team)

    @property
    def of_buckets(self) -> Buckets:
        """The plan of all other rows."""
        return Buckets(self.vector, self.team, self.group, self.work, self.warps)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A matrix split into dense blocks and the rest.

    The place of a block is its strip x block columns + its block column.
    """

    blocks: NDArray[np.int64]  # (blocks,): places of the dense ones, ascending, of strips that are of this part
    of_strips: NDArray[np.bool_]  # (strips,): whether it is
    in_blocks: NDArray[np.bool_]  # (nnz,)


def split(matrix: SparseMatrix, side: int, fill: int) -> Split:
    """Split a matrix into dense blocks of ``side`` and the rest; ``fill`` is in percent."""
    wide, strips = ceil_div(matrix.k, side), ceil_div(matrix.m, side)
    own, counts, of_place = _blocks(matrix, side)
    dense = counts * 100 >= fill * side * side
    held = np.bincount(own[dense] // wide, weights=counts[dense], minlength=strips)
    nonzeros = np.add.reduceat(matrix.row_nnz, np.arange(0, matrix.m, side))
    of_strips = (held > 0) & (held >= STRIP_SHARE * nonzeros)
    taken = dense & of_strips[own // wide]
    return Split(own[taken], of_strips, taken[of_place])


def _blocks(matrix: SparseMatrix, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of blocks, ascending, their nonzeros, and the block of each nonzero.

    If there are few places, all are numbered, empty ones too: faster than sorting.
    """
    place = _places(matrix, side)
    every = ceil_div(matrix.m, side) * ceil_div(matrix.k, side)
    if every <= MAX_NUMBERED * matrix.nnz:
        return np.arange(every), np.bincount(place, minlength=every), place
    own, of_place = np.unique(place, return_inverse=True)
    return own, np.bincount(of_place, minlength=len(own)), of_place


def _places(matrix: SparseMatrix, side: int) -> NDArray[np.int64]:
    return matrix.rows_of_nonzeros() // side * np.int64(ceil_div(matrix.k, side)) + matrix.indices // side


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a split: blocks, nonzeros in them, strips; extrapolated from a sample of A's rows."""

    blocks: float
    held: float
    strips: float


@lru_cache(maxsize=8)
def counted(matrix: SparseMatrix, side: int, fill: int) -> Counts:
    """Return the counts of a split, extrapolated from a sample of the rows."""
    sample = strips_of(matrix, SAMPLED_NONZEROS)
    found, share = split(sample, side, fill), sample.nnz / max(1, matrix.nnz)
    counts = len(found.blocks), np.count_nonzero(found.in_blocks), np.count_nonzero(found.of_strips)
    return Counts(*(count / (share or 1.0) for count in counts))


def plans(problem: Problem) -> list[Strips]:
    """Return the plans of those splits in which dense blocks hold enough nonzeros."""
    wide = lanes(problem)
    found = []
    for side in SIDES:
        before = 0.0
        for fill in FILLS:
            counts = counted(problem.matrix, side, fill)
            if counts.held < LEAST_SHARE * max(1, problem.matrix.nnz) or counts.blocks == before:
                continue
            before = counts.blocks
            found += [
                Strips(lane.vector, lane.team, GROUP, work, warps, side, fill)
                for lane in wide[:2]
                for work in WORK
                for warps in WARPS
            ]
    return found


def forecast(problem: Problem, plans: Sequence[Strips]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: rows of B read by blocks and other entries, multiply-adds, A."""
    matrix, size, n = problem.matrix, problem.dtype.element_bytes, problem.n
    words, found = entry_words(problem), []
    for plan in plans:
        counts, cols = counted(matrix, plan.side, plan.fill), plan.lane.cols
        columns = ceil_div(n, cols)
        in_blocks = counts.blocks * plan.side**2
        entries = matrix.nnz - counts.held
        reads = in_blocks / plan.side + entries
        of_a = in_blocks * size + entries * 4 * words
        sector = max(32, size * min(n, cols))
        walks = counts.strips + matrix.m - counts.strips * plan.side
        converted = reads * (1.0 if size == 2 else 0.0)
        instructions = columns * cols * (in_blocks + entries + converted + (reads * 6 + in_blocks / 4) / plan.vector)
        traffic = Traffic(
            l2_bytes=columns * (reads * sector + of_a),
            instructions=instructions,
            threads=columns * max(1.0, walks, reads / plan.work) * plan.team,
        )
        memory = (size * n * (matrix.k + matrix.m) + of_a) / problem.device.memory_bandwidth * 1e6
        found.append(max(micros_of(problem, traffic), memory))
    return np.array(found)


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Strips, those with most to read first."""

    numbers: NDArray[np.int64]
    blocks: NDArray[np.int64]  # of each
    groups: NDArray[np.int64]  # of the lists of each of its rows
    power: NDArray[np.int64]  # 2 to this is at least what it reads of B, in rows


def _ranked(found: Split, wide: int, rest: SparseMatrix, plan: Strips) -> Ranked:
    """Return the strips by work; ``rest`` is the matrix without the blocks' nonzeros."""
    numbers = np.flatnonzero(found.of_strips)
    blocks = np.bincount(found.blocks // wide, minlength=len(found.of_strips))[numbers]
    lengths = np.zeros(len(found.of_strips) * plan.side, dtype=np.int64)
    lengths[: rest.m] = rest.row_nnz
    groups = -(-lengths.reshape(-1, plan.side).max(axis=1)[numbers] // plan.group)
    power = np.ceil(np.log2(np.maximum((blocks + groups * plan.group) * plan.side, 1))).astype(np.int64)
    order = np.argsort(-power, kind="stable")
    return Ranked(numbers[order], blocks[order], groups[order], power[order])


class _Parts:
    """The parts of a launch as they are added: their numbers, thread blocks, rows and lists."""

    def __init__(self, plan: Strips) -> None:
        self.plan, self.place, self.groups = plan, 0, 0
        self.numbers: list[tuple[int, ...]] = []
        self.table: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
        self.rows: list[NDArray[np.int64]] = []
        self.listed: list[NDArray[np.int64]] = []  # rows that have a list
        self.starts: list[NDArray[np.int64]] = []  # of these, in entries

    def add_strips(self, ranked: Ranked) -> NDArray[np.int64]:
        """Add the strips, each shared by teams of about ``work`` rows of B; return list starts, in groups."""
        plan, side, teams = self.plan, self.plan.side, self.plan.of_buckets.teams
        for power in sorted(set(ranked.power.tolist()), reverse=True):
            slices = 1
            while slices < teams and slices * plan.work < 1 << power:
                slices *= 2
            self._add(int(np.count_nonzero(ranked.power == power)), 0, slices, is_strips=1)
        firsts = np.cumsum(ranked.groups * side) - ranked.groups * side
        within = np.arange(side)
        self.rows.append(ranked.numbers * side)
        self.listed.append((ranked.numbers[:, np.newaxis] * side + within).reshape(-1))
        self.starts.append((firsts[:, np.newaxis] + within * ranked.groups[:, np.newaxis]).reshape(-1) * plan.group)
        self.groups = int((ranked.groups * side).sum())
        return firsts

    def add_bucket(self, rows: NDArray[np.int64], groups: int, slices: int) -> None:
        self.rows.append(rows)
        self.listed.append(rows)
        self.starts.append((self.groups + np.arange(len(rows)) * groups) * self.plan.group)
        self._add(len(rows), groups, slices, is_strips=0)
        self.groups += len(rows) * groups

    def _add(self, places: int, groups: int, slices: int, *, is_strips: int) -> None:
        end = self.place + places
        firsts = np.arange(self.place, end, self.plan.of_buckets.teams // slices)
        self.table.append(np.stack([np.full(len(firsts), len(self.numbers)), firsts], axis=1))
        self.numbers.append((self.place, end, self.groups, groups, slices, is_strips, 0, 0))
        self.place = end


def pack_plan(problem: Problem, plan: Strips) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    found, wide = split(matrix, plan.side, plan.fill), ceil_div(matrix.k, plan.side)
    rest = _beside(matrix, found)
    ranked, parts = _ranked(found, wide, rest, plan), _Parts(plan)
    firsts = parts.add_strips(ranked)
    in_strips = np.repeat(found.of_strips, plan.side)[: matrix.m]
    for bucket in buckets.buckets_of(problem, plan.of_buckets):
        if len(own := bucket.rows[~in_strips[bucket.rows]]):
            parts.add_bucket(own, bucket.groups, bucket.slices)
    listed, starts = np.concatenate(parts.listed), np.concatenate(parts.starts)
    there = listed < matrix.m  # the last strip may reach beyond
    entries = pack_lists(replace(problem, matrix=rest), listed[there], starts[there], parts.groups * plan.group)
    table = np.concatenate(parts.table)
    grid = grid_of(ceil_div(problem.n, plan.lane.cols), len(table))
    surplus = grid[1] * grid[2] - len(table)
    table = np.concatenate([table, np.full((surplus, 2), -1)]).astype(np.int32)
    of_strips = np.stack([np.cumsum(ranked.blocks) - ranked.blocks, ranked.blocks, firsts, ranked.groups], axis=1)
    order = _in_order(found.blocks // wide, ranked.numbers, len(found.of_strips))
    weights = _weights(matrix, dtype.rounded(matrix.data), found, plan.side)[order]
    settings = {**common_settings(problem, plan.lane, plan.group), "WARPS": plan.warps, "SIDE": plan.side}
    arrays = (
        *(np.concatenate(parts.rows).astype(np.int32), table, np.array(parts.numbers, dtype=np.int64), entries),
        *(of_strips.astype(np.int32), (found.blocks % wide)[order].astype(np.int32), dtype.to_storage(weights)),
    )
    return PackedKernel(
        entry="lospmm_hyb_strips",
        source=source_of_template("hyb_strips", settings, dtype=dtype, epilogue=epilogue, parts=buckets.PARTS),
        data=pack((problem.n, matrix.k, matrix.m), arrays, epilogue=epilogue),
        launch=Launch(grid, WARP * plan.warps, 4 * plan.warps * plan.lane.cols),
        registers=REGISTERS,
        cols=plan.lane.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _beside(matrix: SparseMatrix, found: Split) -> SparseMatrix:
    """Return the matrix without the nonzeros in blocks."""
    kept = ~found.in_blocks
    lengths = np.bincount(matrix.rows_of_nonzeros()[kept], minlength=matrix.m)
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return SparseMatrix(matrix.m, matrix.k, indptr, matrix.indices[kept], matrix.data[kept])


def _weights(matrix: SparseMatrix, values: NDArray[np.float32], found: Split, side: int) -> NDArray[np.float32]:
    """Return the elements of the blocks, (blocks, columns, rows)."""
    weights = np.zeros((len(found.blocks), side, side), dtype=np.float32)
    own = found.in_blocks
    at = np.searchsorted(found.blocks, _places(matrix, side)[own])
    weights[at, matrix.indices[own] % side, matrix.rows_of_nonzeros()[own] % side] = values[own]
    return weights


def _in_order(strip_of: NDArray[np.int64], strips: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the blocks in the order of their strips."""
    rank = np.zeros(count, dtype=np.int64)
    rank[strips] = np.arange(len(strips))
    return np.argsort(rank[strip_of], kind="stable")
