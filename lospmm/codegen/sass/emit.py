"""Emitter of machine code."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.sass.double import two_columns
from lospmm.codegen.sass.fetch import fetching, sharers_of, span_bytes
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.half import packed
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.codegen.sass.machine import MachineCode, padding
from lospmm.codegen.sass.prologue import prologue
from lospmm.codegen.sass.scheduler import entry_of, schedule_tile
from lospmm.codegen.sass.walks import walked_tile
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype
from lospmm.problem.lanes import DOUBLE, PAIRS

#: Block rows that a kernel jumps to: a cubin lists them, 4 bytes each, in an attribute whose length has 16 bits.
MAX_BLOCK_ROWS = 16_000

#: By the name of words (``lospmm.problem.lanes``): the conversion of machine code of float32. That of other words the
#: scheduler writes itself (``narrow``).
OF_WORDS: Mapping[str, Callable[[MachineCode, Dtype], MachineCode]] = MappingProxyType(
    {DOUBLE.name: two_columns, PAIRS.name: packed}
)


def emit(program: KernelProgram, arch: str) -> Emission:
    """Return ``program`` as machine code for ``arch``. Raises Unsupported as ``tiles_of`` does."""
    code = tiles_of(program, arch)
    return emission_of(program, code, sharers_of(program, BYTES_PER_INSTRUCTION * len(code.form)))


def tiles_of(program: KernelProgram, arch: str) -> MachineCode:
    """Return the tiles as machine code, without the fetch of their code. Raises Unsupported.

    Unsupported are architectures without tables, block columns at run time if blocks share a tile, and more than
    MAX_BLOCK_ROWS block rows.
    """
    generation_of(arch)
    if program.cols is None and program.split_k > 1:
        raise Unsupported("machine code has the threads of a block in the addresses of its mailbox: give cols")
    if program.block_rows > MAX_BLOCK_ROWS:
        raise Unsupported(
            f"{program.block_rows} block rows: machine code jumps to {MAX_BLOCK_ROWS} at most; split A by its rows"
        )
    schedule = schedule_tile if program.walks == 1 else walked_tile
    tiles = [schedule(tile, program) for tile in program.tiles]
    pieces = [part for form, _ in tiles for part in (form, padding(len(form)))]
    lengths = [len(form) + len(padding(len(form))) for form, _ in tiles]
    code = MachineCode(
        form=np.concatenate(pieces),
        starts=np.cumsum([0, *lengths[:-1]]),
        dispatch=program.dispatch,
        registers=max(registers for _, registers in tiles),
        entry=entry_of(program),
        arch=arch,
        split_k=program.split_k,
    )
    convert = OF_WORDS.get(program.words.name)
    return code if convert is None else convert(code, program.dtype)


def emission_of(program: KernelProgram, code: MachineCode, sharers: int) -> Emission:
    """Return the emission of ``code``; with ``sharers``, so many neighbouring blocks fetch a tile's code."""
    if sharers:
        assert program.cols is not None
        code = fetching(code, span_bytes(program.cols, sharers))
    units = (prologue(program, code.arch, sharers=sharers),)
    return Emission(language="sass", entry=program.name, source="", units=units, machine=code)
