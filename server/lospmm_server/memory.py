"""Memory of the process that takes uploads: returned to the system after each."""

import ctypes
import traceback

#: glibc's mallopt, malloc.h: blocks from this size on are mapped separately, and unmapped when they are freed.
_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have every large block of this process returned to the system once it is freed.

    Otherwise glibc raises the threshold with the first one that is freed, up to 32 MiB, and a thread's upload stays
    in the heap of that thread: hundreds of megabytes after a few. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, which would keep a whole upload in memory.

    The error stays in a reference cycle until it is collected, and the next upload would be in memory too.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
