"""Forecasts beside the times of ``fitting.tensor_core``, as its lines have them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def against_times(lines: Iterable[dict[str, Any]]) -> tuple[NDArray[np.float64], list[float]]:
    """Of all plans the logarithm of the time over the forecast; and of each problem the time of what is forecast to be
    the fastest, over the least."""
    problems: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for line in lines:
        one = (line["shape"], line["sparsity"], line["dtype"])
        problems.setdefault(one, []).append((line["forecast"], line["micros"]))
    both = np.array([pair for found in problems.values() for pair in found])
    slower = [min(found)[1] / min(time for _, time in found) for found in problems.values()]
    return np.log(both[:, 1] / both[:, 0]), slower
