"""Values of 8 bits in templates: their settings, and what they need."""

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.problem.values import ValueType, pair_bytes


def coded_refusal(problem: Problem) -> str | None:
    """Return why there is no kernel with the problem's ``values``, or None."""
    values, dtype, device = problem.values, problem.dtype, problem.device
    if values is not None and dtype.name != "float16":
        return f"values {values.name} need dtype float16, not {dtype.name}"
    if values is not None and device.arch_number < values.least_arch:
        return f"values {values.name} need sm_{values.least_arch}, not {device.arch}"
    return None


def scales_of(problem: Problem) -> NDArray[np.float32] | None:
    """Return the scale of each row of A, (m,); None: its values have none."""
    return None if problem.values is None else problem.values.scales(problem.matrix)


def settings_of(values: ValueType | None) -> dict[str, int | str]:
    """Return a template's settings: the bytes of two values, whether they are int8, and whether rows have scales."""
    names = {"INT8": int(values is not None and values.name == "int8"), "SCALED": int(values is not None)}
    return {"PAIR_BYTES": pair_bytes(values), **names}
