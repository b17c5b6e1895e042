"""A tuned kernel as files and as values: the cubin, its source, the manifest and the search log.

A folder of one is replaced as a whole or not at all: readers find the old artifact or the new one.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lospmm.artifact.manifest import MANIFEST_FILE as MANIFEST_FILE  # which is a name of its files, too
from lospmm.artifact.manifest import parse
from lospmm.errors import BadMatrix, BadRequest, DiskFault, ToolchainFault, system_errors
from lospmm.matrix import npz as npy
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.convolution import Convolution, convolution_of
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import dtype_named
from lospmm.problem.epilogue import Epilogue, epilogue_of
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from lospmm.store import FolderFiles, is_linked, remove_old

Found = TypeVar("Found")

CUBIN_FILE = "kernel.cubin"
TUNING_FILE = "tuning.jsonl"
MATRIX_FILE = "matrix.npz"
SPACE_FILE = "space.json"
BIAS_FILE = "bias.npy"

#: The name of the source file, by its language.
SOURCE_FILES: Mapping[str, str] = {
    "ptx": "kernel.ptx",
    "cuda": "kernel.cu",
    "sass": "kernel.sass",
    "template": "kernel.cu",
}

#: What a folder of an artifact may hold.
FILES = (
    *(MANIFEST_FILE, CUBIN_FILE, TUNING_FILE, MATRIX_FILE, SPACE_FILE, BIAS_FILE),
    *dict.fromkeys(SOURCE_FILES.values()),
)

#: Those of these names that other software hardly uses.
OWN_FILES = {MANIFEST_FILE, CUBIN_FILE, TUNING_FILE, *SOURCE_FILES.values()}

#: Prefix of the name of a file or folder that is being written.
SCRATCH = ".lospmm-"

#: Age at which what is being written has lost its writer: writing takes well under a second.
STALE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """A tuned kernel: the parsed manifest.json, and all files by name, that one included."""

    manifest: Mapping[str, Any]
    files: dict[str, bytes] | FolderFiles

    def __hash__(self) -> int:
        return hash((self.manifest["name"], self.manifest["cubin_sha256"]))

    @property
    def cubin(self) -> bytes:
        """The cubin."""
        return self.files[CUBIN_FILE]

    @property
    def source(self) -> bytes:
        """The source, or the listing of machine code."""
        return self.files[SOURCE_FILES[self.manifest["emitter"]]]

    def matrix(self) -> SparseMatrix:
        """Return A. Raises BadRequest if it is missing or its fingerprint is not the manifest's."""
        where = f"kernel {self.manifest['name']}: {MATRIX_FILE}"
        if MATRIX_FILE not in self.files:
            raise BadRequest(f"{where} is missing; tune it again with this version")
        matrix = readers.read_bytes(self.files[MATRIX_FILE], where).matrix
        if matrix.fingerprint != self.manifest["fingerprint"]:
            raise BadRequest(f"{where} holds another matrix (its fingerprint differs)")
        return matrix

    def epilogue(self) -> Epilogue:
        """Return the epilogue. Raises BadRequest if its bias is missing."""
        added, bias = self.manifest["epilogue"], None
        if added["bias"]:
            where = f"kernel {self.manifest['name']}: {BIAS_FILE}"
            try:
                bias = npy.parse(self.files.get(BIAS_FILE, b""))
            except BadMatrix as error:
                raise BadRequest(f"{where}: {error}; tune it again") from None
            if bias.shape != (self.manifest["m"],):
                raise BadRequest(f"{where} is of shape {bias.shape}; tune it again")
        return epilogue_of(bias, relu=added["relu"], residual=added["residual"])

    def problem(self, device: DeviceSpec, matrix: SparseMatrix | None = None) -> Problem:
        """Return the problem that the kernel solves, on ``device``; ``matrix`` is A if it is known.

        Raises BadRequest if its matrix or bias is missing, or is not the kernel's.
        """
        manifest = self.manifest
        types = dtype_named(manifest["dtype"]), dtype_named(manifest["sums"]), VALUE_TYPES.get(manifest["weights"])
        return Problem(matrix or self.matrix(), manifest["n"], device, self.convolution, self.epilogue(), *types)

    @property
    def launch(self) -> Launch:
        """Grid, block and shared memory of the launch for all n columns."""
        config = self.manifest["launch"]
        x, y, z = config["grid"]
        return Launch((x, y, z), config["block"], config["shared_bytes"])

    @property
    def convolution(self) -> Convolution | None:
        """The convolution, or None."""
        window = self.manifest["convolution"]
        return None if window is None else convolution_of(window)


