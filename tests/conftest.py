"""A cache of the tests' own: no test reads or leaves anything in the user's. In CI, the same examples every time."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from lospmm.settings import settings
from lospmm.toolchain import discover

# Read when NumPy, SciPy and PyTorch are imported: their threads wait busily for the cores that other tests run on.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# Until all is collected: modules are imported by the hundred, and little of them is garbage.
gc.disable()

# Machines are shared: how long an example takes is no test. Where more than 40 are needed, the test says how many.
hypothesis.settings.register_profile("here", deadline=None, max_examples=40)
# A change that fails in CI fails for whoever looks at it; new examples are for those who can follow them up.
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("here"), derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests of each, by LOSPMM_TEST_SEED: no test may depend on another."""
    if seed := os.environ.get("LOSPMM_TEST_SEED"):
        draw = random.Random(seed)
        places: dict[Path, float] = {}
        for item in items:
            places.setdefault(item.path, draw.random())
        draw.shuffle(items)
        items.sort(key=lambda item: places[item.path])


def pytest_report_header() -> str | None:
    """Name the order of the tests, so that it can be repeated."""
    seed = os.environ.get("LOSPMM_TEST_SEED")
    return f"LOSPMM_TEST_SEED={seed}" if seed else None


def pytest_collection_finish() -> None:
    """Leave what was collected, and PyTorch, out of what the garbage collector looks through each time.

    It looks through the rest, a tenth of a second of imported modules, once in millions of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(7_000, 10, 50)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of one test's own, and nothing remembered of other tests' settings and toolkits."""
    for name in ("LOSPMM_TOOLKIT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOSPMM_CACHE_DIR", str(tmp_path / "cache"))
    remembered = (settings, discover.find_toolkit, discover.find_host_compiler)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()
