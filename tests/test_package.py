"""The names of the package, and what importing it alone brings."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

import lospmm
from lospmm.errors import BadMatrix
from lospmm.matrix.csr import from_dense


def test_importing_the_package_alone_is_light() -> None:
    """Every module of it imports the package first: it must not import them all."""
    code = "import sys, lospmm; sys.exit('numpy' in sys.modules or not callable(lospmm.tune))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_matrix_has_the_type_that_messages_name() -> None:
    matrix = from_dense(np.eye(2))
    assert type(matrix) is lospmm.SparseMatrix
    with pytest.raises(BadMatrix, match=r"a lospmm\.SparseMatrix or a path$"):
        lospmm.tune([[1.0]], 8, device="h200")


def test_the_package_has_no_other_names() -> None:
    assert all(hasattr(lospmm, name) for name in lospmm.__all__)
    assert not hasattr(lospmm, "melody")
    assert {*lospmm.__all__} <= {*dir(lospmm)}, "what completion offers"


def test_everything_names_one_version() -> None:
    folder = Path(__file__).parents[1]
    cited = yaml.safe_load((folder / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and {"title", "message", "authors"} <= cited.keys()
    native = tomllib.loads((folder / "native/pyproject.toml").read_text())["project"]
    assert cited["version"] == native["version"] == lospmm.__version__
