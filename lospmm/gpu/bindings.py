"""Shared parts of both drivers, from cuda.bindings: CUDA graphs, which PyCUDA lacks, and error names."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from cuda.bindings import driver as cu

from lospmm.errors import GpuFault, LospmmError
from lospmm.gpu.protocol import Graph

_NAME = re.compile(r"\bCUDA_ERROR_\w+")


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a call of cuda.bindings, or the tuple of its values. Raises GpuFault."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise GpuFault(f"{status.name}: {_text_of(status)}")
    return values[0] if len(values) == 1 else tuple(values)


@contextmanager
def faults_named() -> Iterator[None]:
    """Convert any exception of a library to a GpuFault with the driver's name of the error, if known."""
    try:
        yield
    except LospmmError:
        raise
    except Exception as error:  # each library has exceptions of its own, some of them private
        raise GpuFault(described(str(error)) or type(error).__name__) from error


def described(message: str) -> str:
    """Rewrite a library's message as one line that starts with the driver's name of the error.

    cuda.core's messages hold the name; PyCUDA's ("cuMemAlloc failed: out of memory") hold the driver's text for it.
    """
    line = " ".join(message.split())
    if found := _NAME.search(line):
        return line[found.start() :]
    call, _, text = line.removesuffix(" -").partition(" failed: ")  # PyCUDA adds a log, which may be empty
    name = _names_by_text().get(text.partition(" - ")[0])
    return line if name is None else f"{name}: {text} ({call})"


@cache
def _names_by_text() -> dict[str, str]:
    return {_text_of(status): status.name for status in cu.CUresult if status != cu.CUresult.CUDA_SUCCESS}


def _text_of(status: cu.CUresult) -> str:
    found, text = cu.cuGetErrorString(status)
    return str(text.decode() if found == cu.CUresult.CUDA_SUCCESS and text is not None else status.name)


class GraphDriver:
    """Part of a ``Driver``: CUDA graphs on its stream."""

    stream: int

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Capture a graph; the mode is relaxed, as a library may load code of its own meanwhile."""
        check(cu.cuStreamBeginCapture(self.stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            enqueue()
        except BaseException:
            cu.cuStreamEndCapture(self.stream)  # its result is useless, but it ends the capture
            raise
        graph = check(cu.cuStreamEndCapture(self.stream))
        try:
            executable = check(cu.cuGraphInstantiate(graph, 0))
        finally:
            check(cu.cuGraphDestroy(graph))
        timed = cu.CUevent_flags.CU_EVENT_DEFAULT.value
        return Graph((executable, check(cu.cuEventCreate(timed)), check(cu.cuEventCreate(timed))))

    def replay_micros(self, graph: Graph) -> float:
        """Run a graph once and time it."""
        executable, start, end = graph.handle
        check(cu.cuEventRecord(start, self.stream))
        check(cu.cuGraphLaunch(executable, self.stream))
        check(cu.cuEventRecord(end, self.stream))
        check(cu.cuEventSynchronize(end))
        return 1000.0 * float(check(cu.cuEventElapsedTime(start, end)))

    def discard(self, graph: Graph) -> None:
        """Free a graph without raising: after a fault there is nothing left to free."""
        executable, start, end = graph.handle
        cu.cuGraphExecDestroy(executable)
        cu.cuEventDestroy(start)
        cu.cuEventDestroy(end)
