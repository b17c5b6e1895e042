"""The kernels that ``benchmarks.early``, ``ahead`` and ``jumps`` time: each computes the product it is timed for."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ahead import asked_ahead
from benchmarks.early import axes_of, cases, forms
from benchmarks.jumps import equally_long
from lospmm.codegen import emit
from lospmm.codegen.sass.form import Opcode
from lospmm.device import DEVICES
from lospmm.interpret import interpret
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime import execute
from lospmm.runtime.geometry import geometry_of
from tests.emulated.drawn import random_matrix

N = 4096
PROBLEM = Problem(random_matrix(3000, 60, 0.1), N, DEVICES["h200"])
TILE = TileSize(96, 512)
CANDIDATE = Candidate(TILE, Schedule(16, None, 2, 64), regroup(PROBLEM.matrix, [96])[96])
B = np.random.default_rng(0).uniform(-1, 1, (60, 2)).astype(np.float32)


def dense() -> np.ndarray:
    matrix = PROBLEM.matrix
    found = np.zeros((matrix.m, matrix.k))
    found[np.repeat(np.arange(matrix.m), np.diff(matrix.indptr)), matrix.indices] = matrix.data
    return found


def test_every_form_computes_the_product() -> None:
    expected = dense() @ B
    found = dict(forms(PROBLEM, CANDIDATE, is_dissected=True))
    assert {"plain", "early", "order", "order, early", "turned", "diagonal"} <= set(found)
    for name, program in found.items():
        if name != "diagonal":
            np.testing.assert_allclose(interpret(program, B), expected, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("change", ["prefetched", "equally long"])
def test_machine_code_that_is_changed_computes_the_same(change: str) -> None:
    program = lower(PROBLEM, CANDIDATE)
    emission = emit(program, "sass", "sm_90")
    code = emission.machine
    assert code is not None
    changed = equally_long(code) if change == "equally long" else asked_ahead(code, program, Opcode.PREFETCH)
    assert len(changed.form) > len(code.form)
    columns = np.array([0, N - 1])
    one, other = (
        execute(replace(emission, machine=each), geometry_of(program, n=N, cols=512), columns, B)
        for each in (code, changed)
    )
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_tiles_of_earlier_searches_are_read_however_they_were_written() -> None:
    """Every one of the 41 shapes has some; a plan is a manifest's tile, or a tile size and a schedule."""
    found = cases()
    assert len(found) == 2 * 41 and all(tiles for _, _, tiles in found)
    tile, schedule = TileSize(12, 64), Schedule(24, None, 0, 128)
    as_manifest = str({"rows": 12, "cols": 64, "fmas_per_load": None, "column_group": 0})
    plain, structured = axes_of(as_manifest), axes_of(f"{tile}, {schedule}")
    assert plain == {name: structured[name] for name in plain}
    assert structured["prefetch"] == 24 and structured["lockstep"] == 128 and structured["stores_early"] is False
