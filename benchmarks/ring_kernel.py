"""Kernels whose B passes through shared memory: what ``benchmarks.shared_ring`` times. No part of lospmm makes them.

One warp of a block copies rows of B into a ring of stages, by bulk asynchronous copies in a loop; the others walk the
tile's code and read an element of each row from the ring. Loads in flight then take no registers, so that tiles can be
taller or blocks wider. Two barriers in shared memory belong to a stage: one falls when it was filled, the other when
every warp has read it. Only for K that is a multiple of a stage's rows, n of 4, and A without empty rows.

A block whose columns reach behind the last one moves to the left: it computes some columns that another does too.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.codegen.sass import addresses, layer, scheduler
from lospmm.codegen.sass.fields import encode
from lospmm.codegen.sass.form import RZ, Opcode, blank
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.machine import ENTRY, MachineCode
from lospmm.ir import FLOAT_BYTES, WINDOW_BYTES, Op, TileProgram, grid
from lospmm.model import Launch, Problem, Schedule
from lospmm.reorder import regroup
from lospmm.schedule import tile_programs
from lospmm.store import Store
from lospmm.toolchain import cubin as graft
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite

NAME = "ring"

#: From the start of shared memory to the first stage; barriers lie before it, 8 bytes each.
DATA = 1024

WARP = 32
ROWS_AT_ONCE = 4  # copies in one turn of the copying warp's loop

#: "First to be evicted" from the L2 cache, as CUTLASS has it (cute/arch/copy_sm90_desc.hpp).
POLICY = "0x12F0000000000000"

_BARRIER_SCOREBOARD = 5
_DONE = 3  # the predicate that a wait sets

Form = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Ring:
    """A tile size and the stages of its ring. ``multicast`` blocks of a cluster, with tiles next to each other, each
    copy a share of a stage's rows to all of them. ``without`` leaves out a part: "multiply-adds" or "copies".
    """

    rows: int
    cols: int
    stage_rows: int
    stages: int
    prefetch: int  # elements in registers
    column_group: int = 2
    multicast: int = 1
    without: str = ""

    @property
    def stage_bytes(self) -> int:
        return self.stage_rows * self.cols * FLOAT_BYTES

    @property
    def threads(self) -> int:
        return self.cols + WARP

    @property
    def shared(self) -> bool:
        return self.multicast > 1

    @property
    def empty(self) -> int:
        """Where the barriers of stages that were read begin; behind them those by which the other block says so."""
        return 8 * self.stages


@dataclass(frozen=True, slots=True)
class Kernel:
    cubin: bytes
    launch: Launch
    registers: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the prologue leaves: (uniform) registers with the thread's place in the ring, C, the descriptor and the
    ring's start, and the predicate, perhaps negated, that holds in one thread of each warp."""

    own: int
    c: int
    descriptor: int
    ring: int
    one: int
    negated: int


def build(problem: Problem, ring: Ring, store: Store) -> Kernel:
    """The kernel of ``ring``. Raises ToolchainFault."""
    matrix, n = problem.matrix, problem.n
    tiling = regroup(matrix, [ring.rows])[ring.rows]
    assert matrix.k % ring.stage_rows == 0 and n % 4 == 0 and not len(tiling.empty_rows), "not for such a problem"
    text = prologue(problem, ring)
    head = compile_kernel(
        Emission("ptx", NAME, text, (text,)), arch="sm_90", registers=255, store=store, workers=1
    ).cubin
    parts = {section.name: section.content for section in elf.sections(head)}
    entry = _entry(parts[f".text.{NAME}"], parts[f".nv.info.{NAME}"])
    forms: list[Form] = []
    registers = 0
    for tile in tiling.tiles:
        [program] = tile_programs(matrix, tile.rows, Schedule(ring.prefetch))
        form, needed = _tile(program, problem, ring, entry)
        forms.append(np.concatenate((form, scheduler.padding(len(form)))))
        registers = max(registers, needed)
    dispatch = list(range(len(forms)))
    dispatch += [len(forms) - 1] * (-len(forms) % ring.multicast)  # the same again
    starts = np.cumsum([0, *(len(form) for form in forms[:-1])])
    code = MachineCode(np.concatenate(forms), starts, tuple(dispatch), registers, ENTRY)
    cubin = _graft(head, parts, code)
    shape = grid(len(dispatch), n, ring.cols, ring.column_group)
    launch = Launch(shape, ring.threads, DATA + ring.stages * ring.stage_bytes)
    return Kernel(cubin, launch, registers, len(code.form) * 16)


