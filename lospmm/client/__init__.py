"""A client of the REST service."""

from importlib import import_module
from typing import TYPE_CHECKING

from lospmm.errors import extra_needed

if TYPE_CHECKING:
    from lospmm.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    """Import ``Client`` when it is first used: HTTP takes a while to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra_needed("client", "lospmm.client"):
        return getattr(import_module("lospmm.client.client"), name)