def from_files(files: dict[str, bytes] | FolderFiles, where: str) -> Artifact:
    """Return the artifact of these files. Raises BadRequest if they are no artifact or not complete."""
    if MANIFEST_FILE not in files:
        raise BadRequest(f"{where}: holds no {MANIFEST_FILE} of a kernel; of a model, name one layer's folder")
    manifest = parse(files[MANIFEST_FILE], where)
    if manifest["emitter"] not in SOURCE_FILES:
        raise BadRequest(f"{where}: emitter {manifest['emitter'][:20]!r} is not one of {', '.join(SOURCE_FILES)}")
    named = {CUBIN_FILE: manifest["cubin_sha256"], SOURCE_FILES[manifest["emitter"]]: manifest.get("source_sha256")}
    if BIAS_FILE in files:  # without it the kernel runs but cannot be compared
        named[BIAS_FILE] = manifest.get("bias_sha256")
    for name in (*named, TUNING_FILE):
        if name not in files:
            raise BadRequest(f"{where}: {name} is missing")
    try:
        files[SOURCE_FILES[manifest["emitter"]]].decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{where}: {SOURCE_FILES[manifest['emitter']]} is damaged: it is not text") from None
    for name, digest in named.items():  # the text too: it is what runs on a CPU
        if digest is not None and hashlib.sha256(files[name]).hexdigest() != digest:
            raise BadRequest(f"{where}: {name} is not the one that the manifest names (its sha256 differs)")
    return Artifact(manifest, files)


def read(directory: Path, cubins: dict[str, bytes] | None = None) -> Artifact:
    """Return the artifact in a folder, whose cubin is that of ``cubins`` with its sha256. Raises BadRequest."""
    with system_errors(BadRequest, f"{directory}: cannot be read"):
        if not directory.is_dir():
            raise BadRequest(f"{directory}: {'is a file' if directory.exists() else 'there is no such folder'}")
        files = _read_files(directory)
    found = from_files(files, str(directory))
    if cubins is not None:  # kernels with one cubin have it in memory once
        files.held[CUBIN_FILE] = cubins.setdefault(found.manifest["cubin_sha256"], found.cubin)
    return found


def _read_files(directory: Path) -> FolderFiles:
    """Return the files of one artifact, its matrix to be read later."""

    def files() -> FolderFiles:
        found, later = {}, {}
        for name in FILES:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG((path := directory / name).stat().st_mode):  # once: it may be gone later
                    raise BadRequest(f"{path}: is not a file")
                if name == MATRIX_FILE:
                    later[name] = path.absolute()
                else:
                    found[name] = path.read_bytes()
        return FolderFiles(found, later)

    return _of_one_folder(directory, files)


def _of_one_folder(directory: Path, look: Callable[[], Found]) -> Found:
    """Return what ``look`` finds in a folder, read again if the folder was replaced meanwhile."""
    while True:
        before = directory.stat()
        found = look()
        after = directory.stat()
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            return found


def check_target(directory: Path) -> None:
    """Raise what ``write`` would raise, before the work is done.

    BadRequest if it would destroy something that is not an artifact, ToolchainFault if it may not write.
    """
    check_folder(directory, is_replaced=True)


