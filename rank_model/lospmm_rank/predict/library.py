"""LightGBM's Python package, imported only here and only when a model is trained: that takes one to several seconds.

A model that is only asked needs no more than ``booster.py``.
"""

from typing import Any

from lospmm.errors import ToolchainFault

#: The machine may be a service's, which does not take the option.
_WITHOUT = " on the machine that tunes; where that is no service, --ranker none does without it"


def lightgbm() -> Any:
    """The module. Raises ToolchainFault where it, or the library of GNU OpenMP that it needs, is missing."""
    try:
        import lightgbm
    except ImportError as error:
        raise ToolchainFault(f"LightGBM is missing ({error}); pip install lightgbm{_WITHOUT}") from None
    except OSError as error:  # the loader's, for a shared library
        raise failed_to_load(error) from None
    return lightgbm


def failed_to_load(error: OSError) -> ToolchainFault:
    """What is said of a shared library that the loader refuses."""
    return ToolchainFault(
        f"LightGBM cannot be loaded ({error}): it needs libgomp1 (apt-get install libgomp1){_WITHOUT}"
    )
