"""What tests/on_gpu runs on a GPU can be made without one: a kernel that no type has shows here first."""

import pytest

from lospmm.problem.device import find_device
from lospmm.problem.lanes import DOUBLE, FLOAT_SUMS
from tests.on_gpu.test_narrow_kernels import EVEN, NARROW, lowered


@pytest.mark.parametrize("number", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", NARROW)
def test_kernels_of_16_bits(shape: str, number: str) -> None:
    _, program = lowered(shape, number, find_device("h200"))
    assert program.words in FLOAT_SUMS


@pytest.mark.parametrize("number", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", EVEN)
def test_kernels_of_two_columns_to_a_thread(shape: str, number: str) -> None:
    _, program = lowered(shape, number, find_device("h200"), thread_words=2)
    assert program.words == DOUBLE
