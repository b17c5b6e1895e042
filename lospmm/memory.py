"""How much memory there is for this process and those that it starts."""

import os
from contextlib import suppress
from pathlib import Path

#: What a container may have (cgroup v2), a number or "max".
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Of the machine, or of the container where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(machine, int(CONTAINER_LIMIT.read_text()))
    return machine
