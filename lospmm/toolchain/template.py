"""The compilation units of a packed kernel's template."""

from lospmm.codegen.emission import Emission
from lospmm.families.packed import DATA_ALIGNMENT_BYTES, PackedKernel


def emission_of(kernel: PackedKernel) -> Emission:
    """What compiles: its text, and the unit that defines its data; of one that is alone both in one."""
    units = (kernel.source + data_unit(),) if kernel.is_alone else (kernel.source, data_unit())
    return Emission("template", kernel.entry, kernel.source, units, data=kernel.data, is_specific=kernel.is_specific)


def data_unit() -> str:
    """The translation unit that defines the data; the linked kernel gets the true ones (``toolchain.data``)."""
    aligned = f"__align__({DATA_ALIGNMENT_BYTES})"
    return f'extern "C" {{ __device__ {aligned} unsigned char lospmm_data[{DATA_ALIGNMENT_BYTES}] = {{1}}; }}\n'
