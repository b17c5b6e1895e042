"""Emitted PTX on a CPU: all chosen threads at once, each register a NumPy vector over threads.

Threads diverge: those that exit are dropped, and those that jump to the same tile go on as a group. To run another
instruction (PTX ISA 8.x, section 9.7), add a row to ``COMPUTED`` or ``EFFECTS``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.cpu.geometry import B_ADDRESS, C_ADDRESS, RESIDUAL_ADDRESS, Geometry, Run, refusal, stray_access
from lospmm.cpu.ptx_text import Address, PtxError, PtxFunction, parse
from lospmm.cpu.rounding import fused_multiply_add
from lospmm.stages import Count

#: One element per thread: uint32, uint64, float32 or bool.
Vector = NDArray[Any]


class _PtxFault(Exception):
    """The reason why an instruction cannot be executed."""


class _Values(dict[str, Vector]):
    """Registers or parameters by name; reading one that was never written is a fault."""

    def __missing__(self, name: str) -> Vector:
        raise _PtxFault(f"{name} is read before it is written")


@dataclass(frozen=True, slots=True, eq=False)
class _PtxOperand:
    """B, C or the residual: its address in the kernel, and its chosen columns."""

    name: str
    address: int
    elements: NDArray[np.float32]  # (rows, columns)


@dataclass(frozen=True, slots=True, eq=False)
class _Machine:
    functions: Mapping[str, PtxFunction]
    geometry: Geometry
    columns: NDArray[np.int64]
    b: _PtxOperand
    c: _PtxOperand
    residual: _PtxOperand | None
    progress: Count  # of tiles


@dataclass(slots=True, eq=False)
class _Group:
    """Threads at the same instruction of ``function``, with their shared and individual state."""

    machine: _Machine
    function: PtxFunction
    slots: NDArray[np.int64]  # (threads,): the place of each thread's column among the chosen ones
    parameters: _Values
    registers: _Values = field(default_factory=_Values)
    arguments: _Values = field(default_factory=_Values)  # of the next call

    def part(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "_Group":
        """Return some of the threads, in the same state."""
        kept = [_Values((name, value[which]) for name, value in values.items()) for values in self._values()]
        return _Group(self.machine, self.function, self.slots[which], *kept)

    def leave(self) -> None:
        self.slots = self.slots[:0]

    def _values(self) -> tuple[_Values, ...]:
        return self.parameters, self.registers, self.arguments


def execute(emission: Emission, asked: Run) -> NDArray[np.float32]:
    """Run PTX, as a row of ``RUNTIMES``. Raises VerificationFailed."""
    c = np.full((asked.geometry.m, len(asked.columns)), np.nan, dtype=np.float32)
    try:
        functions = parse(emission.source, OPCODES)
        third = None if asked.residual is None else _PtxOperand("the residual", RESIDUAL_ADDRESS, asked.residual)
        operands = _PtxOperand("B", B_ADDRESS, asked.b), _PtxOperand("C", C_ADDRESS, c), third
        machine = _Machine(functions, asked.geometry, asked.columns, *operands, asked.progress)
        # A sum beyond float32 is infinite, on a GPU as here; it is not worth a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            _run(_launch(machine, emission.entry), start=0)
    except PtxError as error:
        raise refusal(emission, error.line, str(error)) from None
    return c


def _launch(machine: _Machine, entry: str) -> _Group:
    """Return the threads of the chosen columns in every block row, at the start of the kernel."""
    geometry, count = machine.geometry, len(machine.columns)
    function = machine.functions.get(entry)
    if function is None:
        raise PtxError(1, f"there is no kernel {entry!r}")
    if function.max_threads is not None and geometry.cols > function.max_threads:
        raise PtxError(function.line, f"{geometry.cols} threads a block, more than .maxntid {function.max_threads}")
    block_row = np.repeat(np.arange(geometry.block_rows), count)
    slots = np.tile(np.arange(count), geometry.block_rows)
    block_column, thread = np.divmod(machine.columns[slots], geometry.cols)
    group, member = np.divmod(block_column, geometry.grid[0])
    special = {
        "%tid.x": thread,
        "%ntid.x": np.full_like(thread, geometry.cols),
        "%ctaid.x": member,
        "%ctaid.y": block_row,
        "%ctaid.z": group,
        "%nctaid.x": np.full_like(thread, geometry.grid[0]),
    }
    given: list[np.unsignedinteger] = [
        np.uint64(B_ADDRESS),
        np.uint64(C_ADDRESS),
        *([np.uint64(RESIDUAL_ADDRESS)] if geometry.takes_residual else []),
    ]
    if [f"b{value.dtype.itemsize * 8}" for value in given] != list(function.parameters.values()):
        raise PtxError(function.line, f"the launch gives {len(given)} arguments of other types or another number")
    parameters = {name: np.full(len(slots), value) for name, value in zip(function.parameters, given, strict=True)}
    registers = _Values((name, value.astype(np.uint32)) for name, value in special.items())
    return _Group(machine, function, slots, _Values(parameters), registers)


def _run(group: _Group, *, start: int) -> None:
    """Execute from instruction ``start`` until every thread has left. Raises PtxError."""
    body = group.function.body
    for index in range(start, len(body)):
        opcode, operands, line, guard, is_negated = body[index]
        try:
            if guard:
                _run_guarded(group, opcode, operands, group.registers[guard] != is_negated)
            else:
                _execute(group, opcode, operands)
        except _PtxFault as fault:
            raise PtxError(line, str(fault)) from None
        if not len(group.slots):
            return
    raise PtxError(body[-1].line if body else group.function.line, f"{group.function.name} ends without exit")


def _run_guarded(group: _Group, opcode: str, operands: tuple[Any, ...], runs: Vector) -> None:
    """Execute the instruction in the threads that take part; the others keep the target's value."""
    if not runs.any():
        return
    if runs.all():
        _execute(group, opcode, operands)
        return
    part = _Group(group.machine, group.function, group.slots[runs], group.parameters)
    for name in {name for operand in operands if (name := _register_of(operand))} & group.registers.keys():
        part.registers[name] = group.registers[name][runs]
    _execute(part, opcode, operands)
    target = operands[0]
    found = part.registers[target]
    whole = group.registers[target].copy() if target in group.registers else np.full(len(runs), np.nan, found.dtype)
    whole[runs] = found
    group.registers[target] = whole


