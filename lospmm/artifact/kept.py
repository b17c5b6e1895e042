"""Finished artifacts in the store of this user, each under its request's digest."""

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.settings import settings
from lospmm.store import Store

#: The kind of these entries.
KERNELS = "kernel"


def open_store() -> Store:
    """Return the store of this user (LOSPMM_CACHE_DIR)."""
    return Store(settings().cache_dir)


def find(digest: str, store: Store) -> Artifact | None:
    """Return the finished artifact of a request, from the store; None where there is none."""
    files = store.get(KERNELS, digest)
    return None if files is None else artifact.from_files(files, f"the store's entry {digest}")


def keep(made: Artifact, digest: str, store: Store) -> Artifact:
    """Keep the artifact of a request in ``store``; return it, or the one that another process stored first.

    Raises ToolchainFault where the disk fails.
    """
    return made if store.put(KERNELS, digest, made.files) else find(digest, store) or made
