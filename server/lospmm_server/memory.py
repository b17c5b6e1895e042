"""What the process that takes uploads keeps of their memory: nothing."""

import ctypes
import traceback

#: glibc's mallopt, malloc.h: blocks of so many bytes are mapped on their own, and go back when they are freed.
_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have every large block of this process returned to the system once it is freed.

    Else glibc raises the limit with the first one that is freed, up to 32 MiB, and what was an upload of a thread stays
    with the heap of that thread: hundreds of megabytes after a few. Does nothing where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions that raised an error had at hand: their traceback would hold a whole upload.

    The error stays in a cycle of references until somebody collects it, and the next upload would be in memory too.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
