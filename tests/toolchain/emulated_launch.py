"""A launch of ``emulated_driver.c``: C of the B in EMULATED_FOLDER, by the machine code of the cubin that was loaded.

python -m tests.toolchain.emulated_launch CUBIN ENTRY GRID_X GRID_Y GRID_Z BLOCK SHARED_BYTES fails where the launch is
not that of the manifest beside the cubin.
"""

import os
import sys
from pathlib import Path

import numpy as np

import lospmm


def main(cubin: str, entry: str, *sizes: str) -> None:
    kernel, folder = lospmm.load(Path(cubin).parent), Path(os.environ["EMULATED_FOLDER"])
    manifest = kernel.manifest
    launch = manifest["launch"]
    expected = (*launch["grid"], launch["block"], launch["shared_bytes"])
    if (entry, tuple(map(int, sizes))) != (manifest["name"], expected):
        sys.exit(f"launched {entry} with {sizes}, its manifest has {manifest['name']} with {expected}")
    b = np.fromfile(folder / "b", dtype=np.float32).reshape(manifest["k"], manifest["n"])
    kernel.run_on_cpu(b).tofile(folder / "c")


if __name__ == "__main__":
    main(*sys.argv[1:])
