"""Build hook of the wheel: compiles operators.cpp against PyTorch's stable ABI.

``python build_operators.py`` in this folder compiles it in place, for a checkout.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARY = HERE / "lospmm_torch" / "liblospmm_torch.so"

#: The lowest PyTorch that the library runs with: 2.10.0, as torch/headeronly/version.h writes it.
TARGET = "0x020a000000000000"

#: What GCC 12 on Debian 12 leaves asks for GLIBC_2.34 and GLIBCXX_3.4.29.
TAG = "py3-none-manylinux_2_34_x86_64"


def compile_operators() -> None:
    """Compile liblospmm_torch.so. Raises CalledProcessError, behind g++'s own message."""
    import torch

    home = Path(torch.__path__[0])
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TARGET}"]
    search = ["-isystem", str(home / "include"), f"-L{home / 'lib'}"]
    command = ["g++", *options, *search, "operators.cpp", "-o", str(LIBRARY), "-Wl,--no-as-needed", "-ltorch_cpu"]
    subprocess.run(command, cwd=HERE, check=True)


if __name__ == "__main__":
    compile_operators()
    sys.exit()

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: E402


class OperatorsHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the library before it is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and name the wheel for any Python and this platform."""
        compile_operators()
        build_data["tag"] = TAG
        build_data["pure_python"] = False
