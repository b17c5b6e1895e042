"""What can go wrong, as one tree. The command line's exit code and the service's status follow from the class.

LospmmError
+-- BadRequest          2   the request is wrong: what, where, and what to do
|   +-- BadMatrix           a matrix file or matrix that cannot be used
|   +-- BadSettings         a LOSPMM_* variable that is wrong: not the fault of a service's client
|   +-- Unsupported         a combination that no table has a row for
+-- NothingFits         3   no tile size satisfies every constraint on this device
+-- ToolchainFault      4   a compiler failed, was missing, or ran out of time or memory; carries the log
+-- GpuFault            4   the GPU, its driver or the process that runs kernels failed; carries the driver's error name
+-- ServiceFault        4   a service cannot be reached, or could not do its work
+-- VerificationFailed  5   a kernel's result differs from the float64 reference; nothing is written
"""

from pathlib import Path
from typing import ClassVar


class LospmmError(Exception):
    """Base of every error that a user may see. ``str(error)`` is one line that says what was wrong and where."""

    exit_code: ClassVar[int] = 1


class BadRequest(LospmmError):
    exit_code = 2


class BadMatrix(BadRequest):
    pass


class BadSettings(BadRequest):
    pass


class Unsupported(BadRequest):
    pass


class NothingFits(LospmmError):
    exit_code = 3


class ToolchainFault(LospmmError):
    exit_code = 4

    def __init__(self, message: str, *, log: str = "", log_path: Path | None = None) -> None:
        super().__init__(message if log_path is None else f"{message} (log: {log_path})")
        self.log = log
        self.log_path = log_path


class GpuFault(LospmmError):
    exit_code = 4


class ServiceFault(LospmmError):
    exit_code = 4


class VerificationFailed(LospmmError):
    exit_code = 5


def printable(text: str) -> str:
    """``text`` as one line: line ends, escape sequences and bytes that are no text are spelled out.

    File names and damaged files may hold any of them.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
