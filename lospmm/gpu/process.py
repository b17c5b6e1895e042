"""The parent's side of a worker: starts it, sends it requests with a time limit, and ends it.

Like a compiler, a worker runs in a session of its own and carries the token of the guard (``toolchain/lifetime.py``),
which ends it if this process is killed, even while one of its kernels hangs.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from lospmm.errors import GpuFault
from lospmm.gpu.messages import Answer, receive, send
from lospmm.toolchain import lifetime
from lospmm.toolchain.process import has_ended

#: -P: the current directory is not searched for modules.
WORKER = (sys.executable, "-P", "-m", "lospmm.gpu.worker")

#: Seconds between two checks for cancellation; and bytes read of the end of stderr.
POLL_SECONDS = 0.05
LOG_BYTES = 1 << 14

#: Seconds that the driver may take to release the GPU of a killed process.
END_SECONDS = 60.0

#: Seconds between the end of a worker's output and its exit.
ENDING_SECONDS = 2.0


class WorkerLost(Exception):
    """A worker that gave no answer and was ended; ``str(error)`` says why."""


@dataclass(slots=True)
class _Sent:
    """A request, its answer once it is there, and until when to wait for that."""

    deadline: float
    seconds: float
    answer: Future[object] = field(default_factory=Future)


class WorkerProcess:
    """One worker. Raises GpuFault if it cannot be started, ToolchainFault if its guard cannot."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        variables = dict(os.environ)  # CUDA and its libraries read many variables
        variables |= {"PYTHONPATH": os.pathsep.join(sys.path)} | lifetime.compiler_environment()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        try:
            self._child = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise GpuFault(f"{command[0]} cannot be started: {error.strerror}") from error
        self._sent: _Sent | None = None

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        return self._child.pid

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it."""
        return self._child.returncode is not None or has_ended(self.pid)

    def ask(self, request: object, seconds: float, cancel: threading.Event | None = None) -> Answer:
        """Send a request and return its answer. Raises WorkerLost, CancelledError once ``cancel`` is set.

        After either, or any other exception, the worker has been ended.
        """
        self.send(request, seconds)
        return self.receive(cancel)

    def send(self, request: object, seconds: float) -> None:
        """Send a request, which is ``receive``d before another is sent, without waiting until it is read."""
        self._sent = _Sent(time.monotonic() + seconds, seconds)
        threading.Thread(target=self._exchange, args=(request, self._sent.answer), daemon=True).start()

    def receive(self, cancel: threading.Event | None = None) -> Answer:
        """Return the answer to what was sent. Raises as ``ask``."""
        sent, self._sent = self._sent, None
        assert sent is not None, "there is a request"
        try:
            while not sent.answer.done():
                wait([sent.answer], POLL_SECONDS)
                if cancel is not None and cancel.is_set():
                    raise CancelledError
                if time.monotonic() > sent.deadline and not sent.answer.done():  # an answer may have waited
                    raise WorkerLost(f"no answer within {sent.seconds:g} s")
            return self._checked(sent.answer)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the worker. Raises GpuFault where the driver does not let it go."""
        if self._child.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise GpuFault(
                f"process {self.pid} was killed and has not ended in {END_SECONDS:g} s: its GPU must be reset"
            ) from None
        for stream in (*self._streams(), self._log):
            with suppress(BrokenPipeError):  # unsent bytes of a request
                stream.close()

    def _exchange(self, request: object, answer: Future[object]) -> None:
        """Send a request and wait for its answer, in a thread of its own: the end of the worker ends it."""
        stdin, stdout = self._streams()
        try:
            with suppress(BrokenPipeError):  # the end of its output is reported instead
                send(stdin, request)
            answer.set_result(receive(stdout))
        except BaseException as error:  # what unpickling may raise has no bounds
            answer.set_exception(error)

    def _checked(self, found: Future[object]) -> Answer:
        """Return an answer. Raises WorkerLost for anything else."""
        error = found.exception()
        answer = None if error is not None else found.result()
        if error is None and answer is None:
            raise WorkerLost(self._how_it_ended())
        if not isinstance(answer, Answer):
            raise WorkerLost(f"the process sent no valid answer ({type(error or answer).__name__})") from None
        return answer

    def _how_it_ended(self) -> str:
        deadline = time.monotonic() + ENDING_SECONDS
        while not self.has_ended():
            if time.monotonic() > deadline:
                return "the process closed its output"
            time.sleep(0.01)
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        if status.si_code == os.CLD_EXITED:
            ended = f"exit status {status.si_status}"
        else:
            ended = f"signal {status.si_status}, {signal.strsignal(status.si_status)}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
        last_line = self._log.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process ended: {ended}" + (f": {last_line}" if last_line else "")

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        return child.stdin, child.stdout
