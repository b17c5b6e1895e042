"""Several tiles to a block: what a chain of them computes, and how it follows from its tiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.candidates import Candidates
from lospmm.chains import chained
from lospmm.codegen import emit
from lospmm.codegen.sass.form import NO_BARRIER, Opcode
from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.epilogue import epilogue_of
from lospmm.errors import Unsupported
from lospmm.estimate import work_of
from lospmm.interpret import interpret
from lospmm.ir import Op, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import natural_order
from lospmm.runtime import execute
from lospmm.runtime.geometry import geometry_of
from lospmm.verify import compare
from tests.emulated.drawn import random_matrix

H200 = DEVICES["h200"]


def candidate_of(problem: Problem, rows: int, cols: int, **axes: int) -> Candidate:
    return Candidate(TileSize(rows, cols), Schedule(**{"prefetch": 8, **axes}), natural_order(problem.matrix, rows))


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 40),
    together=st.integers(2, 5),
    prefetch=st.integers(1, 30),
    lockstep=st.sampled_from([0, 16]),
    n=st.sampled_from([5, 40, 3_000_001]),
    relu=st.booleans(),
    residual=st.booleans(),
)
def test_machine_code_of_chains(
    rows: int, together: int, prefetch: int, lockstep: int, n: int, relu: bool, residual: bool
) -> None:
    """To the last bit what the same tiles give with a block each, also where addresses move over windows."""
    matrix = random_matrix(83, 60, 0.2, seed=rows)
    epilogue = epilogue_of(np.linspace(-1, 1, 83).astype(np.float32), relu=relu, residual=residual)
    problem = Problem(matrix, n, H200, epilogue=epilogue)
    axes = {"prefetch": prefetch, "lockstep": lockstep}
    columns = np.array([0, 1, n - 1])
    random = np.random.default_rng(rows)
    b, third = (random.uniform(-1, 1, (height, 3)).astype(np.float32) for height in (60, 83))
    found = []
    for count in (1, together):
        program = lower(problem, candidate_of(problem, rows, 32, tiles_per_block=count, **axes))
        code, geometry = emit(program, "sass", "sm_90"), geometry_of(program, n=n, cols=32)
        found.append(execute(code, geometry, columns, b, third if residual else None))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize("sums", ["float32", "float16"])
def test_chains_of_16_bit_elements(sums: str) -> None:
    """With sums in float32, and as pairs."""
    matrix = random_matrix(60, 70, 0.2)
    problem = Problem(matrix, 64, H200, dtype=DTYPES["float16"], sums=DTYPES[sums])
    b = DTYPES["float16"].rounded(np.random.default_rng(0).uniform(-1, 1, (70, 64)).astype(np.float32))
    found = []
    for count in (1, 3):
        program = lower(problem, candidate_of(problem, 12, 32, tiles_per_block=count))
        code, geometry = emit(program, "sass", "sm_90"), geometry_of(program, n=program.n, cols=32)
        found.append(execute(code, geometry, np.arange(64 // geometry.words.columns), b))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def test_the_next_tile_is_loaded_before_the_last_is_stored() -> None:
    problem = Problem(random_matrix(32, 50, 0.3), 64, H200)
    (chain,) = lower(problem, candidate_of(problem, 16, 32, tiles_per_block=2)).tiles
    ops = chain.code["op"]
    stores = np.flatnonzero(ops == Op.STORE)
    first, second = stores[:16], stores[16:]
    late_loads = np.flatnonzero(ops == Op.LOAD)
    ahead = chain.code["source"][late_loads[(late_loads < first[0])]][-8:]
    assert sorted(ahead) == list(ahead)  # the prefetch of the second tile, from its first columns on
    assert not (ops[first[0] : first[-1] + 1] != Op.STORE).any() and (ops[first[-1] + 1] == Op.BEGIN)
    assert len(second) == 16 and chain.accumulators == 16
    assert chain.count(Op.FMA) == problem.matrix.nnz


def test_accumulators_are_not_begun_before_their_stores_were_read() -> None:
    problem = Problem(random_matrix(150, 50, 0.3), 64, H200)
    program = lower(problem, candidate_of(problem, 75, 32, tiles_per_block=2))
    machine = emit(program, "sass", "sm_90").machine
    assert machine is not None
    form = machine.form
    stores = np.flatnonzero(form["op"] == Opcode.STG)
    assert (form["read_barrier"][stores[:75]] != NO_BARRIER).all()  # more than a scoreboard counts: a pause between
    assert (form["wait"][stores[:75]] != 0).any()
    begins = np.flatnonzero(form["op"] == Opcode.MOV_IMM)
    assert form["wait"][begins[0]] != 0 and len(begins) == 75


def test_an_odd_tile_is_alone() -> None:
    matrix = random_matrix(20, 30, 0.3)
    problem = Problem(matrix, 40, H200)
    program = lower(problem, candidate_of(problem, 4, 32, tiles_per_block=3))  # five tiles
    assert [tile.count(Op.STORE) for tile in program.tiles] == [12, 8]
    assert launch(program).grid == (1, 2, 2)
    b = np.random.default_rng(0).uniform(-1, 1, (30, 40)).astype(np.float32)
    compare(matrix, np.arange(40), b, interpret(program, b))


def test_no_chains_of_parts() -> None:
    problem = Problem(random_matrix(20, 30, 0.3), 40, H200)
    with pytest.raises(Unsupported, match="several tiles to a block, and several blocks to a tile"):
        lower(problem, candidate_of(problem, 4, 32, tiles_per_block=2, split_k=2))


def test_a_block_has_a_tile_of_each_wave() -> None:
    """132 SMs, one block of 512 threads and 128 registers on each at a time."""
    problem = Problem(random_matrix(3072, 64, 0.3), 4096, H200)
    one = candidate_of(problem, 96, 512, prefetch=16)  # 32 x 8 blocks: two waves
    work = work_of(problem, Candidates.of([one]))
    assert (work.blocks.tolist(), work.resident.tolist()) == ([2], [1])
    (chain,) = chained(problem, [one])
    assert chain.schedule.tiles_per_block == 2 and chain.tile == one.tile
    in_one_wave = candidate_of(problem, 192, 512)
    one_more = candidate_of(problem, 94, 512, prefetch=16)  # 33 tiles: 17 x 8 blocks
    parts = candidate_of(problem, 96, 512, prefetch=16, split_k=2)
    assert chained(problem, [in_one_wave, one_more, parts]) == []
    assert chained(problem, []) == []