def check_folder(directory: Path, *, is_replaced: bool = False) -> None:
    """Raise BadRequest if ``directory`` is or lies in a file, ToolchainFault if it cannot be written."""
    if "\0" in str(directory):
        raise BadRequest(f"{str(directory)!r:.80}: holds a NUL; name a folder")
    try:
        directory.resolve()
        path = directory.absolute()
        place = next(one for one in (path, *path.parents) if one.exists())
        if not place.is_dir():
            raise BadRequest(f"{directory}: {'' if place == path else f'{place} '}is a file; name a folder")
        if is_replaced and place == path:
            _check_held(_of_one_folder(path, lambda: {entry.name for entry in path.iterdir()}), directory)
            if path.is_mount() or path.samefile(os.curdir):  # held by other files
                raise BadRequest(f"{directory}: is the current folder or a mount point; name a folder in it")
            place = path.parent
        _check_place(place, directory)
    except RuntimeError:  # of Python before 3.13
        raise BadRequest(f"{directory}: is a link that leads back to itself; name a folder") from None
    except OSError as error:
        raise BadRequest(f"{directory}: cannot be used: {error.strerror}") from None


def _check_place(place: Path, directory: Path) -> None:
    """Create and remove a folder in ``place``, as permissions say nothing of /proc. Raises ToolchainFault."""
    scratch = place / (SCRATCH + secrets.token_hex(8))
    try:
        scratch.mkdir()
        scratch.rmdir()
    except OSError as error:
        why = f"{place} takes no new folder ({error.strerror})"
        raise ToolchainFault(f"{directory}: cannot be written: {why}; name a folder elsewhere") from None


def _check_held(names: Set[str], directory: Path) -> None:
    if names and len(names & OWN_FILES) < 2:  # a kernel, though files of it may be lost
        raise BadRequest(f"{directory}: holds something other than a kernel; name an empty or new folder")
    if others := names - set(FILES):
        raise BadRequest(f"{directory}: holds {min(others)} beside a kernel, which would be lost; move it")


def write(artifact: Artifact, directory: Path, *, like: Path | None = None) -> None:
    """Write an artifact to a folder, replacing an artifact there. Raises BadRequest, DiskFault.

    Files that are the same in the folder ``like`` are hard links to those, where the disk has such. The files are
    written beside the folder first. If this process is killed then, the next writer cleans up.
    """
    check_target(directory)
    target = directory.resolve()  # a link stays a link
    scratch = target.with_name(SCRATCH + secrets.token_hex(8))
    try:
        with system_errors(DiskFault, f"{directory}: cannot be written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(target.parent)
            scratch.mkdir()
            for name, content in artifact.files.items():
                if like is None or not is_linked(like / name, scratch / name, content):
                    (scratch / name).write_bytes(content)
            _take_the_place_of(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Write a file beside an artifact, whole or not at all. Raises DiskFault."""
    scratch = path.with_name(SCRATCH + secrets.token_hex(8))
    try:
        with system_errors(DiskFault, f"{path}: cannot be written"):
            scratch.write_text(text, "utf-8")
            scratch.replace(path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def remove_stale(parent: Path) -> None:
    """Remove what killed writers left in a folder."""
    # The names that ``write`` gives, and nobody else.
    remove_old(parent.glob(f"{SCRATCH}{'[0-9a-f]' * 16}*"), STALE_SECONDS)


def _take_the_place_of(scratch: Path, directory: Path) -> None:
    """Rename ``scratch`` to ``directory``; the previous directory is then called ``scratch``."""
    try:
        scratch.rename(directory)  # if there is nothing, or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    if not _exchange(scratch, directory):
        _move_aside(scratch, directory)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (renameat2 with RENAME_EXCHANGE, Linux 3.15); False if unsupported."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0)


def _move_aside(scratch: Path, directory: Path) -> None:
    """Replace a folder in two renames, between which it is missing; undo the first if the second fails."""
    old = scratch.with_name(f"{scratch.name}-old")
    directory.rename(old)
    try:
        scratch.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old)
