"""Properties of a GPU that the method needs, as data: ``DeviceSpec`` and the table of known GPUs.

To add a GPU, add a row to ``DEVICES`` with its public source, and to docs/devices.md; a user may also name a file
(``load_device``).
"""

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lospmm.errors import BadRequest


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. Counts are per whole GPU unless the name says per SM, block or thread."""

    name: str  # the name that --device takes
    title: str  # the vendor's product name
    arch: str  # "sm_90"
    sms: int  # streaming multiprocessors
    warp_size: int  # threads
    sub_partitions: int  # of an SM: each warp lives in one, with its share of the registers
    registers_per_thread: int  # the most a thread can address (255 on every GPU so far)
    registers_per_block: int
    registers_per_sm: int
    register_unit: int  # a thread's registers are allocated in multiples of this (256 a warp: 8 a thread)
    reserved_registers: int  # what a thread needs beside accumulators and buffers of B: addresses, the ABI, slack
    threads_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # the most a block may ask for (with the opt-in)
    shared_unit_bytes: int  # a block's shared memory is allocated in multiples of this
    reserved_shared_bytes: int  # what the runtime keeps of each block's shared memory: Constant of Equation 6
    l2_bytes: int
    peak_flops: float  # fp32, two operations per multiply-add, at boost clock, per second
    memory_bandwidth: float  # bytes per second
    clock_hz: float  # boost
    source: str  # where the figures are published
    # Dense tensor cores with sums in fp32, as peak_flops; 0 where there are none that take this type.
    tf32_flops: float = 0.0
    fp16_flops: float = 0.0
    bf16_flops: float = 0.0

    @property
    def arch_number(self) -> int:
        """Compute capability as a number: 90 for sm_90 and for sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    def sms_of_clusters(self, blocks: int) -> int:
        """Return how many SMs clusters of so many blocks can fill, one block an SM, scaled from an H200."""
        return max(self.sms * _CLUSTERED_SMS[blocks] // _CLUSTERED_SMS[1], 1)


#: Of an H200's 132 SMs: 30 clusters of 4 and 15 of 8 run at a time (fitting/clusters.py), as its parts (GPCs) have
#: no whole number of them.
_CLUSTERED_SMS = {1: 132, 2: 132, 4: 120, 8: 120}


class Check(NamedTuple):
    """A condition on the figures of one GPU, and the key that a violation is reported under."""

    key: str
    expected: str
    holds: Callable[[DeviceSpec], bool]


CHECKS: tuple[Check, ...] = (
    Check("arch", 'sm_ and a number, as in "sm_90" or "sm_90a"', lambda d: bool(re.fullmatch(r"sm_\d{2,3}a?", d.arch))),
    Check("threads_per_block", "at most threads_per_sm", lambda d: d.threads_per_block <= d.threads_per_sm),
    Check("threads_per_block", "a multiple of warp_size", lambda d: d.threads_per_block % d.warp_size == 0),
    Check("threads_per_sm", "a multiple of warp_size", lambda d: d.threads_per_sm % d.warp_size == 0),
    Check("registers_per_block", "at most registers_per_sm", lambda d: d.registers_per_block <= d.registers_per_sm),
    Check("reserved_registers", "below registers_per_thread", lambda d: d.reserved_registers < d.registers_per_thread),
    Check(
        "shared_bytes_per_block",
        "at most shared_bytes_per_sm less reserved_shared_bytes",
        lambda d: d.shared_bytes_per_block <= d.shared_bytes_per_sm - d.reserved_shared_bytes,
    ),
)

_KIB = 1024

_MIB = 1024 * _KIB

#: Measured with ptxas 13.0: a kernel limited to its accumulators, its buffers of B and this many more does not spill.
RESERVED_REGISTERS = 16

# One table per compute capability: CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute Capability".
# The units of allocation are those of NVIDIA's occupancy calculator (cuda_occupancy.h of CUDA 13.0).
_GPU = partial(
    DeviceSpec,
    warp_size=32,
    registers_per_thread=255,
    registers_per_block=64 * _KIB,
    registers_per_sm=64 * _KIB,
    register_unit=8,
    reserved_registers=RESERVED_REGISTERS,
    threads_per_block=1024,
    sub_partitions=4,
)

_BEFORE_SM_80 = partial(_GPU, shared_unit_bytes=256, reserved_shared_bytes=0)

_FROM_SM_80 = partial(_GPU, shared_unit_bytes=128, reserved_shared_bytes=1 * _KIB)

_SM_70 = partial(
    _BEFORE_SM_80,
    arch="sm_70",
    threads_per_sm=2048,
    blocks_per_sm=32,
    shared_bytes_per_sm=96 * _KIB,
    shared_bytes_per_block=96 * _KIB,
)

_SM_75 = partial(
    _BEFORE_SM_80,
    arch="sm_75",
    threads_per_sm=1024,
    blocks_per_sm=16,
    shared_bytes_per_sm=64 * _KIB,
    shared_bytes_per_block=64 * _KIB,
)

_SM_80 = partial(
    _FROM_SM_80,
    arch="sm_80",
    threads_per_sm=2048,
    blocks_per_sm=32,
    shared_bytes_per_sm=164 * _KIB,
    shared_bytes_per_block=163 * _KIB,
)

_SM_86 = partial(
    _FROM_SM_80,
    arch="sm_86",
    threads_per_sm=1536,
    blocks_per_sm=16,
    shared_bytes_per_sm=100 * _KIB,
    shared_bytes_per_block=99 * _KIB,
)

_SM_89 = partial(
    _FROM_SM_80,
    arch="sm_89",
    threads_per_sm=1536,
    blocks_per_sm=24,
    shared_bytes_per_sm=100 * _KIB,
    shared_bytes_per_block=99 * _KIB,
)

_SM_90 = partial(
    _FROM_SM_80,
    arch="sm_90",
    threads_per_sm=2048,
    blocks_per_sm=32,
    shared_bytes_per_sm=228 * _KIB,
    shared_bytes_per_block=227 * _KIB,
)

_SM_100 = partial(_SM_90, arch="sm_100")  # the same limits as Hopper's: Blackwell Tuning Guide 1.4.1.1 and 1.4.2.3

# One table per product. Bandwidth and peak are decimal, as vendors print them; cache sizes are binary.
DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        _SM_70(
            name="v100",
            title="Tesla V100 SXM2 16GB",
            sms=80,
            l2_bytes=6 * _MIB,
            peak_flops=15.7e12,
            memory_bandwidth=900e9,
            clock_hz=1530e6,
            fp16_flops=125e12,
            source="NVIDIA Tesla V100 GPU Architecture whitepaper (WP-08608), Table 1",
        ),
        _SM_75(
            name="rtx2080ti",
            title="GeForce RTX 2080 Ti",
            sms=68,
            l2_bytes=5632 * _KIB,
            peak_flops=13.4e12,
            memory_bandwidth=616e9,
            clock_hz=1545e6,
            fp16_flops=53.8e12,
            source="NVIDIA Turing GPU Architecture whitepaper (WP-09183), Table 1, reference card",
        ),
        _SM_80(
            name="a100",
            title="A100 SXM4 80GB",
            sms=108,
            l2_bytes=40 * _MIB,
            peak_flops=19.5e12,
            memory_bandwidth=2039e9,
            clock_hz=1410e6,
            tf32_flops=156e12,
            fp16_flops=312e12,
            bf16_flops=312e12,
            source="NVIDIA A100 Tensor Core GPU Architecture whitepaper; A100 80GB datasheet for the bandwidth",
        ),
        _SM_86(
            name="rtx3090",
            title="GeForce RTX 3090",
            sms=82,
            l2_bytes=6 * _MIB,
            peak_flops=35.6e12,
            memory_bandwidth=936e9,
            clock_hz=1695e6,
            tf32_flops=35.6e12,
            fp16_flops=71e12,
            bf16_flops=71e12,
            source="NVIDIA Ampere GA102 GPU Architecture whitepaper, table of the GeForce RTX 3090",
        ),
        _SM_89(
            name="l40s",
            title="L40S",
            sms=142,
            l2_bytes=96 * _MIB,
            peak_flops=91.6e12,
            memory_bandwidth=864e9,
            clock_hz=2520e6,
            tf32_flops=183e12,
            fp16_flops=362e12,
            bf16_flops=362e12,
            source="NVIDIA L40S datasheet and product brief; Ada Tuning Guide 1.4.2.1 for the L2 of AD102",
        ),
        _SM_89(
            name="rtx4090",
            title="GeForce RTX 4090",
            sms=128,
            l2_bytes=72 * _MIB,
            peak_flops=82.6e12,
            memory_bandwidth=1008e9,
            clock_hz=2520e6,
            tf32_flops=82.6e12,
            fp16_flops=165.2e12,
            bf16_flops=165.2e12,
            source="NVIDIA Ada GPU Architecture whitepaper, Appendix A",
        ),
        _SM_90(
            name="h100",
            title="H100 SXM5 80GB",
            sms=132,
            l2_bytes=50 * _MIB,
            peak_flops=66.9e12,
            memory_bandwidth=3352e9,
            clock_hz=1980e6,
            tf32_flops=494.7e12,
            fp16_flops=989.4e12,
            bf16_flops=989.4e12,
            source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, comparison of A100 and H100",
        ),
        _SM_90(
            name="h100-pcie",
            title="H100 PCIe 80GB",
            sms=114,
            l2_bytes=50 * _MIB,
            peak_flops=51.2e12,
            memory_bandwidth=2039e9,
            clock_hz=1755e6,
            tf32_flops=378e12,
            fp16_flops=756e12,
            bf16_flops=756e12,
            source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, comparison of A100 and H100",
        ),
        _SM_90(
            name="h200",
            title="H200 SXM 141GB",
            sms=132,
            l2_bytes=60 * _MIB,  # the whole L2 of GH100: an H100 has 5 of its 6 memory stacks and 50 MiB, an H200 all 6
            peak_flops=66.9e12,
            memory_bandwidth=4.8e12,
            clock_hz=1980e6,
            tf32_flops=494.7e12,
            fp16_flops=989.4e12,
            bf16_flops=989.4e12,
            source="NVIDIA H200 datasheet; H100 whitepaper for the L2 of GH100; SMs, clock and L2: the driver",
        ),
        _SM_100(
            name="b200",
            title="B200 SXM 180GB",
            sms=148,
            l2_bytes=126 * _MIB,
            peak_flops=75e12,
            memory_bandwidth=8e12,
            clock_hz=1980e6,  # not published: computed from the published peak on 148 SMs
            tf32_flops=1125e12,
            fp16_flops=2250e12,
            bf16_flops=2250e12,
            source="NVIDIA HGX B200 and DGX B200 datasheets; Blackwell Tuning Guide 1.4.2.2 for L2; SMs: the driver",
        ),
    )
}

