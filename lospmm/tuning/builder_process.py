"""A builder: a process that builds kernels, as one Python process builds fewer than a GPU can time.

``lospmm.tuning.builders`` starts it. It reads requests from standard input and writes answers to the original standard
output, like the worker that runs kernels (``gpu/messages.py``). It exits when its input ends.
"""

import os
import tempfile
import traceback
from pathlib import Path
from typing import BinaryIO

from lospmm.errors import DiskFault, LospmmError, system_errors
from lospmm.gpu.messages import Answer, channel, receive, send
from lospmm.problem.problem import Problem
from lospmm.toolchain.compile import OnDisk
from lospmm.toolchain.guard import VARIABLE
from lospmm.tuning.build import build, prepare, with_cubin
from lospmm.tuning.builders import BuildRequest, CallRequest, PrepareRequest

#: Builders fill all cores, so the processes that time kernels get priority.
NICENESS = 5


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until they end."""
    problem: Problem | None = None
    while (request := receive(requests)) is not None:
        try:
            if isinstance(request, CallRequest):
                answer = Answer(request.function(*request.arguments))
            else:
                assert isinstance(request, BuildRequest | PrepareRequest)
                problem = request.problem or problem
                assert problem is not None, "the first request names the problem"
                if isinstance(request, PrepareRequest):
                    prepare(problem, request.candidates, request.store)
                    answer = Answer()
                else:
                    answer = Answer(_built(problem, request))
        except LospmmError as error:
            answer = Answer(fault=str(error), is_disk=isinstance(error, DiskFault))
        except Exception as error:  # a bug: reported, with the traceback in the process's log
            traceback.print_exc()
            answer = Answer(fault=f"{type(error).__name__}: {error}")
        send(answers, answer)


def _built(problem: Problem, request: BuildRequest) -> OnDisk:
    """Build a kernel and write its cubin. Raises DiskFault, and as ``build``."""
    made = build(problem, request.candidate, request.emitter, store=request.store, workers=1)
    built = made.compiled
    with system_errors(DiskFault, f"{request.folder}: cannot be written"):
        number, name = tempfile.mkstemp(".cubin", dir=request.folder)
        with os.fdopen(number, "wb") as file:
            file.write(built.cubin)
    rest = None if made.kernel is None else with_cubin(made, b"", b"")  # the source of an unrolled one costs a build
    return OnDisk(Path(name), built.entry, built.launch, rest)


def main() -> None:
    """Run a builder on standard input and output."""
    os.nice(NICENESS)
    # The compilers started here get a guard of their own. It outlives this process, whose guard must not end it.
    os.environ.pop(VARIABLE, None)
    serve(*channel())
