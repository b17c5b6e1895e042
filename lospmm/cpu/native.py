"""A kernel compiled by g++ and run in a process of its own, so that a faulty one cannot harm lospmm."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import VerificationFailed
from lospmm.settings import settings
from lospmm.stages import Count
from lospmm.store import Store
from lospmm.toolchain import lifetime
from lospmm.toolchain.gxx import OPTIONS, compile_shared_library
from lospmm.toolchain.process import Finished, Limits, run

Arrays = Mapping[str, NDArray[Any] | None]

#: Of one run: a million multiply-adds of 64 columns take a second or two.
RUN_LIMITS = Limits(seconds=300.0, address_space_bytes=16 << 30)

#: Dots that the process writes in total.
_HUNDREDTHS = 100

_PROCESS = Path(__file__).with_name("native_process.py")


def run_native(
    texts: Sequence[str],
    header: str,
    entry: str,
    numbers: Iterable[int],
    arrays: Arrays,
    progress: Count,
    options: tuple[str, ...] = OPTIONS,
) -> Finished:
    """Call ``lospmm_run`` of the first text with ``entry`` of the last, and overwrite the array ``c``.

    The texts are compiled behind ``header``, a file of this folder. ``numbers`` and ``arrays`` are what
    native_process.py takes; ``progress`` is called with hundredths. Raises ToolchainFault if g++ is missing or fails.
    """
    front, store = Path(__file__).with_name(header).read_text(), Store(settings().cache_dir)
    libraries = [compile_shared_library(text, header=front, store=store, options=options) for text in texts]
    with lifetime.temporary_directory() as directory:
        for name, array in arrays.items():
            if array is not None:
                (directory / name).write_bytes(array.tobytes())
        names = [f"./{index}.so" for index in range(len(libraries))]  # paths, not names to search for
        for name, library in zip(names, libraries, strict=True):
            (directory / name).write_bytes(library)
        command = (sys.executable, "-I", str(_PROCESS), names[0], names[-1], entry, *map(str, numbers))
        finished = run(command, cwd=directory, limits=RUN_LIMITS, watch=lambda dots: progress(dots, _HUNDREDTHS))
        if finished.failure is None and (c := arrays["c"]) is not None:
            c[...] = np.fromfile(directory / "c", dtype=c.dtype).reshape(c.shape)
    return finished


def fault_of(entry: str, finished: Finished) -> VerificationFailed:
    """Return the error of a run that failed."""
    last_line = finished.stderr.strip().rpartition("\n")[2]
    return VerificationFailed(f"{entry} on the CPU: {finished.failure} {last_line}".strip())
