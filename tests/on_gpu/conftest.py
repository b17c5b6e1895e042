"""The GPU through each library that can drive it."""

from collections.abc import Iterator

import pytest

from lospmm.gpu.driver import DRIVERS, open_driver
from lospmm.gpu.protocol import Driver


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "pycuda":
        pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    driver = open_driver(request.param)
    yield driver
    driver.close()
