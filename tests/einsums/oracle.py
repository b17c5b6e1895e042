"""The meaning of an expression in NumPy: every product in float64. Slow; for tests."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums.expression import TensorAccess
from lospmm.einsums.operands import Operands


def evaluate(operands: Operands, inputs: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the output from zeros, with ``inputs`` for the factors that are only shapes."""
    expression, names = operands.expression, operands.expression.variables
    sizes = [operands.sizes[name] for name in names]
    grids = dict(zip(names, np.indices(sizes, sparse=True), strict=True))

    def places(access: TensorAccess) -> tuple[NDArray[np.int64], ...]:
        return tuple(
            operands.indices[index.name][tuple(grids[name] for name in index.names)]
            if index.is_indirect
            else grids[index.name]
            for index in access.indices
        )

    product = np.ones(sizes)
    for factor in expression.factors:
        array = operands.values[factor.name] if factor.name in operands.values else inputs[factor.name]
        product = product * array.astype(np.float64)[places(factor)]
    output = np.zeros(operands.output_shape)
    np.add.at(output, tuple(np.broadcast_to(axis, sizes) for axis in places(expression.output)), product)
    return output