_MAY_BE_ZERO = ("reserved_registers", "reserved_shared_bytes", "tf32_flops", "fp16_flops", "bf16_flops")

#: The default of interfaces without a GPU: most measurements were made on it.
USUAL_DEVICE = "h200"


def find_device(name: str) -> DeviceSpec:
    """Return the GPU of that name in ``DEVICES``, or of a device file if ``name`` ends in .toml.

    Raises BadRequest with the known names and close matches.
    """
    if not isinstance(name, str):
        raise BadRequest(f"device is of type {type(name).__name__}: give a name, or the path of a .toml file")
    if name in DEVICES:
        return DEVICES[name]
    if name.endswith(".toml"):
        return load_device(Path(name))
    raise BadRequest(
        f"unknown device {name!r}{_close_matches(name, DEVICES)}: expected the path of a .toml file or one of "
        f"{', '.join(DEVICES)}"
    )


def load_device(path: Path) -> DeviceSpec:
    """Read a GPU from a TOML file: all fields of ``DeviceSpec``, or a ``base`` and the fields that differ.

    Without ``name`` the GPU is named after the file. Raises BadRequest with the file, the key and what is expected.
    """
    given = read_toml(path)
    inherited = _inherited(path, given.pop("base")) if "base" in given else {}
    kinds = {field.name: field.type for field in fields(DeviceSpec)}
    for key in given:
        if key not in kinds:
            raise BadRequest(
                f"{path}: unknown key {key!r}{_close_matches(key, kinds)}: expected base or one of {', '.join(kinds)}"
            )
    figures = {**inherited, "name": path.stem, **given}
    defaults = {field.name: field.default for field in fields(DeviceSpec) if field.default is not MISSING}
    figures = {**defaults, **figures}
    missing = [key for key in kinds if key not in figures]
    if missing:
        raise BadRequest(f"{path}: expected also {', '.join(missing)}, or a base to take them from")
    device = DeviceSpec(**{key: _checked(path, key, kind, figures[key]) for key, kind in kinds.items()})
    for check in CHECKS:
        if not check.holds(device):
            raise BadRequest(f"{path}: {check.key} = {getattr(device, check.key)!r}: expected {check.expected}")
    return device


def _inherited(path: Path, base: object) -> dict[str, Any]:
    if not isinstance(base, str) or base not in DEVICES:
        close = _close_matches(str(base), DEVICES)
        raise BadRequest(f"{path}: base = {base!r}{close}: expected one of {', '.join(DEVICES)}")
    return asdict(DEVICES[base])


def _checked(path: Path, key: str, kind: object, value: object) -> Any:
    """Return ``value`` as a figure of type ``kind``. Raises BadRequest if it has another type or sign."""
    if kind is str:
        expected = "a text that is not empty"
        if isinstance(value, str) and value:
            return value
    elif kind is int:
        least = 0 if key in _MAY_BE_ZERO else 1
        expected = f"a whole number of at least {least}"
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
    else:
        expected = "a number that is not negative" if key in _MAY_BE_ZERO else "a number above zero"
        lowest = 0.0 if key in _MAY_BE_ZERO else sys.float_info.min
        if isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= sys.float_info.max:
            return float(value)
    raise BadRequest(f"{path}: {key} = {value!r}: expected {expected}")


def _close_matches(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(known))
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises BadRequest if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad TOML and bad UTF-8 alike
        raise BadRequest(f"{path}: expected TOML: {error}") from None
