"""LightGBM, imported only here and only when a model is trained or asked: that takes a good half of a second."""

from typing import Any

from lospmm.errors import ToolchainFault


def lightgbm() -> Any:
    """The module. Raises ToolchainFault where it, or the library of GNU OpenMP that it needs, is missing."""
    try:
        import lightgbm
    except ImportError as error:
        raise ToolchainFault(f"LightGBM is missing ({error}); pip install lightgbm, or use --ranker none") from None
    except OSError as error:  # the loader's, for a shared library
        raise ToolchainFault(
            f"LightGBM cannot be loaded ({error}): it needs libgomp1 (apt-get install libgomp1), or use --ranker none"
        ) from None
    return lightgbm
