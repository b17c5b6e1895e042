"""Errors as one tree; the class decides the command line's exit code and the service's HTTP status.

LospmmError
+-- BadRequest          2   the request is wrong: what, where, and what to do
|   +-- BadMatrix           a matrix file or matrix that cannot be used
|   +-- BadSettings         a LOSPMM_* variable that is wrong: not the fault of a service's client
|   +-- Unsupported         a combination that no table has a row for
|   +-- MissingExtra        what is asked for needs libraries that are not installed: which extra has them
+-- NothingFits         3   no tile size satisfies every constraint on this device
+-- ToolchainFault      4   a compiler failed, was missing, or ran out of time or memory; carries the log
|   +-- DiskFault           a disk is full, read-only or lost: it may be well again at any time
+-- GpuFault            4   the GPU, its driver or the process that runs kernels failed; carries the driver's error name
+-- ServiceFault        4   a service cannot be reached, or could not do its work
+-- VerificationFailed  5   a kernel's result differs from the float64 reference; nothing is written
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar


class LospmmError(Exception):
    """Base of every error that a user may see.

    ``str(error)`` is one line that says what was wrong and where.
    """

    exit_code: ClassVar[int] = 1


class BadRequest(LospmmError):
    """A wrong request: what is wrong, where, and what to do."""

    exit_code = 2


class BadMatrix(BadRequest):
    """A matrix or a matrix file that cannot be used; ``sparsity`` is its share of zeros if it has too many nonzeros."""

    sparsity: float | None = None


class BadSettings(BadRequest):
    """A wrong ``LOSPMM_*`` variable: never the fault of a service's client."""


class Unsupported(BadRequest):
    """A combination of options that no table has a row for."""


class MissingExtra(BadRequest, ModuleNotFoundError):
    """Libraries that are not installed, and the extra of the package that has them."""


class NothingFits(LospmmError):
    """A problem of which no tile size satisfies every constraint on its device."""

    exit_code = 3


class ToolchainFault(LospmmError):
    """A compiler that failed, is missing, or ran out of time or memory.

    ``log`` holds the compiler's output, ``log_path`` the file that it was written to, if any.
    """

    exit_code = 4

    def __init__(self, message: str, *, log: str = "", log_path: Path | None = None) -> None:
        super().__init__(message if log_path is None else f"{message} (log: {log_path})")
        self.log = log
        self.log_path = log_path


class DiskFault(ToolchainFault):
    """A disk that is full, read-only or lost: no compiler's fault, and perhaps over soon."""


class GpuFault(LospmmError):
    """A failure of the GPU, its driver, or the worker process that runs kernels."""

    exit_code = 4


class ServiceFault(LospmmError):
    """A service that cannot be reached or could not do its work."""

    exit_code = 4


class VerificationFailed(LospmmError):
    """A kernel whose result differs from the float64 reference."""

    exit_code = 5


@contextmanager
def extra_needed(extra: str, what: str) -> Iterator[None]:
    """Raise MissingExtra where a library that is imported for ``what`` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtra) or (error.name or "").startswith("lospmm"):
            raise
        raise MissingExtra(f"{what} needs {error.name}: pip install 'lospmm[{extra}]'", name=error.name) from None


@contextmanager
def system_errors(kind: type[LospmmError], what: str) -> Iterator[None]:
    """Convert an error of the system, as of a file, to ``kind``: ``what`` cannot be done, and its reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror}") from error


def printable(text: str) -> str:
    """Return ``text`` as one line, with line ends, escape sequences and undecodable bytes escaped.

    File names and damaged files may hold any of them.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
