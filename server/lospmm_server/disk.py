"""The disks of the service: whether they can be written, and are still those that this process started with."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lospmm.errors import DiskFault

#: Bytes that must be free in the cache and in TMPDIR, or no job is taken or begun.
HEADROOM_BYTES = 64 << 20

#: Bytes that a probe writes: a quota, or a full disk, still takes empty files.
PROBE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Landmark:
    """A file or folder by its device and inode: another one in its place lacks what was written here."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the landmark that is there now. Raises OSError."""
        found = path.stat()
        return cls(path, found.st_dev, found.st_ino)

    def check(self) -> None:
        """Raise DiskFault if it was removed or replaced."""
        try:
            found = Landmark.at(self.path)
        except OSError as error:
            raise DiskFault(f"{self.path} is gone ({error.strerror}): put it back, or restart the service") from None
        if found != self:
            raise DiskFault(f"{self.path} was replaced by another: put the first one back, or restart the service")


@dataclass(frozen=True, slots=True)
class Disk:
    """The folder of the cache, and that of temporary files."""

    cache: Landmark

    @classmethod
    def under(cls, cache: Path) -> Self:
        """Return the disk of a cache, whose folder is made if need be. Raises DiskFault."""
        try:
            cache.mkdir(parents=True, exist_ok=True)
            return cls(Landmark.at(cache))
        except OSError as error:
            raise DiskFault(f"the cache {cache} cannot be made: {error.strerror}") from None

    def check(self, *, by_writing: bool = False) -> None:
        """Raise DiskFault unless a job could be done, as far as can be seen, or also ``by_writing`` a file."""
        if lacks := self.lacks(by_writing=by_writing):
            raise DiskFault("; ".join(lacks))

    def lacks(self, *, by_writing: bool = True) -> list[str]:
        """Return what is wrong, a line each."""
        lacks = []
        try:
            self.cache.check()
            check_room(self.cache.path, by_writing=by_writing)
        except DiskFault as fault:
            lacks.append(f"the cache: {fault}")
        try:
            check_room(Path(tempfile.gettempdir()), by_writing=by_writing)
        except (DiskFault, OSError) as error:  # the latter where no folder is usable
            lacks.append(f"uploads and compilers have no place for temporary files: {error}")
        return lacks


def check_room(folder: Path, *, by_writing: bool = False) -> None:
    """Raise DiskFault unless files can be written to ``folder``."""
    try:
        disk = os.statvfs(folder)
        if by_writing:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
    except OSError as error:
        raise DiskFault(f"{folder} cannot be written: {error.strerror}") from None
    if disk.f_flag & os.ST_RDONLY:
        raise DiskFault(f"{folder} is read-only")
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < HEADROOM_BYTES:  # some network disks tell no sizes
        raise DiskFault(f"{folder} has {free >> 20} MiB free, less than {HEADROOM_BYTES >> 20} MiB")
