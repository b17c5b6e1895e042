"""The kernel of any expression: a thread, or a team of lanes, for each element of the output.

A team shares the values of the innermost summed variable if the factors are contiguous along it (as in SDDMM), and
adds up in a tree; else neighbouring threads have neighbouring elements of the output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums.expression import TensorAccess
from lospmm.einsums.operands import Operands, Shape
from lospmm.einsums.plan import LoopPlan, plan_loops
from lospmm.errors import Unsupported
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_prelude
from lospmm.problem.dtype import Dtype
from lospmm.problem.epilogue import PLAIN
from lospmm.problem.launch import Launch
from lospmm.problem.problem import ceil_div

THREADS = 256
ENTRY = "lospmm_einsum"

#: The most factors that are known only when the kernel runs: its arguments beside the output.
MAX_INPUTS = 2
ARGUMENTS = ("b", "residual")

_WARP = 32
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Team:
    """``lanes`` threads per output element, which take ``vector`` values of ``variable`` each in turn."""

    variable: str | None
    lanes: int
    vector: int
    loaded: tuple[int, ...]  # factors that are read ``vector`` elements at a time


def kernel_of_loops(operands: Operands, dtype: Dtype) -> PackedKernel:
    """Return the kernel. Raises Unsupported for too many arrays or too many elements of the output."""
    inputs = operands.inputs
    if len(inputs) > MAX_INPUTS:
        raise Unsupported(
            f"einsum: {len(inputs)} inputs, {', '.join(inputs)}; at most {MAX_INPUTS} are allowed: "
            "give the others as arrays"
        )
    plan = plan_loops(operands)
    team = _team(operands, plan, dtype)
    arrays = _arrays(operands, plan, dtype)
    if len(arrays) >= PLACES:
        raise Unsupported(
            f"einsum: {len(arrays)} arrays of indices and known factors; at most {PLACES - 1} are allowed"
        )
    elements = int(np.prod(operands.output_shape, dtype=object))
    blocks = ceil_div(elements * team.lanes, THREADS)
    if blocks > 2**31 - 1:
        raise Unsupported(f"einsum: the output has {elements} elements, more than one kernel can compute")
    body = "\n".join(_text(operands, plan, team, list(arrays)))
    prelude = source_of_prelude({}, dtype=dtype, epilogue=PLAIN, takes_residual=len(inputs) == MAX_INPUTS)
    return PackedKernel(
        entry=ENTRY,
        source=f"{prelude}\n{body}\n",
        data=pack((), list(arrays.values()), epilogue=PLAIN),
        launch=Launch((blocks, 1, 1), THREADS),
        registers=128,
        cols=THREADS,
        dtype=dtype,
        takes_residual=len(inputs) == MAX_INPUTS,
    )


def _team(operands: Operands, plan: LoopPlan, dtype: Dtype) -> Team:
    factors, output = operands.expression.factors, operands.expression.output
    last = output.indices[-1]
    along = [factor.indices[-1].name for factor in factors if not factor.indices[-1].is_indirect]
    if (not last.is_indirect and last.name in along) or not any(name in plan.summed for name in along):
        return Team(None, 1, 1, ())
    variable = max((name for name in plan.summed if name in along), key=lambda name: (operands.sizes[name], name))
    size = operands.sizes[variable]
    vector = _VECTOR_BYTES // dtype.element_bytes
    loaded = tuple(
        at
        for at, factor in enumerate(factors)
        if factor.indices[-1].name == variable
        and not factor.indices[-1].is_indirect
        and all(variable not in index.names for index in factor.indices[:-1])
        and factor.name not in operands.values
    )
    if size % vector or not loaded:
        vector, loaded = 1, ()
    lanes = min(_WARP, 1 << max(0, size // vector - 1).bit_length())
    return Team(variable, lanes, vector, loaded)


def _arrays(operands: Operands, plan: LoopPlan, dtype: Dtype) -> dict[str, NDArray[Any]]:
    """Return the data's arrays, by their names in the text."""
    used = dict.fromkeys(
        index.name for factor in operands.expression.factors for index in factor.indices if index.is_indirect
    )
    arrays: dict[str, NDArray[Any]] = {f"index_{name}": operands.indices[name].astype(np.int32) for name in used}
    for at, bucket in enumerate(plan.buckets):
        arrays[f"starts_{at}"] = bucket.starts
        for variable, values in zip(bucket.variables, bucket.values, strict=True):
            arrays[f"sorted_{variable}"] = values
    # rounded as later inputs are
    factors = {name: dtype.rounded(array) if dtype.is_16_bit else array for name, array in operands.values.items()}
    return arrays | {f"factor_{name}": array for name, array in factors.items()}


