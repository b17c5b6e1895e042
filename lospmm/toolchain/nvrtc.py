"""Command-line compiler around NVRTC, for CUDA C++ without a host compiler for nvcc.

Run by path, as ``python -P nvrtc.py OPTION... UNIT.cu -o UNIT.o`` or with ``--version`` alone: a process like every
other compiler, with its limits. It imports nothing of lospmm, so that it starts quickly. The code is the same as
nvcc's: both call the same compiler and the same ptxas.
"""

import sys
from pathlib import Path

from cuda.bindings import nvrtc


def version() -> str:
    """Return NVRTC's version."""
    result, major, minor = nvrtc.nvrtcVersion()
    _check(result)
    return f"{major}.{minor}"


def compile_file(source: Path, target: Path, options: list[str]) -> bool:
    """Write the object, and the compiler's log to stderr; return False if the text does not compile."""
    result, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    _check(result)
    (compiled,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    result, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(result)
    log = bytearray(size)
    _check(*nvrtc.nvrtcGetProgramLog(program, log))
    sys.stderr.write(log.rstrip(b"\0").decode(errors="replace"))
    if compiled != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return False
    result, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(result)
    image = bytearray(size)
    _check(*nvrtc.nvrtcGetCUBIN(program, image))
    target.write_bytes(image)
    return True


def _check(result: nvrtc.nvrtcResult) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SystemExit(f"nvrtc error: {result.name}")


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit status."""
    if arguments == ["--version"]:
        print(version())
        return 0
    *options, source, _, target = arguments
    return 0 if compile_file(Path(source), Path(target), options) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
