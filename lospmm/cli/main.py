"""The command line as a process: its exit codes, one-line errors, and its end by a signal.

The commands are in ``commands.py``. Their results go to stdout, progress and errors to stderr; exit codes are those
of ``errors``.
"""

import os
import resource
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from lospmm.cli.output import print_json
from lospmm.errors import BadRequest, LospmmError, MissingExtra, ToolchainFault, extra_needed, printable

#: The status of a command whose output nobody reads to its end, as in ``lospmm cache ls | head``. Typer's own.
BROKEN_PIPE = 1

#: Address space (``ulimit -v``) below which the libraries abort or spin instead of raising MemoryError: 600 MB on two
#: cores, with room for more.
LEAST_BYTES = 1 << 30

#: What Python says where the system grants no thread.
_NO_THREAD = "can't start new thread"

#: Shows the cursor, which a progress bar hides, on a line below it.
_LEAVE_BAR = "\x1b[?25h\n"


def main() -> NoReturn:
    # Before the imports of the commands, which take long enough to be interrupted.
    """Run the command of this process and exit with its status."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, _leave)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status.

    An error is one line on stderr and, with --json, an object on stdout.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; what is written to it is lost, as asked for
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        _check_address_space()
        with extra_needed("tune", "the command lospmm"):
            import typer

            from lospmm.cli.commands import app_with

            app = app_with(arguments)  # whose command takes up to two seconds to import
    except (MissingExtra, ToolchainFault) as error:
        return _failed(error, arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may not fit the terminal's encoding
    try:
        status: int | None = app(arguments, prog_name="lospmm", standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except typer.TyperException as error:  # an unknown option, a missing argument
        return _failed(BadRequest(" ".join(error.format_message().split())), arguments)
    except LospmmError as error:
        return _failed(error, arguments)
    except MemoryError:
        return _failed(ToolchainFault("out of memory, of the machine or of `ulimit -v`"), arguments)
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        return _failed(ToolchainFault("the system starts no more threads: see `ulimit -u` and pids.max"), arguments)
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:  # what its caller could say nothing better about, such as a full disk behind stdout
        _discard_output()
        return _failed(ToolchainFault(f"{error.filename or 'output'}: {error.strerror}"), arguments)


def _check_address_space() -> None:
    """Raise ToolchainFault for less than LEAST_BYTES."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        raise ToolchainFault(f"`ulimit -v` is {limit >> 10} kB: lospmm needs {LEAST_BYTES >> 10}")


def _failed(error: LospmmError, arguments: Sequence[str]) -> int:
    message = printable(str(error))
    print(f"error: {message}", file=sys.stderr)
    if "--json" in arguments:
        print_json({"error": {"type": type(error).__name__, "message": message}})
    return error.exit_code


def _discard_output() -> None:
    """Let nothing that stdout still holds fail again when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _leave(signal_number: int, _frame: FrameType | None) -> None:
    """End at once. Nothing is lost: files appear whole or not at all, and the guard ends the compilers.

    An exception would wait for threads that may be in the middle of a long step.
    """
    before = _LEAVE_BAR if os.isatty(2) else ""
    next_step = "; run it again to resume" if sys.argv[1:2] == ["tune-model"] else ""
    os.write(2, f"{before}error: stopped by {signal.Signals(signal_number).name}{next_step}\n".encode())
    os._exit(128 + signal_number)