def prologue(problem: Problem, ring: Ring) -> str:
    """Before the tiles: the barriers, the loop of the warp that copies, and the jump of the others."""
    n, warps = problem.n, ring.cols // WARP
    meet = ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")
    met = meet if ring.shared else ()
    lines = [
        ".version 8.6\n.target sm_90\n.address_size 64",
        ".extern .shared .align 128 .b8 memory[];",
        f".visible .entry {NAME} (.param .u64 b, .param .u64 c) .maxntid {ring.threads}",
        *([f".reqnctapercluster 1, {ring.multicast}, 1"] if ring.shared else []),
        "{",
        ".reg .b64 %b, %c, %row, %policy, %offset; .reg .pred %p, %done, %one, %mine; .reg .f32 %value;",
        ".reg .b32 %thread, %ring, %warp, %full, %stage, %lane, %odd, %even, %to, %end, %tile, %own, %group, %members;",
        ".reg .b32 %member, %block, %column, %i, %rank, %other; .reg .b16 %both;",
        "ld.param.u64 %b, [b]; ld.param.u64 %c, [c]; cvta.to.global.u64 %b, %b; cvta.to.global.u64 %c, %c;",
        "mov.u32 %thread, %tid.x; mov.u32 %ring, memory;",
        "shr.u32 %warp, %thread, 5; shfl.sync.idx.b32 %warp, %warp, 0, 31, 0xffffffff;",
        "mov.u32 %tile, %ctaid.y; mov.u32 %group, %ctaid.z; mov.u32 %members, %nctaid.x; mov.u32 %member, %ctaid.x;",
        "mad.lo.u32 %block, %group, %members, %member;",
        f"mul.lo.u32 %column, %block, {ring.cols}; setp.ge.u32 %p, %column, {n}; @%p exit;",
        f"min.u32 %column, %column, {n - ring.cols};",
        f"setp.ne.u32 %p, %warp, {warps}; @%p bra STARTED; elect.sync _|%one, 0xffffffff;",
        *_barriers(ring),
        "@%one fence.mbarrier_init.release.cluster;",
        "STARTED:",
        *(met or ("bar.sync 0;",)),
        f"setp.ne.u32 %p, %warp, {warps}; @%p bra READ; elect.sync _|%one, 0xffffffff;",
        *(["exit;"] if ring.without == "copies" else []),
        *_copying(problem, ring),
        *met,
        "exit;",
        "READ:",
        "add.u32 %column, %column, %thread; mul.wide.u32 %offset, %column, 4; add.u64 %c, %c, %offset;",
        "mad.lo.u32 %own, %thread, 4, %ring; and.b32 %lane, %thread, 31; setp.eq.u32 %mine, %lane, 0;",
        "targets: .branchtargets TARGET_0, TARGET_1;\nbrx.idx %tile, targets;",
        *(line for index in range(2) for line in _target(index, ring.empty, met)),
        "}\n",
    ]
    return "\n".join(lines)


def _barriers(ring: Ring) -> Iterator[str]:
    for stage in range(ring.stages):
        yield f"@%one mbarrier.init.shared.b64 [%ring+{8 * stage}], 1;"
        yield f"@%one mbarrier.init.shared.b64 [%ring+{ring.empty + 8 * stage}], {ring.cols // WARP};"
        if ring.shared:
            yield f"@%one mbarrier.init.shared.b64 [%ring+{2 * ring.empty + 8 * stage}], 1;"