def _register_of(operand: Any) -> str | None:
    if isinstance(operand, Address):
        return operand.register
    return operand if isinstance(operand, str) else None


def _execute(group: _Group, opcode: str, operands: tuple[Any, ...]) -> None:
    if opcode in EFFECTS:
        EFFECTS[opcode](group, *operands)
        return
    target, *sources = operands
    found = COMPUTED[opcode](*(_value(group, source) for source in sources))
    group.registers[target] = found if found.ndim else np.full(len(group.slots), found)


def _value(group: _Group, operand: str | np.generic) -> Vector | np.generic:
    """Return a register's value, or an immediate, which is that of every thread."""
    return group.registers[operand] if isinstance(operand, str) else operand


def _multiply_wide_signed(x: Vector, factor: np.uint32) -> Vector:
    return (x.astype(np.int32).astype(np.int64) * np.int64(factor.astype(np.int32))).astype(np.uint64)


def _load_parameter(group: _Group, target: str, name: str) -> None:
    group.registers[target] = group.parameters[name]


def _store_argument(group: _Group, name: str, source: str) -> None:
    group.arguments[name] = group.registers[source]


def _load(group: _Group, target: str, address: Address) -> None:
    machine = group.machine
    operand = machine.b
    if machine.residual is not None and (group.registers[address.register] >> np.uint64(60) == 3).any():
        operand = machine.residual
    group.registers[target] = operand.elements[_rows(group, operand, address), group.slots]


def _store(group: _Group, address: Address, source: str | np.float32) -> None:
    c = group.machine.c
    c.elements[_rows(group, c, address), group.slots] = _value(group, source)


