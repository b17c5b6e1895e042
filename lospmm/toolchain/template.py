"""Compilation units of packed kernels' templates."""

from collections.abc import Sequence

from lospmm.codegen.emission import Emission
from lospmm.families.packed import DATA_ALIGNMENT_BYTES, PackedKernel, joined_source, tokens_first

#: Registers that a kernel may need more if it writes C (n, m), and the least of one whose warps trade registers.
_MORE_REGISTERS, _TRADED_REGISTERS = 8, 128


def emission_of(kernel: PackedKernel) -> Emission:
    """Return a packed kernel's emission: its text and the unit of its data, or both in one if it is alone."""
    units = (kernel.source + data_unit(),) if kernel.is_alone else (kernel.source, data_unit())
    return Emission("template", kernel.entry, kernel.source, units, data=kernel.data, is_specific=kernel.is_specific)


def joined_emission(kernels: Sequence[tuple[str, str, int]], data: bytes, *, is_specific: bool) -> Emission:
    """Return the emission of several kernels that read ``data``; ``kernels`` as in ``joined_source``.

    Those of templates that can have others beside them that write C (n, m).
    """
    parts = []
    for entry, source, registers in kernels:
        parts.append((entry, source, registers))
        if (other := tokens_first(entry, source)) is not None:
            parts.append((*other, registers + (_MORE_REGISTERS if registers < _TRADED_REGISTERS else 0)))
    text = joined_source(parts)
    return Emission("template", kernels[0][0], text, (text + data_unit(),), data=data, is_specific=is_specific)


def data_unit() -> str:
    """Return the translation unit that declares the data; ``toolchain.data`` replaces them after linking."""
    aligned = f"__align__({DATA_ALIGNMENT_BYTES})"
    return f'extern "C" {{ __device__ {aligned} unsigned char lospmm_data[{DATA_ALIGNMENT_BYTES}] = {{1}}; }}\n'
