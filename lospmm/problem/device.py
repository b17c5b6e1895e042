"""Properties of a GPU that the method needs, as data: ``DeviceSpec`` and the table of known GPUs.

To add a GPU, add a table to devices.toml with its public source, and a row to docs/devices.md; a user may also name a
file (``load_device``).
"""

import difflib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from lospmm.errors import BadRequest, system_errors


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


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of a GPU; ``throttled`` are the reasons of an SM clock below its maximum (``gpu.clocks.REASONS``)."""

    sm_mhz: int
    memory_mhz: int
    temperature_celsius: int
    throttled: tuple[str, ...]


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


_READ = tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))

#: The GPUs of devices.toml, by name.
DEVICES: Mapping[str, DeviceSpec] = {
    name: DeviceSpec(**{**_READ["every"], **_READ["arch"][own["arch"]], "name": name, **own})
    for name, own in _READ["device"].items()
}

#: Their names by those that the driver has for them.
DRIVER_NAMES: Mapping[str, str] = _READ["driver_names"]

_MAY_BE_ZERO = ("reserved_registers", "reserved_shared_bytes", "tf32_flops", "fp16_flops", "bf16_flops")

#: The default of interfaces without a GPU: most measurements were made on it.
USUAL_DEVICE = "h200"


def find_device(name: str) -> DeviceSpec:
    """Return the GPU of that name in ``DEVICES``, in any case, or of a device file if ``name`` ends in .toml.

    Raises BadRequest with the known names and close matches.
    """
    if not isinstance(name, str):
        raise BadRequest(f"device is of type {type(name).__name__}: give a name, or the path of a .toml file")
    if (known := known_device(name)) is not None:
        return known
    if name.endswith(".toml"):
        return load_device(Path(name))
    raise BadRequest(
        f"unknown device {name!r}{_close_matches(name, DEVICES)}: expected the path of a .toml file or one of "
        f"{', '.join(DEVICES)}"
    )


def known_device(name: str) -> DeviceSpec | None:
    """Return the GPU of that name in ``DEVICES``, in any case, if there is one."""
    return DEVICES.get(name.lower())


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
    defaults = {field.name: field.default for field in fields(DeviceSpec) if field.default is not MISSING}
    figures = {**defaults, **inherited, "name": path.stem, **given}
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
        with system_errors(BadRequest, f"{path}: cannot be read"):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad TOML and bad UTF-8 alike
        raise BadRequest(f"{path}: expected TOML: {error}") from None
