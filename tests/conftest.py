"""A cache of the tests' own: no test reads or leaves anything in the user's."""

from collections.abc import Iterator

import pytest

from lospmm.settings import settings


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSPMM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        settings.cache_clear()
        yield
    settings.cache_clear()
