"""LightGBM's Python package, imported only here and only for training: that takes seconds.

For predictions, ``booster.py`` suffices.
"""

from typing import Any

from lospmm.errors import ToolchainFault

#: Advice of error messages; the machine may be a service's, whose clients cannot set the option.
_WITHOUT = " on the machine that tunes, or tune without it: --ranker none (not by a service)"


def lightgbm() -> Any:
    """Return the module. Raises ToolchainFault if it or its GNU OpenMP library is missing."""
    try:
        import lightgbm
    except ImportError as error:
        raise ToolchainFault(f"LightGBM is missing ({error}); pip install 'lospmm[tune]'{_WITHOUT}") from None
    except OSError as error:  # the loader's, for a shared library
        raise failed_to_load(error) from None
    return lightgbm


def failed_to_load(error: OSError) -> ToolchainFault:
    """Return the error for a shared library that the loader refuses."""
    return ToolchainFault(
        f"LightGBM cannot be loaded ({error}): it needs libgomp1 (apt-get install libgomp1){_WITHOUT}"
    )
