"""Discovery of a CUDA toolkit: a named one, an installed one, or that of this package's dependencies.

nvcc, ptxas and nvlink must lie together and be of one release: nvcc passes PTX to ptxas, and an older ptxas refuses
it.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

from lospmm.errors import BadSettings, ToolchainFault, Unsupported
from lospmm.settings import settings
from lospmm.toolchain import lifetime
from lospmm.toolchain.process import Limits, run

OLDEST = (12, 0)

#: Asking a tool for its version takes milliseconds; more means that it hangs.
PROBE_LIMITS = Limits(seconds=30.0, address_space_bytes=8 << 30)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The programs of a CUDA toolkit, its version and its targets."""

    nvcc: Path
    ptxas: Path
    nvlink: Path
    version: str  # "13.0.88"
    archs: frozenset[str]  # {"sm_75", "sm_80", ...}
    origin: str  # how it was found: LOSPMM_TOOLKIT, CUDA_HOME, CUDA_PATH, PATH, PyPI, or pathfinder (conda)


@cache
def find_toolkit() -> Toolkit:
    """Return the first usable toolkit of LOSPMM_TOOLKIT, CUDA_HOME, CUDA_PATH, PATH and PyPI.

    Raises BadSettings if LOSPMM_TOOLKIT names an unusable one, ToolchainFault if none is found.
    """
    refused = []
    for origin, directory in _places():
        try:
            return _toolkit(directory, origin)
        except ToolchainFault as error:
            if origin == "LOSPMM_TOOLKIT":  # asked for by name: never quietly replaced by another
                raise BadSettings(f"LOSPMM_TOOLKIT: {error}") from error
            refused.append(f"{origin}: {error}")
    todo = "pip install 'lospmm[tune]', or name one with LOSPMM_TOOLKIT"
    raise ToolchainFault(f"no CUDA toolkit of version 12.0 or newer: {todo}" + "".join(f"; {one}" for one in refused))


def check_toolkit() -> None:
    """Check LOSPMM_TOOLKIT, if it is set, at the start instead of at the first job. Raises BadSettings."""
    if settings().toolkit is not None:
        find_toolkit()


def has_arch(toolkit: Toolkit, arch: str) -> bool:
    """Return whether the toolkit can compile for ``arch``."""
    return f"sm_{_number(arch)}" in toolkit.archs


def check_arch(toolkit: Toolkit, arch: str) -> None:
    """Raise Unsupported, with a remedy, if the toolkit cannot compile for ``arch``."""
    if has_arch(toolkit, arch):
        return
    oldest = min(toolkit.archs, key=_number)
    problem = f"{arch} is not among the targets of CUDA {toolkit.version} ({toolkit.origin})"
    if _number(arch) < _number(oldest):
        older = "V100 (sm_70)" if arch == "sm_70" else arch
        raise Unsupported(
            f"{problem}, which begin at {oldest}: {older} needs a CUDA 12 toolkit; name one with LOSPMM_TOOLKIT, as in "
            "LOSPMM_TOOLKIT=/usr/local/cuda-12.8"
        )
    raise Unsupported(f"{problem}: it needs a newer toolkit; name one with LOSPMM_TOOLKIT")


@cache
def find_host_compiler() -> Path | None:
    """Return g++, nvcc's preprocessor and the CPU runtime's compiler, or None."""
    found = shutil.which("g++")
    return None if found is None else Path(found)


def required_host_compiler() -> Path:
    """Return g++. Raises ToolchainFault without it."""
    if (found := find_host_compiler()) is None:
        raise ToolchainFault(
            "kernels that keep A as data, and CUDA C++, run on a CPU by g++, which is not on PATH: install it, or "
            "tune with --verify none"
        )
    return found


@cache
def host_compiler_version(compiler: Path) -> str:
    """Return g++'s version line."""
    return _answer(compiler, "--version").partition("\n")[0]


def _places() -> Iterator[tuple[str, Path]]:
    """Yield (origin, directory of tools) of every place to look at, in order."""
    if settings().toolkit is not None:
        yield "LOSPMM_TOOLKIT", Path(str(settings().toolkit), "bin")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield variable, Path(root, "bin")
    if nvcc := shutil.which("nvcc"):
        yield "PATH", Path(nvcc).parent
        yield "PATH", Path(nvcc).resolve().parent  # the tool may be a link into a toolkit
    if nvcc := find_nvidia_binary_utility("nvcc"):
        yield "PyPI" if "site-packages" in nvcc else "pathfinder", Path(nvcc).parent


@cache
def _toolkit(directory: Path, origin: str) -> Toolkit:
    tools = [directory / name for name in ("nvcc", "ptxas", "nvlink")]
    for tool in tools:
        if not os.access(tool, os.X_OK):
            raise ToolchainFault(f"no {tool.name} in {directory}")
    nvcc, ptxas, nvlink = tools
    versions = [_version(tool) for tool in tools]
    releases = {tuple(int(part) for part in version.split(".")[:2]) for version in versions}
    if len(releases) > 1:
        raise ToolchainFault(f"the tools in {directory} are of different releases: {', '.join(versions)}")
    if min(releases) < OLDEST:
        raise ToolchainFault(f"CUDA {versions[0]} in {directory} is older than 12.0")
    archs = frozenset(_answer(nvcc, "--list-gpu-code").split())
    return Toolkit(nvcc, ptxas, nvlink, versions[0], archs, origin)


def _version(tool: Path) -> str:
    """Return the full version of an NVIDIA tool, like "13.0.88"."""
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _answer(tool, "--version"))
    if version is None:
        raise ToolchainFault(f"{tool} does not tell its version")
    return version[1]


def _answer(tool: Path, option: str) -> str:
    with lifetime.temporary_directory() as directory:
        finished = run([tool, option], cwd=directory, limits=PROBE_LIMITS)
    if finished.failure is not None:
        raise ToolchainFault(f"{tool} {option}: {finished.failure}", log=finished.stderr)
    return finished.stdout


def _number(arch: str) -> int:
    """Return 90 for "sm_90", and for "sm_90a", which every compiler for sm_90 supports."""
    digits = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    if digits is None:
        raise Unsupported(f"{arch!r} is not a GPU architecture like sm_90")
    return int(digits[1])
