"""Content-addressed store on disk for compiled units and finished kernels.

An entry is a directory ``<root>/<kind>/<first two digits>/<key>/`` of files beside ``entry.json``, which holds the
sha256 and size of each. It is written elsewhere in the root and renamed into place, so that it is whole or absent,
and two writers of one key do no harm: the first wins. A read checks every byte; a corrupt entry is removed and
reported as absent, so the caller builds it again. Faults of the disk are DiskFault and name the directory.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lospmm.errors import BadRequest, DiskFault, system_errors

MANIFEST = "entry.json"

#: Directory in which entries are written and removed: on the file system of the root, so that rename is atomic.
SCRATCH = ".scratch"

#: Directory of the lock files of ``claimed``.
CLAIMS = ".claims"

#: Writing an entry takes seconds at most: a scratch directory of this age has lost its writer. Its process id would
#: not tell, since containers that share a cache do not see each other's processes.
STALE_SECONDS = 3600.0

_KEY = re.compile(r"[0-9a-f]{8,128}")

_KIND = re.compile(r"[a-z][a-z0-9_-]*")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def is_locked_alone(descriptor: int) -> bool:
    """Lock an open file or folder; return False if another process has it, True on disks without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_old(paths: Iterable[Path], seconds: float) -> None:
    """Remove files and folders that killed writers left, of at least this age. Raises OSError."""
    for path in paths:
        with suppress(FileNotFoundError):  # its writer has just ended
            if time.time() - path.stat().st_mtime <= seconds:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # it may be another user's
            else:
                path.unlink()


def is_linked(held: Path, file: Path, content: bytes) -> bool:
    """Make ``file`` a link to a file with this content; return whether it could be."""
    with suppress(OSError):
        if held.read_bytes() == content:
            file.hardlink_to(held)
            return True
    return False


