"""What tuning gives: the cubin, its source, the manifest and the log of the search, as files and as values.

A folder that holds one is replaced as a whole or not at all: whoever opens it finds the old artifact or the new one.
"""

import ctypes
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lospmm.errors import BadRequest, ToolchainFault

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
CUBIN_FILE = "kernel.cubin"
TUNING_FILE = "tuning.jsonl"

#: The name of the source file, by its language.
SOURCE_FILES: Mapping[str, str] = {"ptx": "kernel.ptx", "cuda": "kernel.cu"}


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    cols: int
    prefetch: int
    fmas_per_load: int | None
    order: Literal["tile", "column"]
    count: int  # tiles with nonzeros
    zero_blocks: int  # block rows that only write the zeros of empty rows
    nnc_sum: int
    nnc_max: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    grid: tuple[int, int]
    block: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    type: str
    layout: str


@dataclass(frozen=True, slots=True)
class SearchSummary:
    space: int
    after_registers: int
    after_utilization: int
    after_balance: int
    shortlisted: int
    measured: int
    ranker: str
    trials: str
    relaxed: tuple[str, ...]
    chosen_by: str  # "estimate": an analytic rule, not a measurement
    estimated_micros: float


@dataclass(frozen=True, slots=True)
class Verified:
    on: str
    max_relative_error: float
    columns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json; docs/manifest.md says what each field means."""

    name: str
    m: int
    k: int
    n: int
    nnz: int
    dtype: str
    fingerprint: str
    values: str
    seed: int | None
    device: str
    arch: str
    emitter: str
    toolchain: str
    tile: Tile
    launch: LaunchConfig
    arguments: tuple[Argument, ...]
    registers: int
    spill_bytes: int
    code_bytes: int
    cubin_sha256: str
    search: SearchSummary
    seconds: Mapping[str, float]
    verified: Verified | None
    measured: None = None
    schema: int = field(default=SCHEMA)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Artifact:
    """``manifest`` is the parsed manifest.json; ``files`` are all files by name, that one included."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def cubin(self) -> bytes:
        return self.files[CUBIN_FILE]

    @property
    def source(self) -> bytes:
        return self.files[SOURCE_FILES[self.manifest["emitter"]]]


def from_files(files: Mapping[str, bytes], where: str) -> Artifact:
    """The artifact of these files. Raises BadRequest where they are not one, or not whole."""
    try:
        manifest = json.loads(files[MANIFEST_FILE])
        source, expected = SOURCE_FILES[manifest["emitter"]], manifest["cubin_sha256"]
    except (KeyError, TypeError, ValueError):
        raise BadRequest(f"{where}: holds no {MANIFEST_FILE} of a kernel") from None
    if manifest.get("schema") != SCHEMA:
        raise BadRequest(f"{where}: manifest schema {manifest.get('schema')}; this version reads {SCHEMA}")
    for name in (CUBIN_FILE, source):
        if name not in files:
            raise BadRequest(f"{where}: {name} is missing")
    if hashlib.sha256(files[CUBIN_FILE]).hexdigest() != expected:
        raise BadRequest(f"{where}: {CUBIN_FILE} is not the one that the manifest names (its sha256 differs)")
    return Artifact(manifest, files)


def read(directory: Path) -> Artifact:
    """The artifact in a folder. Raises BadRequest."""
    if not directory.is_dir():
        raise BadRequest(f"{directory}: there is no such folder")
    names = (MANIFEST_FILE, CUBIN_FILE, TUNING_FILE, *SOURCE_FILES.values())
    try:
        files = {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}
    except OSError as error:
        raise BadRequest(f"{directory}: cannot be read: {error.strerror}") from None
    return from_files(files, str(directory))


def check_target(directory: Path) -> None:
    """Raise BadRequest where ``write`` would have to destroy something that is not an artifact."""
    if directory.exists() and not directory.is_dir():
        raise BadRequest(f"{directory}: is a file; --out names a folder")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST_FILE).is_file():
        raise BadRequest(f"{directory}: holds something else than a kernel; name an empty or a new folder")


def write(artifact: Artifact, directory: Path) -> None:
    """Put an artifact into a folder, in place of one that is there. Raises BadRequest or ToolchainFault."""
    check_target(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise BadRequest(f"{directory}: cannot be written: {error.strerror}") from None
    try:
        for name, content in artifact.files.items():
            (scratch / name).write_bytes(content)
        scratch.chmod(0o755)
        _take_the_place_of(scratch, directory)
    except OSError as error:
        raise ToolchainFault(f"{directory}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _take_the_place_of(scratch: Path, directory: Path) -> None:
    """Rename ``scratch`` to ``directory``; what was there before is then called ``scratch``."""
    if not directory.exists():
        scratch.rename(directory)
    elif not _exchange(scratch, directory):
        old = scratch.with_name(scratch.name + ".old")
        directory.rename(old)
        scratch.rename(directory)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step (renameat2 with RENAME_EXCHANGE, Linux 3.15); False where that is not known."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0)
