"""Trained models, loaded and evaluated through LightGBM's C interface (``LightGBM/c_api.h``).

LightGBM's Python package imports scikit-learn, which takes longer than a search needs for all its scores. Its library
needs none of that.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm_rank.predict.library import failed_to_load, lightgbm

#: Where the package keeps its library.
LIBRARY_FILE = Path("lib", "lib_lightgbm.so")

#: C_API_DTYPE_FLOAT64 and C_API_PREDICT_NORMAL of c_api.h; all trees, from the first on.
_FLOAT64, _NORMAL, _FIRST, _ALL = 1, 0, 0, -1
_ROW_MAJOR = 1


class NotAModel(Exception):
    """The reason why LightGBM refuses a file, in one line."""


class Booster:
    """The model of a file, for the life of the process; ``names`` are its features, ``trees`` their count.

    Raises NotAModel, and ToolchainFault without LightGBM.
    """

    def __init__(self, path: Path) -> None:
        self._library = _library()
        self._handle, trees = ctypes.c_void_p(), ctypes.c_int()
        self._call(
            "LGBM_BoosterCreateFromModelfile", str(path).encode(), ctypes.byref(trees), ctypes.byref(self._handle)
        )
        self.trees = trees.value
        self.names = _names(path)

    def predict(self, rows: NDArray[np.float64], *, num_threads: int) -> NDArray[np.float64]:
        """Return the model's value of each of ``rows`` (rows, features): (rows,)."""
        assert rows.ndim == 2 and rows.shape[1] == len(self.names), "one column for each feature"
        rows = np.ascontiguousarray(rows, dtype=np.float64)
        found, count = np.empty(len(rows)), ctypes.c_int64()
        if len(rows):
            self._call(
                "LGBM_BoosterPredictForMat",
                self._handle,
                ctypes.c_void_p(rows.ctypes.data),
                _FLOAT64,
                ctypes.c_int32(rows.shape[0]),
                ctypes.c_int32(rows.shape[1]),
                _ROW_MAJOR,
                _NORMAL,
                _FIRST,
                _ALL,
                f"num_threads={num_threads}".encode(),
                ctypes.byref(count),
                ctypes.c_void_p(found.ctypes.data),
            )
            assert count.value == len(found), "one number for each row"
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments):
            words: bytes = self._library.LGBM_GetLastError()
            raise NotAModel(" ".join(words.decode(errors="replace").split()))


@cache
def _library() -> Any:
    """Load LightGBM's library. Raises ToolchainFault if it, or the GNU OpenMP that it needs, is missing."""
    spec = find_spec("lightgbm")
    file = None if spec is None or spec.origin is None else Path(spec.origin).parent / LIBRARY_FILE
    if file is None or not file.is_file():  # the package knows where else it is
        library = lightgbm().basic._LIB
    else:
        try:
            library = ctypes.CDLL(str(file))
        except OSError as error:
            raise failed_to_load(error) from None
    library.LGBM_GetLastError.restype = ctypes.c_char_p
    return library


def _names(path: Path) -> list[str]:
    """Return the names of the features, which the file has on one line of its head."""
    mark = "feature_names="
    with path.open(encoding="utf-8", errors="replace") as lines:
        return next((line.removeprefix(mark).split() for line in lines if line.startswith(mark)), [])
