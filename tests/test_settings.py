"""What a service has by default in place of a command."""

import os

import pytest

from lospmm.settings import SERVICE_NONZEROS, be_a_service, settings


@pytest.mark.parametrize(
    ("variable", "value", "limit"),
    [
        ("LOSPMM_MAX_NONZEROS", None, SERVICE_NONZEROS),
        ("LOSPMM_MAX_NONZEROS", "", SERVICE_NONZEROS),
        ("LOSPMM_MAX_NONZEROS", "9000000", 9_000_000),
        ("lospmm_max_nonzeros", "9000000", 9_000_000),
    ],
)
def test_a_service_reads_less_unless_it_is_told(
    variable: str, value: str | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {name: text for name, text in os.environ.items() if "NONZEROS" not in name})
    if value is not None:
        monkeypatch.setitem(os.environ, variable, value)
    settings.cache_clear()
    be_a_service()
    assert settings().max_nonzeros == limit
    assert settings().max_unrolled_nonzeros == 4_000_000
