"""What a launch hands to the driver: configuration and arguments, packed as cuLaunchKernelEx reads them."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lospmm.errors import GpuFault
from lospmm.gpu import launcher
from lospmm.gpu.launcher import Launcher
from lospmm.problem.launch import Launch

SHAPE = Launch((3, 4, 5), 128, shared_bytes=64 << 10)
FUNCTION = 0xF00D


class Driver:
    """libcuda, as far as a launch needs it."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.shared_bytes: list[int] = []
        self.status = 0
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = kind(self._launch)

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        module._obj.value = 1
        return 0 if image == b"cubin" else 200

    def cuModuleGetFunction(self, function: Any, _module: Any, entry: bytes) -> int:  # noqa: N802
        function._obj.value = FUNCTION
        return 0 if entry == b"entry" else 500

    def cuFuncSetAttribute(self, _function: Any, attribute: int, value: Any) -> int:  # noqa: N802
        assert attribute == 8
        self.shared_bytes.append(value.value)
        return 0

    def _launch(self, config: int, function: int, pointers: int, extra: int | None) -> int:
        assert function == FUNCTION and extra is None
        seen = ctypes.cast(config, ctypes.POINTER(launcher._Config)).contents
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        values = {name: getattr(seen, name) for name, _ in launcher._Config._fields_}
        self.launches.append(values | {"arguments": [at[place].contents.value for place in range(3)]})
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(launcher, "_library", lambda: driver)
    monkeypatch.setattr(launcher, "_check", _check)
    return driver


def _check(status: int) -> None:
    if status:
        raise GpuFault(f"status {status}")


def test_the_configuration_lies_as_the_driver_has_it() -> None:
    offsets = {name: getattr(launcher._Config, name).offset for name, _ in launcher._Config._fields_}
    # cuda.h: seven unsigned, then a stream, a pointer to attributes and their number.
    assert list(offsets.values()) == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert ctypes.sizeof(launcher._Config) == 56


def test_a_launch(driver: Driver) -> None:
    launch = Launcher(b"cubin", "entry", SHAPE)
    assert driver.shared_bytes == [64 << 10]
    assert launch(7, 1 << 40, 2 << 40)
    assert launch(0, 3, 4, 5)
    first, second = driver.launches
    assert [first[f"grid_{axis}"] for axis in "xyz"] == [3, 4, 5]
    assert [first[f"block_{axis}"] for axis in "xyz"] == [128, 1, 1]
    assert (first["shared_bytes"], first["stream"], first["attribute_count"]) == (64 << 10, 7, 0)
    assert first["arguments"] == [1 << 40, 2 << 40, 0]
    assert (second["stream"], second["arguments"]) == (None, [3, 4, 5])


def test_threads_do_not_mix_their_arguments(driver: Driver) -> None:
    launch = Launcher(b"cubin", "entry", Launch((1, 1, 1), 32))
    assert driver.shared_bytes == []

    def work(own: int) -> None:
        for at in range(200):
            launch(own, own * 1000 + at, own, own)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 800
    assert all(one["stream"] == one["arguments"][1] == one["arguments"][0] // 1000 for one in driver.launches)


def test_what_goes_wrong(driver: Driver) -> None:
    with pytest.raises(GpuFault, match="status 200"):
        Launcher(b"other", "entry", SHAPE)
    with pytest.raises(GpuFault, match="status 500"):
        Launcher(b"cubin", "other", SHAPE)
    launch = Launcher(b"cubin", "entry", SHAPE)
    driver.status = 201  # no context in this thread
    assert not launch(0, 1, 2)
    driver.status = 700
    with pytest.raises(GpuFault, match="status 700"):
        launch(0, 1, 2)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    launcher._library.cache_clear()
    monkeypatch.setattr(launcher, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": absent}))
    with pytest.raises(GpuFault, match=r"libcuda.so.1: cannot open"):
        Launcher(b"cubin", "entry", SHAPE)
