"""Registers of a thread of machine code beside accumulators and buffers, computed from the problem."""

from lospmm.codegen.ops import WINDOW_BYTES
from lospmm.codegen.sass.machine import HARDWARE_REGISTERS
from lospmm.codegen.sass.scheduler import ADDRESS_REGISTERS, WINDOW_REGISTERS
from lospmm.problem.lanes import in_lanes, lanes_of
from lospmm.problem.problem import Problem

#: Registers of the residual's address, and of the padding bits of a window.
RESIDUAL_REGISTERS = 2
PADDED_REGISTERS = 1


def reserved_registers(problem: Problem) -> int:
    """Return the registers a thread needs beside accumulators and buffers."""
    matrix, convolution = problem.matrix, problem.convolution
    if convolution is None:
        furthest = (max(matrix.m, matrix.k) - 1) * in_lanes(problem).n
    else:
        furthest = max(convolution.image_elements, (matrix.m - 1) * convolution.pixels)
    far = furthest * lanes_of(problem).stored_bytes >= WINDOW_BYTES // 2
    return ADDRESS_REGISTERS + HARDWARE_REGISTERS + WINDOW_REGISTERS * far + layer_registers(problem)


def layer_registers(problem: Problem) -> int:
    """Return the registers a thread needs for the residual and for a convolution's padding."""
    is_padded = problem.convolution is not None and problem.convolution.is_padded
    return RESIDUAL_REGISTERS * problem.epilogue.residual + PADDED_REGISTERS * is_padded
