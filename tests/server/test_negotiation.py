"""The header Accept."""

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from lospmm_server.negotiation import negotiate

JSON, BINARY = OFFERED = ("application/json", "application/octet-stream")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/octet-stream", BINARY),
        ("Application/Octet-Stream ; Q=0.5", BINARY),
        ("text/html, application/octet-stream;q=0.9, */*;q=0.8", BINARY),
        ("application/json;q=0.2, application/octet-stream;q=0.3", BINARY),
        ("application/json;q=0, */*", BINARY),
        ("application/*;q=0.1, application/json;q=0.05", BINARY),
        ("application/octet-stream;q=0, application/*;q=0.5", JSON),
        ("application/json;charset=utf-8", JSON),
        (",, ;, application/octet-stream", BINARY),
    ],
)
def test_the_best_liked_is_chosen(accept: str, chosen: str) -> None:
    assert negotiate(accept, OFFERED) == chosen


@pytest.mark.parametrize("accept", ["text/html", "*/*;q=0", "application/json;q=0.000", "nonsense"])
def test_none(accept: str) -> None:
    with pytest.raises(HTTPException, match="expected one of application/json, application/octet-stream") as refused:
        negotiate(accept, OFFERED)
    assert refused.value.status_code == 406


@given(st.text(alphabet="aj/*;,q=01. ", max_size=40))
def test_any_text_is_answered(accept: str) -> None:
    try:
        assert negotiate(accept, OFFERED) in OFFERED
    except HTTPException as refused:
        assert refused.status_code == 406
