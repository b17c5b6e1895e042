"""A builder: a process that builds kernels, as one Python process builds fewer than a GPU can time.

``lospmm.tuning.builders`` starts it. It reads calls from standard input: a function, its problem (None: that of the
last call) and its other arguments. It writes answers to the original standard output, like the worker that runs kernels
(``gpu/messages.py``), and exits when its input ends.
"""

import os
import traceback
from collections.abc import Callable
from typing import BinaryIO

from lospmm.errors import DiskFault, LospmmError
from lospmm.gpu.messages import Answer, channel, receive, send
from lospmm.problem.problem import Problem
from lospmm.toolchain.guard import VARIABLE

#: Builders fill all cores, so the processes that time kernels get priority.
NICENESS = 5


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until they end."""
    problem: Problem | None = None
    while (request := receive(requests)) is not None:
        assert isinstance(request, tuple), "a request is a call"
        function: Callable[..., object]
        function, given, arguments = request
        problem = given or problem
        try:
            answer = Answer(function(problem, *arguments))
        except LospmmError as error:
            answer = Answer(fault=str(error), is_disk=isinstance(error, DiskFault))
        except Exception as error:  # a bug: reported, with the traceback in the process's log
            traceback.print_exc()
            answer = Answer(fault=f"{type(error).__name__}: {error}")
        send(answers, answer)


def main() -> None:
    """Run a builder on standard input and output."""
    os.nice(NICENESS)
    # The compilers started here get a guard of their own. It outlives this process, whose guard must not end it.
    os.environ.pop(VARIABLE, None)
    serve(*channel())