@dataclass(frozen=True, eq=False)
class FolderFiles(Mapping[str, bytes]):
    """Files of a folder in memory, and those that are read each time: a kernel runs without its matrix."""

    held: dict[str, bytes]
    later: Mapping[str, Path]

    def __getitem__(self, name: str) -> bytes:
        if name in self.held:
            return self.held[name]
        with system_errors(BadRequest, f"{self.later[name]}: cannot be read"):
            return self.later[name].read_bytes()

    def __or__(self, others: dict[str, bytes]) -> "FolderFiles":
        """Return the files with others of these names, as of a dict."""
        return FolderFiles(self.held | others, self.later)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.held, *self.later))

    def __len__(self) -> int:
        return len(self.held) + len(self.later)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as a listing shows it.

    ``used`` is the time of its last read, or of its writing if it was never read, in seconds since 1970.
    """

    kind: str
    key: str
    size_bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Store:
    """A content-addressed store in the directory ``root``."""

    root: Path

    def directory(self, kind: str, key: str) -> Path:
        """Return the directory of an entry, existing or not. Raises BadRequest unless the key is hexadecimal."""
        if not _KIND.fullmatch(kind):
            raise BadRequest(f"{kind!r} is not a kind of entry")
        if not _KEY.fullmatch(key):
            raise BadRequest(f"{key[:80]!r} is not a key: 8 to 128 hexadecimal digits, lower case")
        return self.root / kind / key[:2] / key

    def get(self, kind: str, key: str) -> dict[str, bytes] | None:
        """Return the files of an entry by name, all checksums verified, or None; mark the entry as used."""
        directory = self.directory(kind, key)
        try:
            files = _read(directory)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _fault(directory, error) from error
        if files is None:
            # If it cannot be removed, its replacement is used but not stored.
            with suppress(OSError, DiskFault):
                self._remove(directory)
            return None
        with suppress(OSError):  # a cache that may only be read is still worth reading
            os.utime(directory)
        return files

    def put(self, kind: str, key: str, files: Mapping[str, bytes], like: str | None = None) -> bool:
        """Write an entry, unless it exists; return whether it was written.

        Files that are the same in the entry ``like`` are hard links to those, where the disk has such.
        """
        directory = self.directory(kind, key)
        for name in files:
            if not _NAME.fullmatch(name) or name == MANIFEST:
                raise BadRequest(f"{name!r} cannot be the name of a file in the store")
        if directory.exists():
            return False
        with self._faults(), self._scratch() as scratch:
            _write(scratch, kind, key, files, None if like is None else self.directory(kind, like))
            return self._place(scratch, directory)

    def replace(self, kind: str, key: str, files: Mapping[str, bytes]) -> None:
        """Write an entry in place of an earlier one; a reader finds either, or none."""
        directory = self.directory(kind, key)
        with self._faults(), self._scratch() as scratch:
            (whole := scratch / "whole").mkdir()
            _write(whole, kind, key, files, None)
            with suppress(FileNotFoundError):
                directory.rename(scratch / "earlier")
            self._place(whole, directory)

    @contextmanager
    def staging(self) -> Iterator["Store"]:
        """Yield a temporary store; ``adopt`` keeps its entries, and the rest is deleted when the block ends."""
        with self._scratch() as scratch:
            yield Store(scratch)

    def adopt(self, staged: "Store") -> None:
        """Move the entries of a store of ``staging`` into this one, except those that it already has."""
        with self._faults():
            for entry in staged.entries():
                self._place(staged.directory(entry.kind, entry.key), self.directory(entry.kind, entry.key))

    @contextmanager
    def claimed(self, kind: str, key: str) -> Iterator[bool]:
        """Yield whether this process holds the claim to make the entry, until the block ends.

        In rare races two processes hold it. A claim is released when its process ends. If the disk has no locks or
        cannot be written, everybody gets the claim. Raises BadRequest as ``directory``.
        """
        self.directory(kind, key)
        claim = self.root / CLAIMS / f"{kind}-{key}"
        try:
            claim.parent.mkdir(parents=True, exist_ok=True)
            file = claim.open("wb")
        except OSError:
            yield True
            return
        with file:
            if not is_locked_alone(file.fileno()):
                yield False
                return
            try:
                yield True
            finally:
                with suppress(OSError):
                    claim.unlink()

    def entries(self) -> Iterator[Entry]:
        """Yield every entry, in no order. Raises DiskFault if the root cannot be read.

        An entry that disappears meanwhile is left out; one that cannot be read has size 0 and was last used in 1970.
        """
        try:
            next(self.root.iterdir(), None)  # glob would ignore an unreadable root
        except FileNotFoundError:
            return
        except OSError as error:
            raise _fault(self.root, error) from error
        for directory in self.root.glob("[a-z]*/[0-9a-f][0-9a-f]/*"):
            kind, key = directory.parts[-3], directory.name
            if _KIND.fullmatch(kind) and _KEY.fullmatch(key):
                try:
                    size = sum(file.stat().st_size for file in directory.iterdir())
                    yield Entry(kind, key, size, directory.stat().st_mtime)
                except FileNotFoundError:
                    continue
                except (NotADirectoryError, PermissionError):
                    yield Entry(kind, key, 0, 0.0)

    def prune(self, *, max_bytes: int | None = None, older_than_seconds: float | None = None) -> list[Entry]:
        """Remove entries unused for ``older_than_seconds``, then the least recently used above ``max_bytes``.

        Returns the removed entries. Also deletes what killed writers left behind.
        """
        now = time.time()
        with self._faults():
            remove_old(self.root.glob(f"{SCRATCH}/*"), STALE_SECONDS)
            remove_old(self.root.glob(f"{CLAIMS}/*"), STALE_SECONDS)
            entries = sorted(self.entries(), key=lambda entry: entry.used)
            total = sum(entry.size_bytes for entry in entries)
            removed = []
            for entry in entries:
                too_old = older_than_seconds is not None and now - entry.used > older_than_seconds
                too_much = max_bytes is not None and total > max_bytes
                if not (too_old or too_much):
                    break
                try:
                    self._remove(self.directory(entry.kind, entry.key))
                except PermissionError:  # another user's
                    continue
                total -= entry.size_bytes
                removed.append(entry)
        return removed

    def verify(self) -> list[Entry]:
        """Return the corrupt entries. They stay on disk until ``get`` meets them."""
        with self._faults():
            return [entry for entry in self.entries() if _is_corrupt(self.directory(entry.kind, entry.key))]

    def _place(self, whole: Path, directory: Path) -> bool:
        """Rename a complete entry into place; return False if another writer was first. Raises OSError."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            whole.rename(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        _sync(directory.parent)
        return True

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Yield a new directory of the root that is deleted when the block ends. Raises DiskFault."""
        directory = self.root / SCRATCH / secrets.token_hex(8)
        with self._faults():
            directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _remove(self, directory: Path) -> None:
        """Remove an entry atomically: a reader never meets half of it."""
        with self._scratch() as scratch, suppress(FileNotFoundError):  # another process was first
            directory.rename(scratch / directory.name)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _fault(self.root, error) from error


def _is_corrupt(directory: Path) -> bool:
    try:
        return _read(directory) is None
    except FileNotFoundError:  # removed meanwhile
        return False


def _read(directory: Path) -> dict[str, bytes] | None:
    """Return the files of an entry, or None if it is corrupt. Raises FileNotFoundError if it is gone.

    Reads again if another entry took this one's place meanwhile.
    """
    while True:
        before = directory.stat()
        if (files := _checked(directory)) is not None:
            return files
        after = directory.stat()
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            return None


def _checked(directory: Path) -> dict[str, bytes] | None:
    """Return the files of an entry, or None if anything is missing or wrong."""
    files = {}
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["key"] != directory.name:  # an entry that somebody copied to another place
            return None
        for name, expected in manifest["files"].items():
            if not _NAME.fullmatch(name):
                return None
            content = (directory / name).read_bytes()
            if expected != _described(content):
                return None
            files[name] = content
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return files


def _write(directory: Path, kind: str, key: str, files: Mapping[str, bytes], like: Path | None) -> None:
    held: Mapping[str, dict[str, object]] = {}
    described = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # it may be gone
        held = {} if like is None else json.loads((like / MANIFEST).read_bytes())["files"]
    for name, content in files.items():
        if like is not None and name in held and is_linked(like / name, directory / name, content):
            described[name] = held[name]
        else:
            described[name] = _described(content)
            _write_file(directory / name, content)
    manifest = {"kind": kind, "key": key, "created": time.time(), "files": described}
    _write_file(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync(directory)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _described(content: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _sync(directory: Path) -> None:
    """Flush the names in a directory to disk, so that they survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fault(directory: Path, error: OSError) -> DiskFault:
    reason = error.strerror or str(error)
    return DiskFault(f"the store in {directory} cannot be used: {reason} (LOSPMM_CACHE_DIR names another place)")


