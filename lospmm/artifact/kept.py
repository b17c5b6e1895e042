"""Finished artifacts in the store of this user, each under its request's digest."""

from lospmm.artifact import artifact
from lospmm.artifact.artifact import MATRIX_FILE, Artifact
from lospmm.settings import settings
from lospmm.store import FolderFiles, Store

#: The kind of these entries.
KERNELS = "kernel"


def open_store() -> Store:
    """Return the store of this user (LOSPMM_CACHE_DIR)."""
    return Store(settings().cache_dir)


def find(digest: str, store: Store) -> Artifact | None:
    """Return the finished artifact of a request, from the store; None where there is none."""
    files = store.get(KERNELS, digest)
    return None if files is None else _light(artifact.from_files(files, f"the store's entry {digest}"), digest, store)


def keep(made: Artifact, digest: str, store: Store, like: str | None = None) -> Artifact:
    """Keep the artifact of a request in ``store``; return it, or the one that another process stored first.

    The file of its matrix, which it has in memory no more, may be that of the request ``like``. Raises ToolchainFault
    where the disk fails.
    """
    if not store.put(KERNELS, digest, made.files, like):
        return find(digest, store) or made
    return _light(made, digest, store)


def _light(kept: Artifact, digest: str, store: Store) -> Artifact:
    """Return the artifact with its matrix in the store alone: kernels of a language model hold their A, too."""
    held = {name: content for name, content in kept.files.items() if name != MATRIX_FILE}
    later = {MATRIX_FILE: store.directory(KERNELS, digest) / MATRIX_FILE} if MATRIX_FILE in kept.files else {}
    return Artifact(kept.manifest, FolderFiles(held, later))
