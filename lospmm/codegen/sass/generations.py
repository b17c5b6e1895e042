"""Instruction tables of each GPU generation: one row per instruction that our machine code uses.

The bits were read off what ptxas 13.0 writes and nvdisasm prints; tests/toolchain/test_sass_encoding.py compares them
with both.
"""

from lospmm.codegen.sass.fields import Bits, Generation, Row
from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.errors import Unsupported

_RD = Bits("rd", ((16, 8),))
_RA = Bits("ra", ((24, 8),))
_RB = Bits("rb", ((32, 8),))
_RC = Bits("rc", ((64, 8),))
_IMMEDIATE = Bits("immediate", ((32, 32),))
_OFFSET = Bits("offset", ((40, 24),), signed=True)
_BYTES = Bits("bytes", ((73, 3),), codes=((4, 4), (8, 5), (16, 6)))
_BYTES_OF_GLOBAL = Bits("bytes", ((73, 3),), codes=((2, 2), (4, 4), (8, 5), (16, 6)))
_UR_OF_LOAD = Bits("ur", ((32, 6),))
_UR_OF_STORE = Bits("ur", ((64, 6),))


def _none(name: str, low: int) -> Bits:
    """Return the field of a register that an instruction could name and here never does: R255."""
    return Bits(name, ((low, 8),), codes=((RZ, RZ),))


#: The scoreboards of what writes no register.
_READ = ("read_barrier",)

#: Bits that select the read-only path (LDG), a descriptor (LDG, STG), and the scope of a cache line.
_LDG_HIGH = 0x0C5E9100
_TOUCH_HIGH = 0x0C1E9900
_STG_HIGH = 0x0C501100

#: What blocks of a cluster need to share what they have.
_CLUSTERS = (
    Row(
        Opcode.STAS, 0xDBD, 0x0C00003F, (_RA, _RB, _OFFSET, _BYTES), "STAS{size} [{ra}.64{offset}], {rb}",
        pairs=("ra",), data="rb", barriers=_READ,
    ),
    Row(
        Opcode.EXPECT, 0x9A7, 0x0800003F, (_none("rd", 16), _RA, _RB, _OFFSET),
        "SYNCS.ARRIVE.TRANS64 RZ, [{barrier}], {rb}", barriers=_READ,
    ),
    Row(
        Opcode.AWAIT, 0x5A7, 0x0800017F, (_RA, _RB, _OFFSET, Bits("carry", ((81, 3),))),
        "SYNCS.PHASECHK.TRANS64.TRYWAIT {predicate}, [{barrier}], {rb}",
    ),
    Row(Opcode.CLUSTER_WAIT, 0xDC7, 0x08000000, (), "UCGABAR_WAIT", barriers=(), guarded=False),
)  # fmt: skip

#: Two 16-bit numbers at a time.
_HALVES = tuple(
    Row(op, opcode, high, (_RD, _RA, _IMMEDIATE, _RC), f"{name} {{rd}}, {{ra}}, {{{kind}}}, {{rc}}", reuse=0b101)
    for op, opcode, high, name, kind in (
        (Opcode.HFMA2_IMM, 0x831, 0, "HFMA2", "halves"),
        (Opcode.HFMA2_BF16_IMM, 0x831, 0x200000, "HFMA2.BF16_V2", "bfloats"),
    )
)

#: From 16-bit numbers to float32 and back.
_CONVERSIONS = (
    Row(
        Opcode.HADD2_F32, 0x230, 0x4100,
        (_RD, _none("ra", 24), _RB, Bits("immediate", ((60, 2),), codes=((0, 2), (1, 3)))),
        "HADD2.F32 {rd}, -RZ, {rb}.{part}",
    ),
    Row(Opcode.SHF_L, 0x819, 0x600, (_RD, _RA, _IMMEDIATE, _none("rc", 64)), "SHF.L.U32 {rd}, {ra}, {hex}, RZ"),
    Row(Opcode.PRMT, 0x816, 0, (_RD, _RA, _IMMEDIATE, _none("rc", 64)), "PRMT {rd}, {ra}, {hex}, RZ"),
    Row(Opcode.F2FP_F16, 0x23E, 0, (_RD, _RA, _RB, _none("rc", 64)), "F2FP.F16.F32.PACK_AB {rd}, {ra}, {rb}"),
    Row(Opcode.F2FP_BF16, 0x23E, 0x1000, (_RD, _RA, _RB, _none("rc", 64)), "F2FP.BF16.F32.PACK_AB {rd}, {ra}, {rb}"),
)  # fmt: skip