Files = Mapping[str, bytes]

#: Seconds between two looks for an entry that another process makes, and seconds without any new entry after which it
#: is made here too: the other process may have been stopped.
POLL_SECONDS, PATIENCE_SECONDS = 0.02, 10.0


def made_together(store: Store, kind: str, keys: Sequence[str], make: Callable[[int], Files]) -> list[Files]:
    """Return the entries of ``keys``; several processes that need the same ones share the work.

    ``make(i)`` makes the entry of ``keys[i]``. An entry that cannot be stored is made again each time. Raises what
    ``make`` raises.
    """
    found: dict[int, Files] = {}
    patience = time.monotonic() + PATIENCE_SECONDS
    while missing := [at for at in range(len(keys)) if at not in found]:
        before = len(found)
        for at in missing:
            if (entry := _made(store, kind, keys[at], partial(make, at))) is not None:
                found[at] = entry
        if len(found) > before:
            patience = time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() < patience:
            time.sleep(POLL_SECONDS)
        else:
            found[missing[0]] = make(missing[0])
    return [found[at] for at in range(len(keys))]


def _made(store: Store, kind: str, key: str, make: Callable[[], Files]) -> Files | None:
    """Return the entry, made here if need be, or None while another process makes it."""
    if (entry := _kept(store, kind, key)) is not None:
        return entry
    with store.claimed(kind, key) as is_ours:
        if not is_ours:
            return None
        made = _kept(store, kind, key)  # the previous holder of the claim may have made it
        if made is None:
            made = make()
            with suppress(DiskFault):
                store.put(kind, key, made)
        return made


def _kept(store: Store, kind: str, key: str) -> Files | None:
    with suppress(DiskFault):
        return store.get(kind, key)
    return None
