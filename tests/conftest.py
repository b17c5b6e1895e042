"""A cache of the tests' own: no test reads or leaves anything in the user's. In CI, the same examples every time."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from lospmm.settings import settings

# A change that fails in CI fails for whoever looks at it; new examples are for those who can follow them up.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        settings.cache_clear()
        yield
    settings.cache_clear()