def _rows(group: _Group, operand: _PtxOperand, address: Address) -> NDArray[np.int64]:
    """Return the row that each thread addresses in its column, (threads,)."""
    geometry = group.machine.geometry
    own_column = group.machine.columns[group.slots]
    offset = group.registers[address.register] + np.uint64((address.offset - operand.address) % 2**64)
    rows_of = geometry.rows_of_b if operand is group.machine.b else geometry.rows_of_c
    rows = rows_of(own_column, offset)
    stray = (rows < 0) | (own_column >= geometry.n)
    if stray.any():
        first = int(stray.argmax())
        raise _PtxFault(stray_access(operand.name, int(offset[first].astype(np.int64)), int(own_column[first])))
    return rows


def _branch(group: _Group, index: str, table: str) -> None:
    """Jump; threads with the same target go on together."""
    function = group.function
    starts = np.array([function.labels[label] for label in function.tables[table]])
    which = group.registers[index]
    if which.max() >= len(starts):
        raise _PtxFault(f"branch to target {which.max()} of {len(starts)}")
    target = starts[which]
    order = np.argsort(target, kind="stable")
    cuts = np.flatnonzero(np.diff(target[order])) + 1
    for done, members in enumerate(np.split(order, cuts)):
        group.machine.progress(done, len(cuts) + 1)
        _run(group.part(members), start=int(target[members[0]]))
    group.leave()


def _call(group: _Group, name: str, arguments: tuple[str, ...]) -> None:
    """Continue in a function, which never returns."""
    callee, parameters = group.machine.functions[name], _Values()
    for parameter, argument in zip(callee.parameters, arguments, strict=True):
        parameters[parameter] = group.arguments[argument]
    _run(_Group(group.machine, callee, group.slots, parameters), start=0)
    group.leave()


def _exit_if(group: _Group, predicate: str) -> None:
    leaving = group.registers[predicate]
    if leaving.any():
        staying = group.part(~leaving)
        group.slots, group.parameters, group.registers = staying.slots, staying.parameters, staying.registers


#: Instructions that set their first operand, by opcode: its value, of those of the others.
COMPUTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mov.u32": lambda x: x,
        "mov.f32": lambda x: x,
        "mad.lo.u32": lambda x, y, z: x * y + z,
        "mad.lo.s32": lambda x, y, z: x * y + z,
        "mul.hi.u32": lambda x, y: (x.astype(np.uint64) * np.uint64(y) >> np.uint64(32)).astype(np.uint32),
        "mul.wide.u32": lambda x, y: x.astype(np.uint64) * np.uint64(y),
        "mul.wide.s32": _multiply_wide_signed,
        "shr.u32": lambda x, y: x >> y,
        "add.s32": lambda x, y: x + y,
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "selp.b32": lambda x, y, predicate: np.where(predicate, x, y),
        "add.s64": lambda x, y: x + y,
        "cvta.to.global.u64": lambda x: x,
        "setp.ge.u32": lambda x, y: x >= y,
        "setp.ne.u32": lambda x, y: x != y,
        "setp.lt.f32": lambda x, y: x < y,
        "fma.rn.f32": lambda x, weight, z: fused_multiply_add(weight, x, z),
        "add.rn.f32": lambda x, y: x + y,
        "max.NaN.f32": np.maximum,
    }
)

#: The others, by opcode: what they do to a group of threads with their operands.
EFFECTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ld.param.b32": _load_parameter,
        "ld.param.u64": _load_parameter,
        "ld.param.b64": _load_parameter,
        "st.param.b32": _store_argument,
        "st.param.b64": _store_argument,
        "ld.global.nc.L1::no_allocate.f32": _load,
        "st.global.L1::no_allocate.f32": _store,
        "brx.idx": _branch,
        "call": _call,
        "exit": _Group.leave,
        "@exit": _exit_if,  # with a predicate
    }
)

OPCODES = COMPUTED.keys() | EFFECTS.keys()
