"""Register forecast (section 3.2): the registers that a thread will use, before anything is compiled.

A thread holds, for each of its words, an accumulator for each row of its tile, a second one for each long row
(``lospmm.problem.long_rows``), and a buffer for each element of B in flight. If the block has too few registers, long
rows take those of buffers. Addresses and the calling convention take ``DeviceSpec.reserved_registers`` more; if blocks
share a tile, so do the addresses of their mailboxes. Registers are allocated in units, so the forecast is rounded up to
a whole unit: the compiler may use them all. The kernel is compiled with the forecast as ``--maxrregcount``.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.device import DeviceSpec
from lospmm.problem.long_rows import allowed_products, are_long
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Ints, Schedule, Tiling, UnrolledPlan, UnrolledPlans
from lospmm.space.occupancy import allocated_registers, registers_of_block
from lospmm.space.walks import registers_of_passes

#: The most elements of B that are unpacked at a time, if a thread has several words. An element in flight takes one
#: register, an unpacked one takes one for each word (``codegen.sass.double``).
TAKEN_APART = 7

#: Registers for mailboxes, if blocks share a tile: two for their addresses, one for the bytes of a slot.
CLUSTER_REGISTERS = 3

#: Buffers for elements of B that long rows never take.
LEAST_BUFFERS = 8


def least_buffers(split_k: int) -> int:
    """Return the fewest registers for buffers: in the end they hold the addresses of blocks that share the tile.

    Those that a prefetch of 8 or more lacks are of the reserved ones.
    """
    return 2 * split_k - 1 if split_k > 1 else 0


def forecast_registers(rows: int, schedule: Schedule, device: DeviceSpec, seconds: int = 0) -> int:
    """Return the registers per thread for tiles of up to ``rows`` rows, ``seconds`` of them long.

    Above the device's limit if the tile cannot fit. Long rows take a second sum (``lospmm.problem.long_rows``).
    """
    sums = schedule.thread_words * (rows + seconds)
    return int(_forecast(np.array([sums + _beside_rows(schedule)]), device)[0])


def forecast_of_candidate(problem: Problem, candidate: UnrolledPlan) -> int:
    """Return the registers per thread of a candidate's kernel."""
    return int(forecast_of_each(problem, UnrolledPlans.of([candidate]))[0])


def forecast_of_each(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """Return the registers per thread of each candidate, (candidates,).

    Before rows are regrouped, none counts as long.
    """
    seconds = seconds_of_each(problem, candidates)
    needed, given_up = _needed(problem, candidates, seconds)
    forecast = _forecast(needed - given_up, problem.device)
    if all(schedule.walks == 1 for schedule in candidates.schedules):
        return forecast
    prefetch = candidates.by_schedule(lambda schedule: schedule.prefetch)
    walks = candidates.by_schedule(lambda schedule: schedule.walks)
    return np.where(walks > 1, registers_of_passes(candidates.rows + seconds, prefetch), forecast)


def prefetch_of(problem: Problem, candidate: UnrolledPlan) -> int:
    """Return the elements of B in flight in a candidate's kernel.

    Those of its schedule, less the buffers that long rows take if the block has too few registers. A candidate that
    runs its code twice keeps them all.
    """
    if candidate.schedule.walks > 1:
        return candidate.schedule.prefetch
    alone = UnrolledPlans.of([candidate])
    _, given_up = _needed(problem, alone, seconds_of_each(problem, alone))
    return candidate.schedule.prefetch - int(given_up[0])


def _needed(problem: Problem, candidates: UnrolledPlans, long_rows: Ints) -> tuple[Ints, Ints]:
    """Return the registers that each candidate needs, and those of buffers that long rows take.

    Both are (candidates,). Long rows take buffers only if the block has too few registers, and leave LEAST_BUFFERS.
    """
    device = problem.device
    seconds = candidates.thread_words * long_rows
    needed = candidates.thread_words * candidates.rows + seconds + candidates.by_schedule(_beside_rows)
    threads = registers_of_block(candidates.cols, np.ones_like(candidates.cols), device) // device.register_unit
    most = device.registers_per_block // threads // device.register_unit * device.register_unit
    prefetch = candidates.by_schedule(lambda schedule: schedule.prefetch)
    spare = np.minimum(np.maximum(prefetch - LEAST_BUFFERS, 0), seconds)
    missing = needed + device.reserved_registers - np.minimum(most, device.registers_per_thread)
    return needed, np.clip(missing, 0, spare)


def seconds_of_each(problem: Problem, candidates: UnrolledPlans) -> Ints:
    """Return the most long rows in a tile of each candidate, (candidates,)."""
    splits, matrix = candidates.split_k, problem.matrix
    found = np.zeros(len(candidates), np.int64)
    allowed = allowed_products(matrix, problem.dtype)
    for split in np.unique(splits).tolist() if candidates.tilings else ():
        is_long = are_long(matrix, allowed, split)
        if not is_long.any():
            continue
        own = splits == split
        most = np.zeros(len(candidates.tilings), np.int64)
        named = np.bincount(candidates.tiling[own], minlength=len(most))
        for at in np.flatnonzero(named).tolist():
            most[at] = _most_of_a_tile(candidates.tilings[at], is_long)
        found[own] = most[candidates.tiling[own]]
    return found


def _most_of_a_tile(tiling: Tiling, is_long: NDArray[np.bool_]) -> int:
    return int(np.add.reduceat(is_long[tiling.rows], tiling.starts, dtype=np.int64).max()) if tiling.count else 0


def _beside_rows(schedule: Schedule) -> int:
    apart = (schedule.thread_words - 1) * min(schedule.prefetch, TAKEN_APART)
    return schedule.prefetch + apart + CLUSTER_REGISTERS * (schedule.split_k > 1)


def _forecast(figures: Ints, device: DeviceSpec) -> Ints:
    needed = figures + device.reserved_registers
    rounded = np.minimum(allocated_registers(needed, device), device.registers_per_thread)
    return np.maximum(needed, rounded)