def _text(operands: Operands, plan: LoopPlan, team: Team, arrays: Sequence[str]) -> Iterator[str]:
    expression, shape = operands.expression, operands.output_shape
    strides = strides_of(shape)
    yield f"// {expression.text.strip()}"
    yield "template <int count> struct alignas(sizeof(Element) * count) Elements { Element of[count]; };"
    yield f"LOSPMM_KERNEL({ENTRY}) {{"
    for number, name in enumerate(arrays):
        kind = "long long" if name.startswith("starts_") else "float" if name.startswith("factor_") else "int"
        yield f"  const {kind} *{name} = lospmm_array<{kind}>({number});"
    count = int(np.prod(shape, dtype=object))
    yield f"  const long long thread = static_cast<long long>(blockIdx.x) * {THREADS} + threadIdx.x;"
    yield f"  const long long own = {_over('thread', team.lanes)};"
    yield f"  const long long element = own < {count} ? own : 0;  // teams behind the last go along, and store nothing"
    for axis, size in enumerate(shape):
        yield f"  const long long axis_{axis} = {_over('element', strides[axis])} % {max(1, size)};"
    for axis, variable in plan.free:
        yield f"  const long long {_variable(variable)} = axis_{axis};"
    yield "  float sum = 0;"
    depth = 1
    for at, bucket in enumerate(plan.buckets):
        key = "axis_" + str(bucket.axes[0])
        for axis in bucket.axes[1:]:
            key = f"({key}) * {shape[axis]} + axis_{axis}"
        place = f"place_{at}"
        yield _indent(
            depth, f"for (long long {place} = starts_{at}[{key}]; {place} < starts_{at}[{key} + 1]; ++{place}) {{"
        )
        depth += 1
        for name in bucket.variables:
            yield _indent(depth, f"const long long {_variable(name)} = sorted_{name}[{place}];")
    for name in plan.summed:
        if name != team.variable:
            size = operands.sizes[name]
            yield _indent(
                depth, f"for (long long {_variable(name)} = 0; {_variable(name)} < {size}; ++{_variable(name)}) {{"
            )
            depth += 1
    yield from _innermost(operands, team, depth)
    for level in range(depth - 1, 0, -1):
        yield _indent(level, "}")
    for power in range(team.lanes.bit_length() - 2, -1, -1):
        yield f"  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, {1 << power}));"
    leader = f" && thread % {team.lanes} == 0" if team.lanes > 1 else ""
    yield f"  if (own < {count}{leader}) c[element] = lospmm_element(sum);"
    yield "}"


def _innermost(operands: Operands, team: Team, depth: int) -> Iterator[str]:
    """Yield the lines of the product, in the loop over the team's variable if there is one."""
    factors = operands.expression.factors
    offsets = [_offset(operands, factor, operands.shapes[factor.name]) for factor in factors]
    if team.variable is None:
        yield _indent(depth, _added([_load(operands, at, offsets[at]) for at in range(len(factors))]))
        return
    variable, size, step = _variable(team.variable), operands.sizes[team.variable], team.lanes * team.vector
    first = f"first_{team.variable}"
    yield _indent(
        depth,
        f"for (long long {first} = thread % {team.lanes} * {team.vector}; {first} < {size}; {first} += {step}) {{",
    )
    yield _indent(depth + 1, f"long long {variable} = {first};")
    for at in team.loaded:
        pointer = f"{_argument(operands, factors[at])} + {offsets[at]}"
        kind = f"Elements<{team.vector}>"
        yield _indent(depth + 1, f"const {kind} loaded_{at} = *reinterpret_cast<const {kind} *>({pointer});")
    yield "#pragma unroll"
    yield _indent(depth + 1, f"for (int i = 0; i < {team.vector}; ++i, ++{variable})")
    terms = [
        f"lospmm_float(loaded_{at}.of[i])" if at in team.loaded else _load(operands, at, offsets[at])
        for at in range(len(factors))
    ]
    yield _indent(depth + 2, _added(terms))
    yield _indent(depth, "}")


def _added(terms: Sequence[str]) -> str:
    if len(terms) == 1:
        return f"sum = __fadd_rn(sum, {terms[0]});"
    return f"sum = __fmaf_rn({' * '.join(terms[:-1])}, {terms[-1]}, sum);"


def _load(operands: Operands, at: int, offset: str) -> str:
    factor = operands.expression.factors[at]
    if factor.name in operands.values:
        return f"factor_{factor.name}[{offset}]"
    return f"lospmm_float({_argument(operands, factor)}[{offset}])"


def _argument(operands: Operands, factor: TensorAccess) -> str:
    return ARGUMENTS[operands.inputs.index(factor.name)]


def _offset(operands: Operands, access: TensorAccess, shape: Shape) -> str:
    """Return the offset of an array's element as an expression, in elements."""
    parts = []
    for index, stride in zip(access.indices, strides_of(shape), strict=True):
        place = _variable(index.name)
        if index.is_indirect:
            own = strides_of(operands.indices[index.name].shape)
            inner = " + ".join(
                _times(_variable(name), stride_of_index) for name, stride_of_index in zip(index.names, own, strict=True)
            )
            place = f"static_cast<long long>(index_{index.name}[{inner}])"
        parts.append(_times(place, stride))
    return " + ".join(parts)


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in elements."""
    strides = [1]
    for side in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, side))
    return strides


def _times(place: str, stride: int) -> str:
    return place if stride == 1 else f"{place} * {stride}"


def _over(place: str, stride: int) -> str:
    return place if stride == 1 else f"{place} / {stride}"


def _variable(name: str) -> str:
    """Return a name that is no keyword of C++."""
    return f"at_{name}"


def _indent(depth: int, line: str) -> str:
    return "  " * depth + line
