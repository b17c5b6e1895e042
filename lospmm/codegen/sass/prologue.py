"""The PTX before the tiles: finds this thread's column, leaves if there is none, jumps to its tile.

ptxas compiles it once for each n, number of threads, and number of blocks that fetch a tile's code (``fetch``). Two
targets stand in for the tiles: they load and store through the registers that tiles will use (``Entry``), so that
``lospmm.toolchain.cubin`` can read which registers ptxas chose. If blocks share a tile, the prologue also tells the
cluster that this block has started.
"""

from collections.abc import Callable, Mapping, Sequence

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
        "%residual": epilogue.residual,
        "%padded": program.is_guarded,
        "%kept": program.walks > 1,
        "%fetched": sharers > 0,
    }
    shown = [name for name, is_asked in asked.items() if is_asked]
    targets = [line for index in range(TARGETS) for line in _target(index, shown, is_shared=is_shared)]
    registers = ".reg .f32 %value, %third;" if epilogue.residual else ".reg .f32 %value;"
    jump = (registers, f"targets: .branchtargets {names};", "brx.idx %tile, targets;")
    declared, meet = _SHARED_MEMORY[is_shared, program.walks > 1]
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

_MEET = (
    ".reg .b32 %mailbox;",
    ".reg .b64 %peers;",
    "mov.u32 %mailbox, mailbox;",
    "mad.lo.u32 %mailbox, %thread, 4, %mailbox;",
    "cvt.u64.u32 %peers, %mailbox;",
    "cvta.shared.u64 %peers, %peers;",
    "mapa.u64 %peers, %peers, 0;",
    "barrier.cluster.arrive.relaxed.aligned;",
)


_KEPT = (
    ".reg .b32 %kept;",
    "mov.u32 %kept, mailbox;",
    f"mad.lo.u32 %kept, %thread, {KEPT_BYTES}, %kept;",
)

#: By whether blocks share a tile, and whether threads walk it twice.
_SHARED_MEMORY: Mapping[tuple[bool, bool], tuple[tuple[str, ...], tuple[str, ...]]] = {
    (False, False): ((), ()),
    (True, False): (_MAILBOX, _MEET),
    (False, True): (_MAILBOX, _KEPT),
}

#: How far behind the first store of a target it stores what it finds at the residual's address, the bits of a
#: convolution's padding, and where code is fetched: so it is known which register holds which.
RESIDUAL_BYTES = 64
PADDED_BYTES = 128
FETCHED_BYTES = 192
KEPT_SHOWN_BYTES = 256


def _target(index: int, shown: Sequence[str], *, is_shared: bool) -> list[str]:
    at = 4 * index
    mail = [f"st.f32 [%peers+{at}], %value;", f"ld.shared.f32 %value, [%mailbox+{at}];"] if is_shared else []
    return [
        f"TARGET_{index}: ld.global.nc.L1::no_allocate.f32 %value, [%b+{at}];",
        *mail,
        f"st.global.L1::no_allocate.f32 [%c+{at}], %value;",
        *(line for name in shown for line in _SHOWN[name](at)),
        "exit;",
    ]


_SHOWN: Mapping[str, Callable[[int], tuple[str, ...]]] = {
    "%residual": lambda at: (
        f"ld.global.nc.L1::no_allocate.f32 %third, [%residual+{at}];",
        f"st.global.L1::no_allocate.f32 [%c+{at + RESIDUAL_BYTES}], %third;",
    ),
    "%padded": lambda at: (f"st.global.L1::no_allocate.b32 [%c+{at + PADDED_BYTES}], %padded;",),
    "%kept": lambda at: (f"st.global.L1::no_allocate.b32 [%c+{at + KEPT_SHOWN_BYTES}], %kept;",),
    "%fetched": lambda at: (f"st.global.L1::no_allocate.b32 [%c+{at + FETCHED_BYTES}], %fetched;",),
}
