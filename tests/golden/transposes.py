"""The compiled transposes of ``lospmm.nn``, shipped so that whoever runs a saved model needs no compiler.

``make golden`` compiles them anew: machine code for each major version of the device table's GPUs (that of sm_80 runs
on sm_86 and sm_89), and PTX that a driver compiles for later ones.
"""

from pathlib import Path

from lospmm import gpu
from lospmm.toolchain import lifetime
from lospmm.toolchain.discover import find_host_compiler, find_toolkit
from lospmm.toolchain.process import compile_limits, run

FATBIN = Path(gpu.__path__[0], "transpose.fatbin")
ARCHS = ("75", "80", "90", "100")
REGISTERS = 40  # of a thread, so that six blocks of 256 fit on an SM


def compiled() -> bytes:
    """The same bytes each time: they name no folder and no time."""
    toolkit, host = find_toolkit(), find_host_compiler()
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    options = (*archs, f"-gencode=arch=compute_{ARCHS[0]},code=compute_{ARCHS[0]}", f"-maxrregcount={REGISTERS}")
    with lifetime.temporary_directory() as folder:
        (folder / "transpose.cu").write_bytes(FATBIN.with_suffix(".cu").read_bytes())
        command = (toolkit.nvcc, "-ccbin", host, "-allow-unsupported-compiler", "-fatbin", *options)
        finished = run((*command, "transpose.cu", "-o", "transpose.fatbin"), cwd=folder, limits=compile_limits())
        assert finished.failure is None, finished.stderr
        return (folder / "transpose.fatbin").read_bytes()


def renew() -> None:
    FATBIN.write_bytes(compiled())
