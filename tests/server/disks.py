"""Small disks, and ones that are full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A disk of so many MiB, made for the block. Raises PermissionError where this user may mount none."""
    folder.mkdir()
    try:
        mount = ("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "lospmm-test", folder)
        if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            raise PermissionError("this user may mount no disk")
        try:
            yield folder
        finally:
            subprocess.run(("umount", "--lazy", folder), check=True)
    finally:
        folder.rmdir()


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """The disk of a folder without a free byte."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        disk = os.statvfs(folder)
        with suppress(OSError):
            os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize * 9 // 10)  # fast; others write too
        filler.seek(0, os.SEEK_END)
        with suppress(OSError):
            while filler.write(bytes(1 << 20)):
                pass
    try:
        yield
    finally:
        (folder / "filler").unlink()
