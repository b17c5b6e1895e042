"""Rows of FORM drawn at random, all of which are instructions: every field over its whole range, and its ends."""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.fields import Generation, Row
from lospmm.codegen.sass.form import RZ, blank


def drawn(generation: Generation, count: int, rng: np.random.Generator) -> NDArray[np.void]:
    """``count`` of each instruction that the generation has, in turn."""
    form = blank(count * len(generation.rows))
    for index, row in enumerate(generation.rows):
        form[index :: len(generation.rows)] = _of(row, count, rng)
    return form


def _of(row: Row, count: int, rng: np.random.Generator) -> NDArray[np.void]:
    form = blank(count)
    form["op"] = row.op
    for field in row.fields:
        smallest, largest = field.bounds
        info = np.iinfo(form.dtype[field.name])
        smallest, largest = max(smallest, int(info.min)), min(largest, int(info.max))
        if field.codes:
            values = rng.choice([value for value, _ in field.codes], count)
        else:
            values = rng.integers(smallest, largest + 1, count)
            values[rng.random(count) < 0.1] = smallest
            values[rng.random(count) < 0.1] = largest
        form[field.name] = values // field.step * field.step
    form["predicate"] = np.where(rng.random(count) < 0.5, 7, form["predicate"])
    form["stall"] = np.where(form["yields"] == 0, form["stall"].clip(1, 11), form["stall"])
    form["reuse"][form["yields"] == 1] = 0
    for name in row.pairs:
        form[name] &= 0xFE
    if row.data:
        form[row.data] &= ~(np.maximum(form["bytes"] // 4, 1) - 1)
        form[row.data][rng.random(count) < 0.1] = RZ
    return form