def _copying(problem: Problem, ring: Ring) -> list[str]:
    """The loop of the warp that copies: a stage a turn, ``ROWS_AT_ONCE`` rows of it at a time."""
    row_bytes, share = problem.n * FLOAT_BYTES, ring.stage_rows // ring.multicast
    assert ring.multicast in (1, 2) and share % ROWS_AT_ONCE == 0, "of two blocks each knows the other"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    copy += (".multicast::cluster" if ring.shared else "") + ".L2::cache_hint"
    copies = [
        f"@%one {copy} [%to+{DATA + row * ring.cols * FLOAT_BYTES}], [%row+{row * row_bytes}], "
        f"{ring.cols * FLOAT_BYTES}, [%full]{', %both' if ring.shared else ''}, %policy;"
        for row in range(ROWS_AT_ONCE)
    ]
    of_two = (
        "mov.u32 %rank, %cluster_ctarank;",
        f"mad.wide.u32 %row, %rank, {share * row_bytes}, %row;",
        f"mad.lo.u32 %to, %rank, {share * ring.cols * FLOAT_BYTES}, %to;",
        "mov.b16 %both, 3;",
        "xor.b32 %rank, %rank, 1;",
        "mapa.shared::cluster.u32 %other, %ring, %rank;",
    )
    agree = (  # the other block may be written too, once its warps have read the stage
        "sub.u32 %i, %full, %ring;",
        "add.u32 %i, %i, %other;",
        f"@%one mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%i+{2 * ring.empty}];",
        "AGREE:",
        f"mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %done, [%full+{2 * ring.empty}], %even;",
        "@!%done bra AGREE;",
    )
    return [
        f"mul.wide.u32 %offset, %column, 4; add.u64 %row, %b, %offset; mov.u64 %policy, {POLICY};",
        "mov.u32 %stage, 0; mov.u32 %to, %ring; mov.u32 %full, %ring; mov.u32 %odd, 1; mov.u32 %even, 0;",
        *(of_two if ring.shared else ()),
        "STAGE:",
        f"mbarrier.try_wait.parity.shared.b64 %done, [%full+{ring.empty}], %odd; @!%done bra STAGE;",
        f"@%one mbarrier.arrive.expect_tx.shared.b64 _, [%full], {ring.stage_bytes};",
        *(agree if ring.shared else ()),
        "mov.u32 %i, 0;",
        "ROWS:",
        *copies,
        f"add.u64 %row, %row, {ROWS_AT_ONCE * row_bytes}; add.u32 %to, %to, {ROWS_AT_ONCE * ring.cols * FLOAT_BYTES};",
        f"add.u32 %i, %i, {ROWS_AT_ONCE}; setp.lt.u32 %p, %i, {share}; @%p bra ROWS;",
        f"add.u64 %row, %row, {(ring.stage_rows - share) * row_bytes};",
        f"add.u32 %to, %to, {(ring.stage_rows - share) * ring.cols * FLOAT_BYTES};",
        f"add.u32 %full, %full, 8; add.u32 %end, %ring, {ring.empty}; setp.eq.u32 %p, %full, %end;",
        f"@%p mov.u32 %full, %ring; @%p sub.u32 %to, %to, {ring.stages * ring.stage_bytes};",
        "@%p xor.b32 %odd, %odd, 1; @%p xor.b32 %even, %even, 1;",
        f"add.u32 %stage, %stage, 1; setp.lt.u32 %p, %stage, {problem.matrix.k // ring.stage_rows}; @%p bra STAGE;",
    ]


def _target(index: int, empty: int, meet: tuple[str, ...]) -> list[str]:
    return [
        f"TARGET_{index}:",
        f"mbarrier.try_wait.parity.shared.b64 %done, [%ring+{8 * index}], 0; @!%done bra TARGET_{index};",
        f"ld.shared.f32 %value, [%own+{DATA + 4 * index}];",
        f"@%mine mbarrier.arrive.shared.b64 _, [%ring+{empty + 8 * index}];",
        *meet,
        f"st.global.L1::no_allocate.f32 [%c+{4 * index}], %value;",
        "exit;",
    ]


