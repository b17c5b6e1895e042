"""The PTX before the tiles: finds this thread's column, leaves if there is none, jumps to its tile.

ptxas compiles it once for each n, number of threads, and number of blocks that fetch a tile's code (``fetch``). Two
targets stand in for the tiles: they load and store through the registers that tiles will use (``Entry``), so that
``lospmm.toolchain.cubin`` can read which registers ptxas chose. If blocks share a tile, the prologue also tells the
cluster that this block has started.
"""

from collections.abc import Sequence

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.ptx import entry_head, version_of
from lospmm.codegen.sass.machine import TOUCHED_BYTES
from lospmm.space.walks import KEPT_BYTES

#: Targets after the jump, in ptxas's order: each does one load and one store and exits.
TARGETS = 2

#: The oldest PTX that lets a block announce itself to its cluster without a fence (PTX ISA, barrier.cluster).
CLUSTER_VERSION = "8.0"


def prologue(program: KernelProgram, arch: str, *, sharers: int = 0) -> str:
    """Return the prologue as PTX for ``arch``. Raises Unsupported if no PTX version is known for it.

    With ``sharers`` it also computes where a thread begins to fetch its tile's code, which so many blocks share.
    """
    is_shared, epilogue = program.split_k > 1, program.epilogue
    version = CLUSTER_VERSION if is_shared else version_of(arch)
    header = f".version {version}\n.target {arch}\n.address_size 64\n"
    names = ", ".join(f"TARGET_{index}" for index in range(TARGETS))
    asked = {
        "residual": epilogue.residual,
        "padded": program.is_guarded,
        "kept": program.walks > 1,
        "fetched": sharers > 0,
        "peers": is_shared,
        "slot_bytes": is_shared,
    }
    shown = [name for name, is_asked in asked.items() if is_asked]
    targets = [line for index in range(TARGETS) for line in _target(index, shown)]
    registers = ".reg .f32 %value, %third;" if epilogue.residual else ".reg .f32 %value;"
    jump = (registers, f"targets: .branchtargets {names};", "brx.idx %tile, targets;")
    declared = _MAILBOX if is_shared or program.walks > 1 else ()
    meet = _meeting(program) if is_shared else _KEPT if program.walks > 1 else ()
    begin = _begin(program, sharers) if sharers else ()
    return "\n".join((header, *declared, *entry_head(program), *begin, *meet, *jump, *targets, "}\n"))


def _begin(program: KernelProgram, sharers: int) -> Sequence[str]:
    """Return the statements that set %fetched: one piece of code a thread of the sharing blocks."""
    own = (
        f"and.b32 %fetched, %member, {sharers - 1};",
        f"mad.lo.u32 %fetched, %fetched, {program.cols}, %thread;",
        f"mul.lo.u32 %fetched, %fetched, {TOUCHED_BYTES};",
    )
    alone = (f"mul.lo.u32 %fetched, %thread, {TOUCHED_BYTES};",)
    return (".reg .b32 %fetched;", *(own if sharers > 1 else alone))


_MAILBOX = (".extern .shared .align 16 .b8 mailbox[];",)


def _meeting(program: KernelProgram) -> Sequence[str]:
    """Return the statements that make the block's barrier, and say where mailboxes are and how long a slot is.

    The barrier opens once the first thread has told it the bytes that come, and they have.
    """
    return (
        ".reg .pred %first;",
        ".reg .b32 %mailbox, %own, %slot_bytes;",
        ".reg .b64 %peers;",
        "setp.eq.u32 %first, %thread, 0;",
        "mov.u32 %mailbox, mailbox;",
        "@%first mbarrier.init.shared.b64 [%mailbox], 1;",
        "@%first fence.mbarrier_init.release.cluster;",
        "mapa.shared::cluster.u32 %mailbox, %mailbox, 0;",
        "mad.lo.u32 %own, %thread, 4, %mailbox;",
        "mov.b64 %peers, {%own, %mailbox};",
        "sub.u32 %slot_bytes, %n, %column;",
        f"min.u32 %slot_bytes, %slot_bytes, {program.cols};",
        "shl.b32 %slot_bytes, %slot_bytes, 2;",
        "selp.b32 %slot_bytes, %slot_bytes, 0, %first;",
        "barrier.cluster.arrive.relaxed.aligned;",
    )


_KEPT = (
    ".reg .b32 %kept;",
    "mov.u32 %kept, mailbox;",
    f"mad.lo.u32 %kept, %thread, {KEPT_BYTES}, %kept;",
)

#: How far behind the first store of a target it stores a register or pair, by its name in ``EntryRegisters`` (of the
#: residual what it finds there): so it is known which register holds which.
SHOWN_BYTES = {"residual": 64, "padded": 128, "fetched": 192, "kept": 256, "slot_bytes": 320, "peers": 384}


def _target(index: int, shown: Sequence[str]) -> list[str]:
    at = 4 * index
    lines = [
        f"TARGET_{index}: ld.global.nc.L1::no_allocate.f32 %value, [%b+{at}];",
        f"st.global.L1::no_allocate.f32 [%c+{at}], %value;",
    ]
    for name in shown:
        behind, size = SHOWN_BYTES[name], 8 if name == "peers" else 4
        value = f"%{name}"
        if name == "residual":
            lines.append(f"ld.global.nc.L1::no_allocate.f32 %third, [%residual+{at}];")
            value = "%third"
        lines.append(f"st.global.L1::no_allocate.b{8 * size} [%c+{behind + size * index}], {value};")
    return [*lines, "exit;"]