#: What is loaded of code, to be in the caches: as ptxas loads what others may need again, into no register.
_CODE = (
    Row(Opcode.LEPC, 0x34E, 0, (_RD,), "LEPC {rd}", pairs=("rd",), barriers=()),
    Row(
        Opcode.TOUCH, 0x981, _TOUCH_HIGH, (_none("rd", 16), _RA, _UR_OF_LOAD, _OFFSET),
        "LDG.E.CONSTANT RZ, desc[{ur}][{ra}.64{offset}]", pairs=("ra", "ur"),
    ),
)  # fmt: skip

_SM_90 = (
    Row(Opcode.FFMA_IMM, 0x823, 0, (_RD, _RA, _IMMEDIATE, _RC), "FFMA {rd}, {ra}, {float}, {rc}", reuse=0b101),
    Row(
        Opcode.LDG, 0x981, _LDG_HIGH, (_RD, _RA, _UR_OF_LOAD, _OFFSET, _BYTES_OF_GLOBAL),
        "LDG.E.NA{size}.CONSTANT {rd}, desc[{ur}][{ra}.64{offset}]", pairs=("ra", "ur"), data="rd",
    ),
    Row(
        Opcode.STG, 0x986, _STG_HIGH, (_RA, _RB, _UR_OF_STORE, _OFFSET, _BYTES_OF_GLOBAL),
        "STG.E.NA{size} desc[{ur}][{ra}.64{offset}], {rb}", pairs=("ra", "ur"), data="rb",
        barriers=_READ,
    ),
    Row(Opcode.LDS, 0x984, 0, (_RD, _RA, _OFFSET, _BYTES), "LDS{size} {rd}, [{shared}]", data="rd"),
    Row(Opcode.STS, 0x388, 0, (_RA, _RB, _OFFSET, _BYTES), "STS{size} [{shared}], {rb}", data="rb", barriers=_READ),
    Row(Opcode.MOV_IMM, 0x802, 0xF00, (_RD, _IMMEDIATE), "MOV {rd}, {hex}"),
    Row(
        Opcode.IADD3, 0x810, 0x07F1E000, (_RD, _RA, _IMMEDIATE, _RC, Bits("carry", ((81, 3),))),
        "IADD3 {rd}, {carry}{ra}, {signed}, {rc}", reuse=0b101,
    ),
    Row(
        Opcode.IADD3_X, 0x810, 0x007FE400, (_RD, _RA, _IMMEDIATE, _RC, Bits("carry", ((87, 3),))),
        "IADD3.X {rd}, {ra}, {signed}, {rc}, {predicate}, !PT", reuse=0b101,
    ),
    Row(Opcode.FADD_IMM, 0x421, 0, (_RD, _RA, _IMMEDIATE), "FADD {rd}, {ra}, {float}", reuse=0b001),
    Row(Opcode.FMNMX_NAN, 0x209, 0x07820000, (_RD, _RA, _RB), "FMNMX.NAN {rd}, {ra}, {rb}, !PT", reuse=0b011),
    Row(
        Opcode.LOP3_TEST, 0x812, 0x0780C000, (_RD, _RA, _IMMEDIATE, _RC, Bits("carry", ((81, 3),))),
        "LOP3.LUT {carry}{rd}, {ra}, {hex}, {rc}, 0xc0, !PT", reuse=0b101,
    ),
    Row(Opcode.EXIT, 0x94D, 0x03800000, (), "EXIT", barriers=()),
    Row(Opcode.NOP, 0x918, 0, (), "NOP"),
    Row(
        Opcode.BRA, 0x947, 0x03800000,
        (Bits("offset", ((16, 8), (34, 30), (64, 18)), dropped=2, step=16, signed=True),), "BRA {target}", barriers=(),
    ),
    *_HALVES,
    *_CONVERSIONS,
    *_CLUSTERS,
    *_CODE,
)  # fmt: skip

GENERATIONS = {generation.arch: generation for generation in (Generation("sm_90", _SM_90),)}


def generation_of(arch: str) -> Generation:
    """Return the instructions of ``arch``. Raises Unsupported for an architecture without a table."""
    if arch not in GENERATIONS:
        raise Unsupported(f"machine code for {arch}: known are {', '.join(GENERATIONS)}; use --emitter ptx")
    return GENERATIONS[arch]
