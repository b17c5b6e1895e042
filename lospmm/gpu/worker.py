"""The worker process that runs kernels, so that a faulty kernel cannot harm lospmm.

Run as ``python -P -m lospmm.gpu.worker`` by ``lospmm.gpu.process``. It reads requests from standard input and answers
on the original standard output: a pair of a command's name and its task, answered by an ``Answer`` (``messages.py``).
"open" opens the GPU for a problem that follows, "prepare" gives it the problem, and later another one, or all but A if
that is the same. It ends at the end of its input, and after an error that leaves the GPU's context unusable.

To add a command, write a function of the ``Workbench`` and a task, and add a row to ``COMMANDS``.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from lospmm.errors import GpuFault
from lospmm.gpu.clocks import read_clocks
from lospmm.gpu.detect import driver_version
from lospmm.gpu.driver import open_driver
from lospmm.gpu.gate import GateVerdict, Workbench, count_different, prepare, run_and_check
from lospmm.gpu.messages import Answer, Measure, Measurement, Ready, channel, receive, send
from lospmm.gpu.network import time_in
from lospmm.gpu.operands import fill, release
from lospmm.gpu.protocol import Driver


def measure(bench: Workbench, task: Measure) -> Measurement:
    """Check a kernel, time it and, unless the effort is brief, check it again on another C.

    A data race thus has two chances to show; a third is the comparison of two copies of C afterwards.
    """
    driver, operands = bench.driver, bench.operands
    image = task.image
    copies = operands.rotated(task.cache, len(image), driver.l2_bytes())
    # Each module has its own copy of A, in its code or its data.
    functions = [driver.load(image, task.entry) for _ in range(copies if task.cache == "streamed" else 1)]

    def enqueue(copy: int) -> None:
        addresses = [operands.b[copy], operands.c[copy], *operands.residual[copy : copy + 1]]
        driver.launch(functions[copy % len(functions)], task.shape, tuple(map(np.uint64, addresses)))

    before = run_and_check(bench, enqueue, copy=0)
    if before.failure is not None:
        return _refused(bench, before)
    timing = time_in(task.cache, bench, enqueue, copies=copies, effort=task.effort)
    clocks = read_clocks(driver.bus_id())
    last, error = operands.copies - 1, before.max_relative_error
    if task.effort.rechecked:
        after = run_and_check(bench, enqueue, copy=last)
        if after.failure is not None:
            return _refused(bench, GateVerdict(after.max_relative_error, f"right at first, then {after.failure}"))
        error = max(error, after.max_relative_error)
    else:
        enqueue(last)
    if different := count_different(bench, operands.c[0], operands.c[last]):
        return _refused(bench, GateVerdict(error, f"two runs differ in {different} elements"))
    return Measurement(timing, error, None, clocks)


def _refused(bench: Workbench, verdict: GateVerdict) -> Measurement:
    """Return the failure of a kernel that computes wrong results, and restore A and B.

    The kernel may have written over A, B and what passed.
    """
    bench.passed.clear()
    fill(bench.driver, bench.operands, bench.problem)
    return Measurement(None, verdict.max_relative_error, verdict.failure)


def time_proxy(bench: Workbench, task: Measure) -> Measurement:
    """Time a proxy (section 5), whose results are meaningless, without a check. Raises GpuFault."""
    driver, operands = bench.driver, bench.operands
    image = task.image
    function = driver.load(image, task.entry)

    def enqueue(copy: int) -> None:
        driver.launch(function, task.shape, (np.uint64(operands.b[copy]), np.uint64(operands.c[copy])))

    copies = operands.rotated(task.cache, len(image), driver.l2_bytes())
    timing = time_in(task.cache, bench, enqueue, copies=copies, effort=task.effort)
    return Measurement(timing, None, None, read_clocks(driver.bus_id()))


def time_baseline(bench: Workbench, task: object) -> object:
    """Time a library, by a package above this one that is imported when it is first requested."""
    return import_module("lospmm.gpu.libraries.work").run(bench, task)


#: By the name that a request starts with.
COMMANDS: Mapping[str, Callable[[Workbench, Any], object]] = MappingProxyType(
    {"measure": measure, "proxy": time_proxy, "baseline": time_baseline}
)


def serve(requests: BinaryIO, answers: BinaryIO, opener: Callable[[str], Driver]) -> None:
    """Answer requests until they end, or until the GPU's context is lost."""
    driver: Driver | None = None
    bench: Workbench | None = None
    answer = Answer()
    while answer.healthy and (request := receive(requests)) is not None:
        assert isinstance(request, tuple), "a request is a name and a task"
        name, task = request
        try:
            if driver is None:
                driver = opener(task if name == "open" else task.driver)
            if name == "open":
                answer = Answer()
            elif bench is None or name == "prepare":
                if bench is not None:
                    task = replace(bench.problem, **task) if isinstance(task, dict) else task  # the same A
                    release(driver, bench.operands)
                    bench = None
                bench = prepare(task, driver)
                answer = Answer(Ready(driver.device_name(), bench.operands.copies, driver_version()))
            else:
                answer = Answer(COMMANDS[name](bench, task))
        except GpuFault as error:
            answer = Answer(fault=str(error), healthy=bench is not None and _works(bench.driver))
        except Exception as error:  # our bug: answered, with its traceback in the process's log
            traceback.print_exc()
            answer = Answer(fault=f"{type(error).__name__}: {error}", healthy=False)
        send(answers, answer)


def _works(driver: Driver) -> bool:
    """Return whether the context survived an error: after a kernel's fault every call fails."""
    try:
        driver.synchronize()
    except GpuFault:
        return False
    return True


def main() -> None:
    """Answer requests from stdin until it ends."""
    serve(*channel(), open_driver)
    os._exit(0)  # the driver frees everything; destructors of libraries have nothing to add, and may hang


if __name__ == "__main__":
    main()
