"""What the scheduler makes of a tile beside what the interpreter holds it to: which registers are read together."""

import numpy as np
import pytest

from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.scheduler import schedule_tile
from lospmm.ir import KernelProgram
from lospmm.model import Schedule
from lospmm.schedule import tile_programs
from tests.emulated.drawn import random_matrix


@pytest.mark.parametrize("prefetch", [1, 2, 7, 24])
def test_a_column_begins_with_a_multiply_add_of_both_banks(prefetch: int) -> None:
    """Behind it the buffer comes from the reuse cache. Where there is none, all accumulators are in the buffer's."""
    matrix = random_matrix(40, 200, 0.15, seed=prefetch)
    rows = np.flatnonzero(matrix.row_nnz).astype(np.int32)
    [tile] = tile_programs(matrix, rows, Schedule(prefetch))
    program = KernelProgram("kernel", 40, 200, 64, 64, (tile,), (0,), 255)
    form, _ = schedule_tile(tile, program)
    fmas = np.flatnonzero(form["op"] == Opcode.FFMA_IMM)
    same_bank = ((form["ra"] ^ form["rd"]) & 1 == 0)[fmas]
    starts = np.flatnonzero((np.diff(fmas, prepend=-1) != 1) | (np.diff(form["ra"][fmas].astype(int), prepend=-1) != 0))
    columns = np.split(same_bank, starts[1:])
    assert all(not column[0] or column.all() for column in columns)
    assert sum(column[0] for column in columns) < len(columns) / 4 and len(columns) > 150
    assert (form["reuse"][fmas][np.setdiff1d(np.arange(len(fmas)), np.append(starts[1:], len(fmas)) - 1)] == 1).all()
    assert np.isin(form["rc"][fmas], [RZ, *np.unique(form["rd"][fmas])]).all()
