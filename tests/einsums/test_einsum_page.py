"""docs/einsum.md: its examples run, its forms are those of the tables, and the generated texts are as they were."""

from typing import Any

import numpy as np
import pytest

from lospmm.einsums.gathered import FORM
from lospmm.einsums.products import FORMS
from tests.docs.pages import DOCS, Block, blocks, names, section
from tests.einsums.golden_texts import GOLDEN, texts

PAGE = (DOCS / "einsum.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    python: list[Block] = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(python) == 2
    variables: dict[str, Any] = {}
    for block in python:
        exec(compile("\n" * block.line + block.text, "docs/einsum.md", "exec"), variables)
    assert capsys.readouterr().out == "loops (500,)\n"
    r, k, values, b, c = (variables[name] for name in ("r", "k", "values", "b", "c"))
    expected = np.zeros((40, 32))
    np.add.at(expected, r, values[:, np.newaxis] * b[k])
    assert np.allclose(c, expected, atol=1e-4)


def test_the_forms_are_listed() -> None:
    assert set(names(section(PAGE, "## Expressions"))) >= {*FORMS, FORM}


def test_golden_texts() -> None:
    assert texts() == {path.name: path.read_text() for path in GOLDEN.iterdir()}
