"""The process that builds kernels for another: one Python process builds fewer than a GPU can time.

``lospmm.tuning.builders`` starts it. It reads requests from standard input and answers on what was
standard output, as the process that runs kernels does (``gpu/messages.py``), and ends with its input.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lospmm.errors import LospmmError, ToolchainFault
from lospmm.families import Candidate
from lospmm.gpu.messages import Answer, packed, receive
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled, OnDisk
from lospmm.toolchain.guard import VARIABLE
from lospmm.tuning.build import build, prepare

#: Builders fill all cores: the process that times kernels, and the one that asks it to, go before them.
NICENESS = 5


@dataclass(frozen=True, slots=True, eq=False)
class BuildRequest:
    """A kernel to build. ``problem`` is None where it is that of the order before; ``folder`` is where to leave the
    cubin, None for the answer itself."""

    problem: Problem | None
    candidate: UnrolledPlan | Candidate
    emitter: str
    store: Store
    folder: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrepareRequest:
    """What all builders do together before they build kernels of these. ``problem`` as in an ``BuildRequest``."""

    problem: Problem | None
    entrants: Sequence[Candidate]
    store: Store


@dataclass(frozen=True, slots=True, eq=False)
class CallRequest:
    """Anything else that may be done beside: a function of a module, and what it is given."""

    function: Callable[..., object]
    arguments: tuple[object, ...]


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer orders until they end."""
    problem: Problem | None = None
    while (order := receive(requests)) is not None:
        try:
            if isinstance(order, CallRequest):
                answer = Answer(order.function(*order.arguments))
            else:
                assert isinstance(order, BuildRequest | PrepareRequest)
                problem = order.problem or problem
                assert problem is not None, "the first order names the problem"
                if isinstance(order, PrepareRequest):
                    prepare(problem, order.entrants, order.store)
                    answer = Answer()
                else:
                    answer = Answer(_built(problem, order))
        except LospmmError as error:
            answer = Answer(fault=str(error))
        except Exception as error:  # ours: told, and kept whole in the log of the process
            traceback.print_exc()
            answer = Answer(fault=f"{type(error).__name__}: {error}")
        answers.write(packed(answer))
        answers.flush()


def _built(problem: Problem, order: BuildRequest) -> Compiled | OnDisk:
    built = build(problem, order.candidate, order.emitter, store=order.store, workers=1).compiled
    return built if order.folder is None else on_disk(built, order.folder)


def on_disk(built: Compiled, folder: Path) -> OnDisk:
    """Raises ToolchainFault where the disk fails."""
    try:
        number, name = tempfile.mkstemp(".cubin", dir=folder)
        with os.fdopen(number, "wb") as file:
            file.write(built.cubin)
    except OSError as error:
        raise ToolchainFault(f"{folder}: cannot be written: {error.strerror}") from None
    return OnDisk(Path(name), built.entry, built.launch)


def main() -> None:
    os.nice(NICENESS)
    # Its own compilers have a guard of its own, which outlives it: the one that ends this process must not end that.
    os.environ.pop(VARIABLE, None)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not stand between answers
    serve(sys.stdin.buffer, answers)
