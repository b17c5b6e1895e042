"""Operands of an expression: arrays and shapes that agree with it, and indices within bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums.expression import Expression, Index, TensorAccess
from lospmm.errors import BadRequest
from lospmm.problem.dtype import MASKED, Dtype, float32_of

Shape = tuple[int, ...]

#: The most values of a variable, and elements of an array, that kernels can count.
MAX_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**40

#: Names that are arguments of ``einsum`` itself.
TAKEN = frozenset({"expression", "dtype", "device"})


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Checked operands: ``sizes`` of variables, ``values`` of known factors, ``shapes`` of all factors."""

    expression: Expression
    sizes: Mapping[str, int]
    indices: Mapping[str, NDArray[np.int64]]
    values: Mapping[str, NDArray[np.float32]]
    shapes: Mapping[str, Shape]  # of factors and of the output

    @property
    def output_shape(self) -> Shape:
        """Shape of the output."""
        return self.shapes[self.expression.output.name]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Factors that are given as a shape only, in the order of the text."""
        names = dict.fromkeys(factor.name for factor in self.expression.factors)
        return tuple(name for name in names if name not in self.values)


def check(expression: Expression, given: Mapping[str, Any]) -> Operands:
    """Return the operands. Raises BadRequest, which points at the expression, if they do not fit together.

    A factor is an array, or the shape of one that comes later; an array of indices is an array; the output is its
    shape or an array, and may be left out if the sizes follow from its variables.
    """
    every: tuple[TensorAccess | Index, ...] = (*expression.accesses, *expression.indirect)
    places = {part.name: part for part in every}
    for name in TAKEN & places.keys():
        raise expression.fault(places[name], f"{name} is an argument of einsum: call the array something else")
    for name in given:
        if name not in places:
            raise BadRequest(f"einsum: {name} is given and does not occur in {expression.text.strip()}")
    indices = {index.name: _indices(expression, index, given) for index in expression.indirect}
    values: dict[str, NDArray[np.float32]] = {}
    shapes: dict[str, Shape] = {}
    for factor in expression.factors:
        if factor.name not in given:
            raise expression.fault(factor, f"{factor.name} is not given")
        shapes[factor.name] = _shape(expression, factor, given[factor.name])
        if not isinstance(given[factor.name], tuple):
            values[factor.name] = float32_of(f"einsum: {factor.name}", given[factor.name])
    output = expression.output
    if given.get(output.name) is not None:
        shapes[output.name] = _shape(expression, output, given[output.name])
    sizes = _sizes(expression, indices, shapes)
    if output.name not in shapes:
        shapes[output.name] = _output_shape(expression, sizes)
    _check_bounds(expression, indices, shapes)
    for name, shape in shapes.items():
        if int(np.prod(shape, dtype=object)) > MAX_ELEMENTS or max(shape) > MAX_SIZE:
            raise BadRequest(
                f"einsum: {name} has the shape {shape}; at most {MAX_ELEMENTS} elements, {MAX_SIZE} along an axis"
            )
    return Operands(expression, sizes, indices, values, shapes)


def check_range(name: str, array: NDArray[np.float32], dtype: Dtype) -> None:
    """Raise BadRequest for values beyond the range of the type."""
    if (beyond := dtype.beyond(array)) is not None:
        raise BadRequest(f"einsum: {name} holds {beyond:g}, beyond the range of {dtype.name}")


def _indices(expression: Expression, index: Index, given: Mapping[str, Any]) -> NDArray[np.int64]:
    array = given.get(index.name)
    if not isinstance(array, np.ndarray):
        what = "is not given" if array is None else f"is a {type(array).__name__}"
        raise expression.fault(index, f"{index.name} {what}: give a NumPy array of whole numbers")
    if isinstance(array, np.ma.MaskedArray):
        raise expression.fault(index, f"{index.name} is {MASKED}")
    if array.dtype.kind not in "iu":
        raise expression.fault(index, f"{index.name} is of type {array.dtype}, not of whole numbers")
    if array.ndim != len(index.variables):
        raise expression.fault(index, f"{index.name} has {array.ndim} axes, and {len(index.variables)} variables here")
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_SIZE:
        raise expression.fault(index, f"{index.name} holds {array.max()}, beyond any array")
    return np.ascontiguousarray(array, dtype=np.int64)


def _shape(expression: Expression, access: TensorAccess, given: Any) -> Shape:
    shape = given.shape if isinstance(given, np.ndarray) else given if isinstance(given, tuple) else None
    if shape is None:
        kind = type(given).__name__
        raise expression.fault(access, f"{access.name} is of type {kind}: give a NumPy array, or a shape")
    if not all(isinstance(side, int | np.integer) and not isinstance(side, bool) and side >= 0 for side in shape):
        raise expression.fault(access, f"{access.name} has the shape {shape}: give whole numbers")
    if len(shape) != len(access.indices):
        raise expression.fault(access, f"{access.name} has {len(shape)} axes, and {len(access.indices)} indices here")
    return tuple(int(side) for side in shape)


def _sizes(
    expression: Expression, indices: Mapping[str, NDArray[np.int64]], shapes: Mapping[str, Shape]
) -> dict[str, int]:
    """Return the size of every variable, from the axes that it indexes."""
    sizes: dict[str, int] = {}

    def learn(variable: Index, size: int, whose: str) -> None:
        if sizes.setdefault(variable.name, size) != size:
            takes = f"{variable.name} takes {size} values by the shape of {whose}"
            raise expression.fault(variable, f"{takes}, and {sizes[variable.name]} elsewhere")

    for access in (*expression.factors, expression.output):
        for axis, index in enumerate(access.indices):
            for own, variable in enumerate(index.variables):
                learn(variable, indices[index.name].shape[own], index.name)
            if not index.is_indirect and access.name in shapes:
                learn(index, shapes[access.name][axis], access.name)
    for index in expression.output.indices:
        if not index.is_indirect and index.name not in sizes:
            raise expression.fault(index, f"nothing says how many values {index.name} takes: give the output's shape")
    if max(sizes.values(), default=0) > MAX_SIZE:
        raise BadRequest(f"einsum: a variable takes more than {MAX_SIZE} values")
    return sizes


def _output_shape(expression: Expression, sizes: Mapping[str, int]) -> Shape:
    for index in expression.output.indices:
        if index.is_indirect:
            name = expression.output.name
            reason = f"nothing says how long this axis of {name} is: give its shape, as in {name}=(rows, columns)"
            raise expression.fault(index, reason)
    return tuple(sizes[index.name] for index in expression.output.indices)


def _check_bounds(
    expression: Expression, indices: Mapping[str, NDArray[np.int64]], shapes: Mapping[str, Shape]
) -> None:
    for access in expression.accesses:
        for axis, index in enumerate(access.indices):
            if not index.is_indirect:
                continue
            numbers, limit = indices[index.name], shapes[access.name][axis]
            wrong = np.flatnonzero((numbers < 0) | (numbers >= limit))
            if len(wrong):
                reason = (
                    f"{index.name} holds {numbers.reshape(-1)[wrong[0]]}, and this axis of {access.name} "
                    f"goes from 0 to {limit - 1}"
                )
                raise expression.fault(index, reason)