def _entry(text: bytes, info: bytes) -> _Entry:
    """The registers of the prologue's targets."""
    branches = next(value for _, kind, value in elf.attributes(info) if kind == graft._EIATTR_INDIRECT_BRANCHES)
    (count,) = struct.unpack_from("<I", branches, 8)
    words = np.frombuffer(text, "<u8").reshape(-1, 2).tolist()
    found = set()
    for start in struct.unpack_from(f"<{count}I", branches, 12):
        first: dict[int, tuple[int, int]] = {}
        for low, high in words[start // 16 :]:
            first.setdefault(low & 0xFFF, (low, high))
            if low & 0xFFF == 0x94D:  # EXIT
                break
        lds, stg, wait, arrive = (first[opcode] for opcode in (0x984, 0x986, 0x5A7, 0x9A7))
        found.add(
            _Entry(
                own=lds[0] >> 24 & 255,
                c=stg[0] >> 24 & 255,
                descriptor=stg[1] & 63,
                ring=wait[1] & 63,
                one=arrive[0] >> 12 & 7,
                negated=arrive[0] >> 15 & 1,
            )
        )
    assert len(found) == 1, "the prologue's targets find things in different registers"
    return found.pop()


def _tile(tile: TileProgram, problem: Problem, ring: Ring, entry: _Entry) -> tuple[Form, int]:
    """As ``scheduler.schedule_tile``: the machine code of a tile, and the registers that it needs."""
    code = tile.code
    loads, fmas, stores = (np.flatnonzero(code["op"] == op) for op in (Op.LOAD, Op.FMA, Op.STORE))
    taken = {entry.own, entry.c, entry.c + 1}
    odd, *free = (register for register in range(RZ) if register not in taken)
    names = np.array(free, np.uint8)
    registers = scheduler.Registers(
        names[: tile.accumulators],
        names[tile.accumulators : tile.accumulators + tile.buffers],
        frozenset({*taken, odd}),
    )
    code = _other_bank_first(code, fmas, registers)
    form = blank(len(code))
    k = code["source"][loads].astype(np.int64)
    form["op"][loads], form["bytes"][loads], form["ra"][loads] = Opcode.LDS, FLOAT_BYTES, entry.own
    form["rd"][loads] = registers.buffers[code["target"][loads]]
    form["offset"][loads] = DATA + k % (ring.stage_rows * ring.stages) * ring.cols * FLOAT_BYTES
    pieces = _stores(form, code, stores, problem.n * FLOAT_BYTES, entry, registers)
    scheduler.set_arithmetic(form, code, fmas, registers, np.zeros(len(code), np.int64))
    scheduler._set_scoreboards(form, code, loads, fmas, tile.buffers, _BARRIER_SCOREBOARD)
    scheduler.set_stalls(form, code)
    if ring.without != "copies":
        pieces += _stages(code, problem.matrix.k // ring.stage_rows, ring, entry, odd)
    if ring.multicast > 1:  # no block leaves while another may still write to its shared memory
        pieces.append((int(fmas[-1]) + 1, scheduler._cluster((Opcode.CLUSTER_ARRIVE, Opcode.CLUSTER_WAIT))))
    pieces.append((len(form), scheduler._leave()))
    before = np.array([at for at, _ in pieces if at]) - 1
    form["reuse"][before.astype(np.intp)] = 0
    form = np.concatenate((_one(Opcode.MOV_IMM, rd=odd, immediate=1 << 31, stall=6), layer.inserted(form, pieces)))
    if ring.without == "multiply-adds":
        form = form[(form["op"] != Opcode.FFMA_IMM) | (form["wait"] != 0)]
        form["reuse"] = 0
    return form, registers.count


def _other_bank_first(code: Form, fmas: NDArray[np.intp], registers: scheduler.Registers) -> Form:
    """Among the multiply-adds of a column, one first that reads an odd and an even register: those behind it find the
    buffer in the reuse cache. Two of a kind are in one bank, and take a cycle more (``benchmarks.walking``).
    """
    source = code["source"][fmas]
    odd = registers.accumulators[code["target"][fmas]] ^ registers.buffers[source]
    starts = np.flatnonzero((np.diff(fmas, prepend=-1) != 1) | (np.diff(source, prepend=-1) != 0))
    numbers = np.arange(len(fmas))
    chosen = np.minimum.reduceat(np.where(odd & 1, numbers, len(fmas)), starts)
    found = chosen < len(fmas)
    order = numbers.copy()
    order[starts[found]], order[chosen[found]] = chosen[found], starts[found]
    moved = code.copy()
    moved[fmas] = code[fmas[order]]
    return moved


def _stores(
    form: Form, code: Form, stores: NDArray[np.intp], row_bytes: int, entry: _Entry, registers: scheduler.Registers
) -> list[tuple[int, Form]]:
    """Sets the stores; what moves their address from window to window, and before which."""
    place = code["target"][stores].astype(np.int64) * row_bytes
    window = (place + WINDOW_BYTES // 2) // WINDOW_BYTES
    form["op"][stores], form["bytes"][stores] = Opcode.STG, FLOAT_BYTES
    form["ra"][stores], form["ur"][stores] = entry.c, entry.descriptor
    form["offset"][stores] = place - window * WINDOW_BYTES
    form["rb"][stores] = registers.accumulators[code["source"][stores]]
    if not window.any():
        return []
    form["read_barrier"][stores] = _BARRIER_SCOREBOARD
    addresses.pause(form, stores[addresses.ADDRESSES_OUTSTANDING :: addresses.ADDRESSES_OUTSTANDING])
    steps = np.diff(window, prepend=0)
    addresses.raise_before(form, stores[steps != 0])
    return [
        (int(stores[at]), addresses.move(entry.c, entry.c, int(steps[at]) * WINDOW_BYTES))
        for at in np.flatnonzero(steps).tolist()
    ]


def _stages(code: Form, count: int, ring: Ring, entry: _Entry, odd: int) -> list[tuple[int, Form]]:
    """Every stage is waited for before its first element is read, and given back once its last one was used."""
    loads, fmas = (np.flatnonzero(code["op"] == op) for op in (Op.LOAD, Op.FMA))
    first = np.searchsorted(code["source"][loads] // ring.stage_rows, np.arange(count + 1))
    buffers = int(code["target"][loads].max()) + 1
    source = code["source"][fmas]
    used = source + buffers * ((np.searchsorted(loads, fmas) - source - 1) // buffers)  # the load that it reads
    done = np.searchsorted(used, first[1:])
    behind = int(fmas[-1]) + 1
    pieces = []
    for stage in range(count):
        slot, turn = stage % ring.stages, stage // ring.stages
        read = int(loads[first[stage]]) if first[stage] < len(loads) else behind
        last = int(fmas[done[stage] - 1]) + 1 if done[stage] else 0
        pieces.append((read, _wait(entry.ring, 8 * slot, odd if turn % 2 else RZ)))
        arrive = _one(Opcode.ARRIVE, ur=entry.ring, offset=8 * (ring.stages + slot), stall=2)
        arrive["predicate"], arrive["predicate_negated"] = entry.one, entry.negated
        pieces.append((max(read, last), arrive))
    return pieces


def _wait(ring: int, offset: int, parity: int) -> Form:
    """Tries until the barrier has left the phase of that parity."""
    tried = _one(Opcode.TRY_WAIT, ur=ring, offset=offset, rb=parity, carry=_DONE, stall=2)
    tried["write_barrier"] = _BARRIER_SCOREBOARD
    again = _one(Opcode.BRA, offset=-32, predicate=_DONE, predicate_negated=1, stall=5)
    again["wait"] = 1 << _BARRIER_SCOREBOARD
    return np.concatenate((tried, again))


def _one(op: Opcode, **fields: int) -> Form:
    form = blank(1)
    form["op"] = op
    for name, value in fields.items():
        form[name] = value
    return form


def _graft(head: bytes, parts: dict[str, bytes], code: MachineCode) -> bytes:
    """As ``toolchain.cubin.graft``, for another kind of entry."""
    text, info = parts[f".text.{NAME}"], parts[f".nv.info.{NAME}"]
    text += bytes(-len(text) % graft.LINE_BYTES)
    grown = text + encode(code.form, generation_of("sm_90")).astype("<u8").tobytes()
    table = (len(text) + 16 * code.starts[list(code.dispatch)]).astype("<u4").tobytes()
    exits = len(text) + 16 * np.flatnonzero(code.form["op"] == Opcode.EXIT)
    return rewrite(
        head,
        {
            f".text.{NAME}": grown,
            f".nv.constant2.{NAME}": table,
            f".nv.info.{NAME}": graft._kernel_info(info, code, exits, table),
            ".nv.info": graft._registers_set(parts[".nv.info"], max(code.registers, 24)),
            ".symtab": graft._size_set(head, parts, NAME, len(grown)),
            ".debug_frame": graft._frame_set(parts, len(grown)),
        },
    )
