"""A proxy in the worker process: the worker's command "proxy".

The results of a proxy (section 5) are meaningless, so it is timed without a check.
"""

from typing import TYPE_CHECKING

import numpy as np

from lospmm.gpu.clocks import read_clocks
from lospmm.gpu.messages import Measure, Measurement
from lospmm.gpu.network import time_in

if TYPE_CHECKING:
    from lospmm.gpu.worker import Workbench

#: The worker's name for ``run``, in its table of commands.
COMMAND = "proxy"


def run(bench: "Workbench", task: Measure) -> Measurement:
    """Time a program of B and C without the gate. Raises GpuFault."""
    driver, operands = bench.driver, bench.operands
    image = task.image
    function = driver.load(image, task.entry)

    def enqueue(copy: int) -> None:
        driver.launch(function, task.shape, (np.uint64(operands.b[copy]), np.uint64(operands.c[copy])))

    copies = operands.rotated(task.cache, len(image), driver.l2_bytes())
    timing = time_in(task.cache, driver, bench.gate, operands, enqueue, copies=copies, effort=task.effort)
    return Measurement(timing, None, None, read_clocks(driver.bus_id()))
