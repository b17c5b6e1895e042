"""The emitters write what they wrote before, to the letter."""

import pytest

from tests.golden.renew import files, texts

TEXTS = texts()


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_has_not_changed(name: str) -> None:
    assert files().get(name) == TEXTS[name], "make golden writes them anew; read the diff"


def test_no_golden_file_is_left_over() -> None:
    assert set(files()) == set(TEXTS)


def test_emitting_twice_gives_the_same_text() -> None:
    assert texts() == TEXTS
