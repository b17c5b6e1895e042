"""Forecasts of kernels made of loops: bytes from the L2 cache, instructions, and threads to hide both."""

from dataclasses import dataclass

from lospmm.problem.problem import Problem

#: Microseconds that any launch takes.
LAUNCH_MICROS = 2.5

#: Bytes a cycle and SM that gathers of B's rows reach from L2: measured some 64 of 128 on an H200.
L2_BYTES_PER_CYCLE_AND_SM = 40.0

#: Instructions of single threads that an SM issues in a cycle.
INSTRUCTIONS_PER_CYCLE_AND_SM = 128.0

#: Threads that keep an SM busy.
BUSY_THREADS_PER_SM = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a launch reads and computes."""

    l2_bytes: float
    instructions: float  # of all threads
    threads: float  # of the whole grid
    tensor_flops: float = 0.0  # padded ones too
    tensor_flops_per_cycle_and_sm: float = 1.0


def micros_of(problem: Problem, traffic: Traffic) -> float:
    """Predict the microseconds of a launch: the slowest resource, on the SMs that are used."""
    device = problem.device
    busy = min(1.0, traffic.threads / (device.sms * BUSY_THREADS_PER_SM))
    per_second = device.sms * busy * device.clock_hz
    cycles = max(
        traffic.l2_bytes / L2_BYTES_PER_CYCLE_AND_SM,
        traffic.instructions / INSTRUCTIONS_PER_CYCLE_AND_SM,
        traffic.tensor_flops / traffic.tensor_flops_per_cycle_and_sm,
    )
    return LAUNCH_MICROS + cycles / per_second * 1e6
